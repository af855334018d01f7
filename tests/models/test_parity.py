"""Every family gives the logits that transformers gives, on tiny random models in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import TINY_CONFIGS, TinyModel, new_cache, run_step, tiny_model

TOLERANCE = 1e-4


@pytest.fixture(params=sorted(TINY_CONFIGS))
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> TinyModel:
    return tiny_model(request.param, tmp_path)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (length,), generator=generator).tolist()


@torch.inference_mode()
def oracle_logits(tiny: TinyModel, tokens: list[int]) -> torch.Tensor:
    return tiny.oracle(torch.tensor([tokens])).logits[0]


def worst(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().max() > 0.5, "the logits must be far from zero for the tolerance to mean anything"
    return (ours - expected).abs().max().item()


def test_prompt_and_decoding_give_the_logits_of_transformers(tiny: TinyModel) -> None:
    tokens = prompt(23, seed=1)
    cache = new_cache(tiny.decoder)
    sequence = cache.open()
    logits = run_step(tiny.decoder, cache, {sequence: tokens})[sequence]
    assert worst(logits, oracle_logits(tiny, tokens)) < TOLERANCE
    for _ in range(20):
        tokens.append(int(logits[-1].argmax()))
        logits = run_step(tiny.decoder, cache, {sequence: tokens[-1:]})[sequence]
        assert worst(logits[-1], oracle_logits(tiny, tokens)[-1]) < TOLERANCE


def test_a_ragged_batch_gives_each_sequence_its_own_logits(tiny: TinyModel) -> None:
    """Sequences of different lengths, joining in different steps, some decoding while others prefill."""
    texts = [prompt(length, seed=length) for length in (1, 6, 7, 8, 31)]
    cache = new_cache(tiny.decoder)
    ids = [cache.open() for _ in texts]
    run_step(tiny.decoder, cache, dict(zip(ids[:3], texts[:3], strict=True)))
    for step in range(20):
        news = {sequence: prompt(1, seed=100 * sequence + step) for sequence in ids[:3]}
        if step == 0:
            news |= dict(zip(ids[3:], texts[3:], strict=True))
        elif step > 1:
            news |= {sequence: prompt(1 + step % 3, seed=100 * sequence + step) for sequence in ids[3:]}
        for text, sequence in zip(texts, ids, strict=True):
            if sequence in news and cache.length(sequence):
                text.extend(news[sequence])
        logits = run_step(tiny.decoder, cache, news, every_row=False)
        for sequence, row in logits.items():
            assert worst(row[0], oracle_logits(tiny, texts[sequence])[-1]) < TOLERANCE


def test_a_prompt_in_chunks_gives_the_same_logits(tiny: TinyModel) -> None:
    tokens = prompt(40, seed=3)
    cache = new_cache(tiny.decoder)
    sequence = cache.open()
    chunks = [
        run_step(tiny.decoder, cache, {sequence: chunk})[sequence] for chunk in (tokens[:9], tokens[9:10], tokens[10:])
    ]
    assert worst(torch.cat(chunks), oracle_logits(tiny, tokens)) < TOLERANCE


def test_rewinding_forgets_what_came_after(tiny: TinyModel) -> None:
    tokens = prompt(20, seed=4)
    cache = new_cache(tiny.decoder)
    sequence = cache.open()
    run_step(tiny.decoder, cache, {sequence: tokens[:12] + prompt(9, seed=5)})
    cache.rewind(sequence, 12)
    logits = run_step(tiny.decoder, cache, {sequence: tokens[12:]})[sequence]
    assert worst(logits, oracle_logits(tiny, tokens)[12:]) < TOLERANCE
