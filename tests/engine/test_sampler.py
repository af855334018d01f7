from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from kvist.config import SamplingParams
from kvist.engine.sampler import Drawn, SamplingState, candidates, sample
from kvist.errors import NumericsError, OptionError


def slow_candidates(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Temperature, top_k, top_p, min_p, one after another, each renormalising."""

    def shares(kept: dict[int, float]) -> dict[int, float]:
        largest = max(kept.values())
        weights = {i: math.exp(logit - largest) for i, logit in kept.items()}
        return {i: weight / sum(weights.values()) for i, weight in weights.items()}

    kept = {i: logit / params.temperature for i, logit in enumerate(logits)}
    best_first = sorted(kept, key=lambda i: (-kept[i], i))
    if params.top_k:
        best_first = best_first[: params.top_k]
        kept = {i: kept[i] for i in best_first}
    if params.top_p < 1:
        before, nucleus = 0.0, []
        for i in best_first:
            if before < params.top_p:
                nucleus.append(i)
            before += shares(kept)[i]
        kept = {i: kept[i] for i in nucleus}
    probabilities = shares(kept)
    kept = {i: kept[i] for i in kept if probabilities[i] >= params.min_p * max(probabilities.values())}
    return shares(kept)


@pytest.mark.parametrize("seed", range(150))
def test_candidates_are_those_of_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 30)
    logits = [rng.choice([rng.gauss(0, 3), float(rng.randrange(4))]) for _ in range(size)]  # ties among them
    params = SamplingParams(
        temperature=rng.choice([0.05, 0.7, 1.0, 3.0]),
        top_k=rng.choice([0, 1, 2, 5, 40]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.03, 1e-9]),
        min_p=rng.choice([0.0, 0.07, 0.31, 1.0]),
    )
    ids, weights = candidates(torch.tensor(logits), params)
    expected = slow_candidates(logits, params)
    assert set(ids.tolist()) == set(expected)
    got = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("seed", range(25))
def test_probabilities_are_those_of_transformers(seed: int) -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rng = random.Random(seed)
    logits = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * 4
    prompt = [rng.randrange(500) for _ in range(50)]
    params = SamplingParams(temperature=0.8, top_k=rng.choice([3, 60]), top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    scores = logits[None]
    for process in (
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(params.top_k),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ):
        scores = process(torch.tensor([prompt]), scores)
    ids, weights = candidates(SamplingState(params, prompt, 500).adjust(logits), params)
    got = torch.zeros(500).index_put((ids,), weights / weights.sum())
    torch.testing.assert_close(got, scores[0].softmax(0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("seed", range(40))
def test_bias_and_penalties_are_those_of_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    size = 20
    params = SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 0.6, -0.4]),
        frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
        logit_bias=rng.choice([{}, {3: 2.5, 7: -math.inf}]),
    )
    prompt = [rng.randrange(size) for _ in range(6)]
    generated = [rng.randrange(size) for _ in range(12)]
    logits = [rng.gauss(0, 3) for _ in range(size)]
    state = SamplingState(params, prompt, size)
    for token_id in generated:
        state.count(token_id)

    expected = []
    for token_id, raw in enumerate(logits):
        logit = raw + params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in generated:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * generated.count(token_id)
        logit -= params.presence_penalty * (token_id in generated)
        expected.append(logit)
    row = torch.tensor(logits)
    assert state.adjust(row).tolist() == pytest.approx(expected, rel=1e-5)
    assert row.tolist() == pytest.approx(logits)  # the raw logits are untouched


def draw(logits: torch.Tensor, *params: SamplingParams) -> list[int]:
    drawn = sample(logits, [SamplingState(one, [], logits.shape[1]) for one in params])
    assert all(isinstance(one, Drawn) for one in drawn)
    return [one.token_id for one in drawn if isinstance(one, Drawn)]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2, 1, 2], [5, 5, 5, 5]])
    assert draw(logits, SamplingParams(), SamplingParams()) == [1, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_k=1, seed=3),
        SamplingParams(temperature=1, top_p=1e-12, seed=3),
        SamplingParams(temperature=1e30, top_k=9, top_p=1e-12, min_p=1, seed=3),
    ],
)
def test_one_candidate_left_is_the_greedy_token_among_equals_too(params: SamplingParams) -> None:
    logits = torch.tensor([[0.0, 2, 1, 2, 2]])
    assert [draw(logits, params)[0] for _ in range(10)] == [1] * 10


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.001, -300, -math.inf]])
    for seed in range(20):
        assert draw(logits, SamplingParams(temperature=temperature, top_p=0.99, min_p=0.01, seed=seed)) == [1]


def test_a_huge_temperature_is_uniform_and_never_draws_what_is_banned() -> None:
    params = SamplingParams(temperature=1e300, logit_bias={1: -math.inf}, seed=5)
    state = SamplingState(params, [], 4)
    counts = Counter()
    for _ in range(3000):
        (drawn,) = sample(torch.tensor([[9.0, 99.0, -9.0, 0.0]]), [state])
        assert isinstance(drawn, Drawn)
        counts[drawn.token_id] += 1
    assert set(counts) == {0, 2, 3}
    assert all(abs(count - 1000) < 100 for count in counts.values())


@pytest.mark.parametrize("point", [0.0, 1 - 2**-53])
def test_a_banned_token_is_not_drawn_at_the_ends_of_the_scale_either(point: float) -> None:
    state = SamplingState(SamplingParams(temperature=1), [], 3)
    state.random.random = lambda: point  # type: ignore[method-assign]
    assert sample(torch.tensor([[-math.inf, 0.3, -math.inf]]), [state]) == [Drawn(1, None)]


def test_draws_follow_the_probabilities() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.1]
    state = SamplingState(SamplingParams(temperature=1, seed=1), [], 4)
    logits = torch.tensor([probabilities]).log()
    counts = Counter(one.token_id for _ in range(4000) for one in sample(logits, [state]) if isinstance(one, Drawn))
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx(probabilities, abs=0.025)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()  # with ties
    params = [
        SamplingParams(temperature=i % 3, top_k=[0, 5, 50][i % 3], top_p=[1, 0.8][i % 2], min_p=i % 5 / 10, seed=i)
        for i in range(40)
    ]
    together = draw(logits, *params)
    assert together == [draw(row[None], one)[0] for row, one in zip(logits, params, strict=True)]
    assert together == draw(logits.flip(0), *params[::-1])[::-1]


def test_only_the_row_that_is_no_number_fails() -> None:
    logits = torch.zeros(5, 3)
    logits[1, 2] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    logits[4] = torch.tensor([-math.inf, -math.inf, 1])
    greedy = sample(logits, [SamplingState(SamplingParams(), [], 3)] * 5)
    drawing = sample(logits, [SamplingState(SamplingParams(temperature=1, top_p=0.5), [], 3) for _ in range(5)])
    for outcomes in (greedy, drawing):
        assert [isinstance(one, NumericsError) for one in outcomes] == [False, True, True, True, False]
        assert outcomes[4] == Drawn(2, None)


def test_only_the_row_that_stumbles_fails() -> None:
    params = SamplingParams(temperature=1)
    object.__setattr__(params, "top_k", 2.5)
    good, bad = SamplingState(SamplingParams(), [], 3), SamplingState(params, [], 3)
    first, second, third = sample(torch.tensor([[0.0, 1, 5]] * 3), [good, bad, good])
    assert first == third == Drawn(2, None)
    assert isinstance(second, TypeError)


def test_a_bias_that_bans_everything_is_refused() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(3), -math.inf))
    (outcome,) = sample(torch.zeros(1, 3), [SamplingState(params, [], 3)])
    assert isinstance(outcome, OptionError)


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    params = SamplingParams(temperature=0.1, logit_bias={0: 50.0}, logprobs=3)
    (outcome,) = sample(logits, [SamplingState(params, [], 4)])
    expected = logits[0].log_softmax(0).tolist()
    assert isinstance(outcome, Drawn)
    assert outcome.logprob is not None
    assert outcome.token_id == outcome.logprob.token_id == 0
    assert outcome.logprob.logprob == pytest.approx(expected[0])
    assert [token_id for token_id, _ in outcome.logprob.top] == [2, 3, 1]
    assert [logprob for _, logprob in outcome.logprob.top] == pytest.approx([expected[i] for i in (2, 3, 1)])


@pytest.mark.parametrize(("logprobs", "length"), [(0, 0), (2, 2), (100, 4)])
def test_logprobs_says_how_many(logprobs: int, length: int) -> None:
    (outcome,) = sample(torch.zeros(1, 4), [SamplingState(SamplingParams(logprobs=logprobs), [], 4)])
    assert isinstance(outcome, Drawn)
    assert outcome.logprob is not None
    assert len(outcome.logprob.top) == length


def test_a_large_vocabulary_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_sizes = []
    argsort = torch.Tensor.argsort

    def recording(tensor: torch.Tensor, **options: bool) -> torch.Tensor:
        sorted_sizes.append(len(tensor))
        return argsort(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "argsort", recording)
    row = torch.randn(262_144, generator=torch.Generator().manual_seed(0)) * 4
    candidates(row, SamplingParams(temperature=1, top_k=64, top_p=0.9))
    candidates(row, SamplingParams(temperature=1, top_p=0.9))
    assert len(sorted_sizes) == 3
    assert sorted_sizes[:2] == [64, 64]
    assert sorted_sizes[2] < 60_000
