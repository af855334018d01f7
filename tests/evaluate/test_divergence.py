"""The figures of an evaluation are those that their definitions give."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from kvist.errors import NumericsError
from kvist.evaluate.divergence import Predictions, ReferenceBlock, block_rows, mean, percentile, perplexity

ROWS, VOCAB_SIZE = 50, 1000


@pytest.fixture
def targets() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))


def noise(size: float) -> torch.Tensor:
    return size * torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("size", [0.01, 0.3, 10.0])
def test_divergence_is_that_of_the_definition_in_float64(logits, targets, size):
    tested = logits + noise(size)
    found = ReferenceBlock(logits, targets).compare(tested)
    log_p, log_q = logits.double().log_softmax(-1), tested.double().log_softmax(-1)
    expected = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    assert expected.min() > 0
    torch.testing.assert_close(found.kl.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_divergence_of_a_ten_thousandth_is_not_lost_in_rounding(logits, targets):
    tested = logits + noise(0.02)
    log_p, log_q = logits.double().log_softmax(-1), tested.double().log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    assert expected < 2e-4
    assert mean(ReferenceBlock(logits, targets).compare(tested).kl) == pytest.approx(expected, rel=1e-3)


def test_the_same_logits_do_not_diverge_at_all(logits, targets):
    reference = ReferenceBlock(logits, targets)
    found = reference.compare(logits.clone())
    assert torch.equal(found.kl, torch.zeros(ROWS))
    assert found.agrees.all()
    assert torch.equal(found.surprisal, reference.surprisal)


def test_divergence_is_not_symmetric_and_starts_from_the_reference():
    sure, unsure = torch.tensor([[20.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    target = torch.tensor([0])
    assert ReferenceBlock(sure, target).compare(unsure).kl.item() == pytest.approx(math.log(2), rel=1e-4)
    assert ReferenceBlock(unsure, target).compare(sure).kl.item() == pytest.approx(10 - math.log(2), rel=1e-4)


def test_agreement_is_of_the_likeliest_tokens():
    reference = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    tested = torch.tensor([[1.0, 1.1, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.1]])
    found = ReferenceBlock(reference, torch.tensor([0, 0, 0])).compare(tested)
    assert found.agrees.tolist() == [True, False, True]


def test_perplexity_is_e_to_the_mean_cross_entropy(logits, targets):
    tested = logits + noise(1.0)
    reference = ReferenceBlock(logits, targets)
    assert perplexity(reference.surprisal) == pytest.approx(cross_entropy(logits, targets).exp().item(), rel=1e-5)
    found = reference.compare(tested)
    assert perplexity(found.surprisal) == pytest.approx(cross_entropy(tested, targets).exp().item(), rel=1e-5)


def test_a_perplexity_that_is_no_finite_number_is_refused():
    assert perplexity(torch.full((3,), 709.0)) == pytest.approx(math.exp(709))
    with pytest.raises(NumericsError, match="surprises the model by 710 nats per token"):
        perplexity(torch.full((3,), 710.0))


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.99, 99.0), (0.5, 50.0), (1.0, 100.0), (0.001, 1.0), (0.991, 100.0)]
)
def test_percentile_is_the_least_value_that_so_many_do_not_exceed(fraction, expected):
    values = torch.arange(1, 101).float()[torch.randperm(100, generator=torch.Generator().manual_seed(4))]
    assert percentile(values, fraction) == expected


def test_percentile_of_one_value_is_that_value():
    assert percentile(torch.tensor([7.0]), 0.99) == 7


def test_parts_are_joined_in_order():
    parts = [Predictions(torch.tensor([i]), torch.tensor([i > 1.0]), torch.tensor([-i])) for i in (1.0, 2.0)]
    joined = Predictions.joined(parts)
    assert joined.kl.tolist() == [1, 2]
    assert joined.agrees.tolist() == [False, True]
    assert joined.surprisal.tolist() == [-1, -2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(logits, targets, value):
    broken = logits.clone()
    broken[3, 7] = value
    with pytest.raises(NumericsError, match="not finite"):
        ReferenceBlock(broken, targets)
    with pytest.raises(NumericsError, match="not finite"):
        ReferenceBlock(logits, targets).compare(broken)


@pytest.mark.parametrize("vocab_size", [199, 49_152, 262_144, 10**9])
def test_a_block_of_logits_stays_small_and_is_never_empty(vocab_size):
    rows = block_rows(vocab_size)
    assert rows == 1 or 4 * rows * vocab_size <= 2**26
    assert rows >= 1
