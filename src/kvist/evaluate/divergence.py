"""How far one model's predictions are from another's, position by position.

KL(p || q) = sum over the vocabulary of p (log p - log q), in nats: what predicting with q costs, per token, where p is
true. It is zero only where the two agree, and sees every change of the distribution, where perplexity sees what became
of one token alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvist.errors import NumericsError

# Of one block of logits. A handful of such blocks are held at once, whatever the text's length and the vocabulary.
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Predictions:
    """What a model predicts at some positions, `N` of them, beside the reference.

    Attributes:
        kl: `[N]` float32, the divergence from the reference's prediction, in nats.
        agrees: `[N]` bool, whether the likeliest token is the reference's.
        surprisal: `[N]` float32, nats: less the log-probability of the token that follows in the text.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    surprisal: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[Predictions]) -> Predictions:
        """Those of all parts, in order."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def block_rows(vocab_size: int) -> int:
    """How many positions are compared at once."""
    return max(1, _BLOCK_BYTES // (4 * vocab_size))


class ReferenceBlock:
    """What the reference predicts at the positions of one block.

    Args:
        logits: `[n, V]` float32.
        targets: `[n]` int64, the tokens that follow.

    Raises:
        NumericsError: the logits are not numbers.
    """

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self._log_p = logits.log_softmax(-1)
        self._p = self._log_p.exp()
        self._best = self._log_p.argmax(-1)
        self._targets = targets
        self.surprisal = _surprisal(self._log_p, targets)

    def compare(self, logits: torch.Tensor) -> Predictions:
        """How another model's logits `[n, V]` float32 for the same positions differ.

        Raises:
            NumericsError: they are not numbers.
        """
        log_q = logits.log_softmax(-1)
        agrees, surprisal = log_q.argmax(-1) == self._best, _surprisal(log_q, self._targets)
        # Differences first: the two sums apart would lose the small divergence in their rounding.
        kl = torch.sub(self._log_p, log_q, out=log_q).mul_(self._p).sum(-1)
        return Predictions(kl, agrees, surprisal)


def mean(values: torch.Tensor) -> float:
    """The mean of many small numbers, added up in float64."""
    return values.double().mean().item()


def percentile(values: torch.Tensor, fraction: float) -> float:
    """The least value that `fraction` of all do not exceed (nearest rank)."""
    return values.kthvalue(max(1, math.ceil(fraction * len(values)))).values.item()


def perplexity(surprisal: torch.Tensor) -> float:
    """Of a text: e to the mean surprisal of its tokens. Among how many tokens the model is undecided, in a way.

    Raises:
        NumericsError: it is no finite number, as no model's is that was trained.
    """
    mean_nats = mean(surprisal)
    try:
        return math.exp(mean_nats)
    except OverflowError:
        raise NumericsError(
            f"the text surprises the model by {mean_nats:,.0f} nats per token, too much for a perplexity: its weights "
            "are damaged: fetch the model again, or evaluate another model"
        ) from None


def _surprisal(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    surprisal = log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1).neg()
    if not surprisal.isfinite().all():  # one number that is none makes a row's sum none
        raise NumericsError(
            "the model's logits are not finite numbers: its weights are damaged, or too large for the arithmetic: "
            "fetch the model again, or compute in fp32"
        )
    return surprisal
