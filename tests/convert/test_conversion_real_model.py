"""SmolLM2-135M, from 3 KV heads to 1 and back: what each method leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from convert_fakes import same_bits, state_of
from tiny import new_cache, run_step

from kvist.convert import expand, to_gqa
from kvist.convert.gqa_config import METHODS, GqaConfig
from kvist.loading import key_calibration, load

CALIBRATION_TEXT = Path(key_calibration.__file__).with_name("calibration_text.txt")
WINDOW = 512


def loss(directory: Path, text: str) -> float:
    """Nats per token on the first window of a text."""
    loaded = load(directory, "fp32")
    token_ids = loaded.tokenizer.encode(text, add_special_tokens=False)[:WINDOW]
    cache = new_cache(loaded.decoder)
    sequence = cache.open()
    logits = run_step(loaded.decoder, cache, {sequence: token_ids})[sequence]
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).item()


@pytest.fixture
def own_cache() -> None:
    """The prepared copy of the real model is kept where it is."""


def test_each_method_keeps_more_than_the_one_before(smollm2_gguf, alice, tmp_path):
    losses = {}
    for method in METHODS:
        config = GqaConfig(method, window=WINDOW, windows=4)
        calibration = CALIBRATION_TEXT if config.is_calibrated else None
        to_gqa(smollm2_gguf, tmp_path / method, 1, config=config, text=calibration)
        losses[method] = loss(tmp_path / method, alice)
    assert losses["fitted"] < losses["aligned"] < losses["mean"] < losses["first"], losses
    assert losses["fitted"] < 6, losses


def test_expanding_and_merging_back_gives_the_bytes(smollm2_gguf, tmp_path):
    expand(smollm2_gguf, tmp_path / "mha")
    to_gqa(tmp_path / "mha", tmp_path / "back", 3)
    expand(tmp_path / "back", tmp_path / "again")
    assert same_bits(state_of(tmp_path / "again"), state_of(tmp_path / "mha"))
    to_gqa(smollm2_gguf, tmp_path / "one", 1)
    to_gqa(tmp_path / "back", tmp_path / "other", 1)
    assert same_bits(state_of(tmp_path / "one"), state_of(tmp_path / "other")), "back is not what the source was"
