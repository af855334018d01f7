"""Packing, the schedule and the bigram model."""

from __future__ import annotations

import math

import pytest
import torch

from kvist.convert.bigram import BigramModel
from kvist.convert.uptrain_config import UptrainConfig
from kvist.convert.uptrain_schedule import learning_rate
from kvist.convert.uptrain_text import PackedText
from kvist.errors import OptionError


@pytest.mark.parametrize("start", [[], [999]])
@pytest.mark.parametrize("num_tokens", [7, 8, 50, 53])
def test_each_pass_has_all_of_the_text_in_an_order_of_its_own(start: list[int], num_tokens: int) -> None:
    body = 7
    text = PackedText(range(num_tokens), start, body + len(start), seed=1)
    count = num_tokens // body
    passes = []
    for epoch in range(4):
        sequences = [text.batch(epoch * count + place, 1)[0] for place in range(count)]
        assert all(ids[: len(start)].tolist() == start for ids in sequences)
        bodies = [ids[len(start) :] for ids in sequences]
        for ids in bodies:  # neighbours in the text, which is a ring
            assert ((ids[1:] - ids[:-1]) % num_tokens == 1).all()
        seen = torch.cat(bodies).tolist()
        assert len(set(seen)) == len(seen) == count * body
        passes.append(seen)
    assert len({tuple(one) for one in passes}) > 1


def test_a_step_has_its_sequences_whatever_came_before() -> None:
    one, other = (PackedText(range(500), [], 9, seed=3) for _ in range(2))
    for step in range(200):
        one.batch(step, 3)
    assert torch.equal(one.batch(150, 3), other.batch(150, 3))
    assert not torch.equal(one.batch(150, 3), PackedText(range(500), [], 9, seed=4).batch(150, 3))


def test_the_rate_warms_up_and_falls_to_a_twentieth() -> None:
    rates = [learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)
    assert rates[105] == pytest.approx(0.525, abs=0.01)  # half of the cosine, half of the way
    assert [learning_rate(step, 1, 2.0) for step in range(1)] == [2.0]


def test_bigram_probabilities_are_a_distribution_and_follow_the_counts() -> None:
    ids = torch.tensor([0, 1, 0, 1, 0, 2, 0, 1, 3])
    model = BigramModel(ids, 6)
    for before in range(6):
        row = model.probabilities(torch.full((6,), before), torch.arange(6))
        assert row.sum().item() == pytest.approx(1)
        assert (row > 0).all()
    # 0 was followed 4 times by 2 different tokens, 3 times of them by 1; token 1 was 3 of 9, 4 were seen of 6.
    general = (3 + 4 / 6) / (9 + 4)
    assert model.probabilities(torch.tensor([0]), torch.tensor([1])).item() == pytest.approx((3 + 2 * general) / 6)


def test_a_bigram_model_predicts_what_it_was_fitted_on_better_than_noise() -> None:
    random = torch.Generator().manual_seed(0)
    cycle = torch.arange(400) % 8
    noise = torch.randint(0, 8, (1, 50), generator=random)
    model = BigramModel(cycle, 8)
    assert model.loss(cycle[None, :50]) < 0.1
    assert model.loss(noise) > math.log(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 3, "minutes": 1.0}, "either steps or minutes"),
        ({"steps": 0}, "steps is 0"),
        ({"minutes": 0}, "minutes is 0"),
        ({"steps": 1, "sequence": 1}, "sequence is 1"),
        ({"steps": 1, "learning_rate": 0.0}, "learning_rate is 0"),
        ({"steps": 1, "every": 300}, "every is 300"),
        ({"steps": 1, "train": "mlp"}, "unknown train 'mlp'"),
        ({"steps": 1, "compute": "fp16"}, "unknown compute 'fp16'"),
        ({"steps": 1, "logit_weight": 0, "attention_weight": 0}, "nothing to learn"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        UptrainConfig(**fields)  # type: ignore[arg-type]
