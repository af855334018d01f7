"""A bigram model: what can be predicted without a network. A student that is no better has learned no language."""

from __future__ import annotations

import torch

from kvist.errors import OptionError

LEAST_TOKENS = 2
"""Of the text that a model is fitted on: one pair."""


class BigramModel:
    """Each token predicted from the one before it, as often as it followed it in a text.

    Smoothed by interpolation after Witten and Bell (IEEE Trans. Inf. Theory 37, 1991), which has no free constant:
    a token that was followed `n` times by `t` different ones leaves the share t / (n + t) to what is more general;
    bigrams to single tokens, and those to a uniform choice.

    Args:
        token_ids: `[N]` int64, the text that it is fitted on, two tokens at least.
        vocab_size: `V`.

    Raises:
        OptionError: there are fewer tokens, or one that is not in the vocabulary.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        if len(token_ids) < LEAST_TOKENS:
            raise OptionError(f"a bigram model is fitted on two tokens at least, and there are {len(token_ids)}")
        for token_id in (int(token_ids.min()), int(token_ids.max())):
            if not 0 <= token_id < vocab_size:
                raise OptionError(f"token {token_id} is not in a vocabulary of {vocab_size:,}")
        self._vocab_size = vocab_size
        counts = token_ids.bincount(minlength=vocab_size).double()
        seen = (counts > 0).sum()
        self._unigram = (counts + seen / vocab_size) / (counts.sum() + seen)
        pairs = token_ids[:-1] * vocab_size + token_ids[1:]
        self._pairs, pair_counts = torch.unique(pairs, return_counts=True)
        self._pair_counts = pair_counts.double()
        first = self._pairs // vocab_size
        self._followed = torch.zeros(vocab_size, dtype=torch.float64).index_add_(0, first, self._pair_counts)
        self._followers = first.bincount(minlength=vocab_size).double()

    def probabilities(self, before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """`[N]` float64: of each of `tokens` after the one `before` it, both `[N]` int64."""
        wanted = before * self._vocab_size + tokens
        place = torch.searchsorted(self._pairs, wanted).clamp_max(len(self._pairs) - 1)
        count = torch.where(self._pairs[place] == wanted, self._pair_counts[place], 0.0)
        followed, followers = self._followed[before], self._followers[before]
        general = self._unigram[tokens]
        smoothed = (count + followers * general) / (followed + followers).clamp_min(1)
        return torch.where(followed > 0, smoothed, general)

    def loss(self, sequences: torch.Tensor) -> float:
        """Nats per token of sequences `[B, L]`, each from its second token on, as a model's loss is counted."""
        before, tokens = sequences[:, :-1].flatten(), sequences[:, 1:].flatten()
        return self.probabilities(before, tokens).log().neg().mean().item()
