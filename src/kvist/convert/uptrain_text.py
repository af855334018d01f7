"""The text of a training: packed into sequences without padding, in an order that only the seed decides.

    tokens      | text a ......... eos | text b ................. eos |    joined
    held out    |                                          | the last  |    never trained on
    sequences   | 0 | 1 | 2 | 3 | 4 | ...                  |               cut anew in each epoch, then shuffled

Which sequences a step takes follows from its number, so the number is all that a training checkpoint needs of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from kvist.errors import PromptError, shown
from kvist.evaluate.text_windows import EvaluationText, start_tokens
from kvist.loading.tokenizer import Tokenizer

HELD_OUT_FRACTION = 0.05
_MOST_HELD_OUT_TOKENS = 4096


class PackedText:
    """Sequences of a text.

    Args:
        token_ids: of the text.
        start: tokens that every sequence begins with, a BOS token or none.
        sequence: tokens of a sequence, those of `start` included.
        seed: of the order.

    Attributes:
        num_tokens: of the text.
        num_sequences: of one pass over it.
    """

    def __init__(self, token_ids: Sequence[int], start: Sequence[int], sequence: int, seed: int) -> None:
        self._ids = torch.tensor(token_ids, dtype=torch.int64)
        self._start = torch.tensor(list(start), dtype=torch.int64)
        self._body = sequence - len(start)
        self._seed = seed
        self.num_tokens = len(token_ids)
        self.num_sequences = self.num_tokens // self._body

    @property
    def token_ids(self) -> torch.Tensor:
        """`[N]` int64, the whole text."""
        return self._ids

    def batch(self, step: int, size: int) -> torch.Tensor:
        """The sequences of a step, `[B, L]` int64. Each pass over the text has all of them, in an order of its own."""
        return torch.stack([self._sequence(number) for number in range(step * size, (step + 1) * size)])

    def in_order(self, most: int) -> torch.Tensor:
        """The first sequences, at most so many, as they follow one another: `[B, L]` int64."""
        count = min(most, self.num_sequences)
        return torch.stack([self._cut(0, number) for number in range(count)])

    def _sequence(self, number: int) -> torch.Tensor:
        epoch, place = divmod(number, self.num_sequences)
        shift, order = _epoch_order(self._seed, epoch, self.num_tokens, self.num_sequences)
        return self._cut(shift, int(order[place]))

    def _cut(self, shift: int, number: int) -> torch.Tensor:
        # The text is a ring, so that every epoch can cut it elsewhere and yet has all of it.
        first = shift + number * self._body
        return torch.cat([self._start, self._ids[torch.arange(first, first + self._body) % self.num_tokens]])


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_tokens: int, num_sequences: int) -> tuple[int, np.ndarray]:
    """Where the cuts of an epoch begin, and the order of its sequences."""
    random = np.random.default_rng((seed, epoch))
    return int(random.integers(num_tokens)), random.permutation(num_sequences)


def joined_tokens(tokenizer: Tokenizer, texts: Sequence[EvaluationText], vocab_size: int) -> list[int]:
    """Token ids of all texts, with the model's end token between them where it has one.

    Raises:
        PromptError: one holds a token that the model does not have.
    """
    ids: list[int] = []
    for index, text in enumerate(texts):
        if index and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        ids += tokenizer.encode(text.text, add_special_tokens=False)
    if ids and (highest := max(ids)) >= vocab_size:
        written = tokenizer.decode([highest], skip_special_tokens=False)
        raise PromptError(f"the text holds {shown(written)}, a token that this model does not have: take it out")
    return ids


def packed_texts(
    tokenizer: Tokenizer, token_ids: Sequence[int], held_out_ids: Sequence[int] | None, sequence: int, seed: int
) -> tuple[PackedText, PackedText]:
    """What is trained on, and what is kept apart to be judged on.

    Args:
        tokenizer: the model's; where it begins texts with BOS, every sequence does.
        token_ids: of the text.
        held_out_ids: of another text that is only judged on; None keeps the last part of the text apart.
        sequence: tokens of a sequence.
        seed: of the order.

    Raises:
        PromptError: a part is too short for one sequence.
    """
    start = start_tokens(tokenizer)
    body = sequence - len(start)
    trained, kept = token_ids, held_out_ids
    if kept is None:
        held_out = max(body, int(HELD_OUT_FRACTION * len(token_ids)))
        _check_length("the text", len(token_ids), body + held_out, sequence, "one to train on and one to judge by")
        trained, kept = token_ids[:-held_out], token_ids[-held_out:]
    else:
        _check_length("the text", len(trained), body, sequence, "one")
        _check_length("the held-out text", len(kept), body, sequence, "one")
    return PackedText(trained, start, sequence, seed), PackedText(kept, start, sequence, seed)


def judged_sequences(held_out: PackedText, sequence: int) -> torch.Tensor:
    """The sequences that the validation loss is of, `[B, L]`: a few, since it is asked for often."""
    return held_out.in_order(max(1, _MOST_HELD_OUT_TOKENS // sequence))


def _check_length(what: str, num_tokens: int, needed: int, sequence: int, sequences: str) -> None:
    if num_tokens < needed:
        longest = num_tokens * sequence // needed
        shorter = f"take --sequence {longest} or less, or " if longest > 1 else ""
        raise PromptError(
            f"{what} has {num_tokens:,} tokens, too few for sequences of {sequence:,} ({sequences}): {shorter}give a "
            "longer text"
        )
