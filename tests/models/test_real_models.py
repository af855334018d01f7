"""The real models give what transformers gives when it reads the same GGUF files by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import new_cache, run_step
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


@torch.inference_mode()
def compare(
    oracle: PreTrainedModel,
    ours: LoadedModel,
    tokens: list[int],
    kv_format: str,
    measure: Callable[[torch.Tensor, torch.Tensor], float],
) -> list[float]:
    """`measure(ours, oracle's)` of the logits of one long text, computed in one step, a chunk of rows at a time.

    In one step, since PyTorch's attention rounds differently for other numbers of queries, and in bf16 a difference in
    the last bit changes the likeliest token at about one position in thirty: theirs against theirs as well.
    """
    cache = new_cache(ours.decoder, kv_format)
    sequence = cache.open()
    hidden = run_step(ours.decoder.hidden_states, cache, {sequence: tokens})[sequence]
    expected = oracle.model(torch.tensor([tokens])).last_hidden_state[0]
    return [
        measure(ours.decoder.logits(ours_rows), oracle.lm_head(oracle_rows).float())
        for ours_rows, oracle_rows in zip(hidden.split(CHUNK), expected.split(CHUNK), strict=True)
    ]


def test_float32_logits_are_those_of_transformers(real: RealModel) -> None:
    """Within 1e-3, where the logits reach 40: 30 layers and sums of 1,536 products in another order."""
    ours = load(str(real.path), "fp32")
    worst = compare(real.oracle, ours, real.tokens, "fp32", lambda a, b: (a - b).abs().max().item())
    assert max(worst) < 1e-3


def test_bf16_gives_the_same_top_token_at_99_percent(real: RealModel) -> None:
    # Built anew: converting a model in place would round its rope frequencies too.
    oracle = AutoModelForCausalLM.from_config(real.oracle.config, dtype=torch.bfloat16).eval()
    oracle.load_state_dict(real.oracle.state_dict())
    ours = load(str(real.path), "bf16")
    same = compare(oracle, ours, real.tokens, "bf16", lambda a, b: (a.argmax(-1) == b.argmax(-1)).sum().item())
    assert sum(same) >= 0.99 * POSITIONS
