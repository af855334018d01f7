"""The bigram model that a student is compared with."""

from __future__ import annotations

import pytest
import torch

from kvist.convert.bigram import BigramModel
from kvist.errors import OptionError


def test_probabilities_add_up() -> None:
    model = BigramModel(torch.tensor([0, 1, 0, 2, 0, 1]), 4)
    for before in range(4):
        assert model.probabilities(torch.full((4,), before), torch.arange(4)).sum().item() == pytest.approx(1)


def test_a_text_predicts_its_own_pairs() -> None:
    text = torch.tensor([0, 1] * 50)
    model = BigramModel(text, 4)
    assert model.loss(text.view(1, -1)) < 0.1 < model.loss(torch.tensor([[0, 2, 1, 3]]))


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "a bigram model is fitted on two tokens at least, and there are 0"),
        ([1], "a bigram model is fitted on two tokens at least, and there are 1"),
        ([1, 4], "token 4 is not in a vocabulary of 4"),
        ([-1, 1], "token -1 is not in a vocabulary of 4"),
    ],
)
def test_tokens_that_no_model_is_made_of_are_refused(token_ids: list[int], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{message}$"):
        BigramModel(torch.tensor(token_ids, dtype=torch.int64), 4)
