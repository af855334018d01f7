"""The real models give what transformers gives when it reads the same GGUF files by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import new_cache, run_step
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvist.loading import LoadedModel, load

POSITIONS = 2_000
CHUNK = 500  # Gemma's logits of all positions at once would take 2 GB


@dataclass(frozen=True)
class RealModel:
    path: Path
    oracle: PreTrainedModel
    tokens: list[int]


# Through a module's parameter, so that a model is read once for all its tests and dropped before the next.
@pytest.fixture(scope="module", params=["smollm2_gguf", "gemma3_gguf"])
def real(request: pytest.FixtureRequest, alice: str) -> RealModel:
    path: Path = request.getfixturevalue(request.param)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = load(str(path), "bf16").tokenizer.encode(alice)[:POSITIONS]
    assert len(tokens) == POSITIONS
    return RealModel(path, oracle, tokens)


def bf16_twin(oracle: PreTrainedModel) -> PreTrainedModel:
    # Built anew: converting a model in place would round its rope frequencies too.
    twin = AutoModelForCausalLM.from_config(oracle.config, dtype=torch.bfloat16).eval()
    twin.load_state_dict(oracle.state_dict())
    return twin


def oracle_logits(oracle: PreTrainedModel, tokens: list[int]) -> Iterator[torch.Tensor]:
    """Float32 logits of a text, a chunk of rows at a time."""
    hidden = oracle.model(torch.tensor([tokens])).last_hidden_state[0]
    return (oracle.lm_head(rows).float() for rows in hidden.split(CHUNK))


def our_logits(ours: LoadedModel, kv_format: str, tokens: list[int]) -> Iterator[torch.Tensor]:
    cache = new_cache(ours.decoder, kv_format)
    sequence = cache.open()
    hidden = run_step(ours.decoder.hidden_states, cache, {sequence: tokens})[sequence]
    return (ours.decoder.logits(rows) for rows in hidden.split(CHUNK))


@torch.inference_mode()
def test_float32_logits_are_those_of_transformers(real: RealModel) -> None:
    """Within 1e-3, where the logits reach 40: 30 layers and sums of 1,536 products in another order."""
    found = our_logits(load(str(real.path), "fp32"), "fp32", real.tokens)
    for ours, theirs in zip(found, oracle_logits(real.oracle, real.tokens), strict=True):
        assert (ours - theirs).abs().max() < 1e-3


@torch.inference_mode()
def test_bf16_is_as_close_to_float32_as_transformers_is_in_bf16(real: RealModel) -> None:
    """Not to the same tokens as theirs: a difference in the last bit of bf16 changes the likeliest token at about one
    position in thirty, theirs against theirs as well, and ours does not round the weights of attention.
    """
    exact = oracle_logits(real.oracle, real.tokens)
    theirs = oracle_logits(bf16_twin(real.oracle), real.tokens)
    ours = our_logits(load(str(real.path), "bf16"), "bf16", real.tokens)
    same, divergence = Counter[str](), Counter[str]()
    for truth, their_rows, our_rows in zip(exact, theirs, ours, strict=True):
        expected = truth.log_softmax(-1)
        for name, rows in (("theirs", their_rows), ("ours", our_rows)):
            same[name] += int((rows.argmax(-1) == truth.argmax(-1)).sum())
            divergence[name] += kl_div(rows.log_softmax(-1), expected, log_target=True, reduction="sum").item()
        same["both"] += int((our_rows.argmax(-1) == their_rows.argmax(-1)).sum())
    assert same["ours"] >= same["theirs"] - 0.005 * POSITIONS
    assert divergence["ours"] < 1.05 * divergence["theirs"]
    assert same["both"] >= 0.96 * POSITIONS
