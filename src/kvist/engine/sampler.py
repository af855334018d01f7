"""From logits to the next token of each sequence."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvist.config import SamplingParams
from kvist.errors import NumericsError, OptionError
from kvist.results import TokenLogprob

# Beyond these a division would overflow; the distribution is the same single token, or uniform, before.
_LEAST_TEMPERATURE, _GREATEST_TEMPERATURE = 1e-30, 1e30


@dataclass(frozen=True)
class Drawn:
    """A token and, where asked for, how likely the model thought it."""

    token_id: int
    logprob: TokenLogprob | None


class SamplingState:
    """How one request draws its tokens, and what it must remember to do so.

    Args:
        params: the request's parameters.
        prompt_ids: its prompt, for the repetition penalty.
        vocab_size: `V`.
        device: where the logits are.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.params = params
        # Its own generator: what a request draws must not depend on what runs beside it.
        self.random = random.Random(params.seed)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if params.logit_bias:
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            self._bias = torch.tensor(list(params.logit_bias), device=device), values
        if params.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt_ids, device=device)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    @property
    def takes_top(self) -> bool:
        """Whether the token is simply the one of the largest logit, and nothing is reported about it."""
        return self.params.temperature == 0 and self.params.logprobs is None and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` changes anything."""
        return self._bias is not None or self._seen is not None or self._counts is not None

    def count(self, token_id: int) -> None:
        """Remember a generated token for the penalties."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of logits `[V]` with bias and penalties."""
        logits = logits.clone()
        if self._bias is not None:
            ids, values = self._bias
            logits[ids] += values
        if self._seen is not None:
            penalty = self.params.repetition_penalty
            repeated = logits[self._seen]
            logits[self._seen] = torch.where(repeated > 0, repeated / penalty, repeated * penalty)
        if self._counts is not None:
            logits -= self.params.frequency_penalty * self._counts
            logits -= self.params.presence_penalty * (self._counts > 0)
        return logits


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Drawn | Exception]:
    """Draw a token from each row of logits `[S, V]`, by the row's state.

    A row that cannot be drawn from gives its error, the others their tokens. Rows do not touch each other: what one
    draws is the same in any batch.
    """
    top_ids, top_logits = _largest_of_rows(logits)
    return [
        _outcome(row, state, top_id) if math.isfinite(top_logit) else _not_numbers()
        for row, state, top_id, top_logit in zip(logits, states, top_ids, top_logits, strict=True)
    ]


def _largest_of_rows(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Of each row `[V]` the first of the largest, and what it is; NaN and infinity are larger than all."""
    if logits.device.type == "cpu":  # numpy finds it in a tenth of the time
        rows = logits.detach().numpy()
        ids = rows.argmax(axis=1)
        return ids.tolist(), rows[range(len(rows)), ids].tolist()
    values, indices = logits.max(dim=-1)
    return indices.tolist(), values.tolist()


def _outcome(row: torch.Tensor, state: SamplingState, top_id: int) -> Drawn | Exception:
    try:
        return _draw(row, state, top_id)
    except Exception as error:
        return error


def candidates(row: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may be drawn from logits `[V]`: their ids and their weights, which are not normalised.

    Temperature, top_k, top_p and min_p in this order, each on what the one before left. Of equally likely tokens
    those with lower ids are kept first, so that the choice is always the same.
    """
    temperature = min(max(params.temperature, _LEAST_TEMPERATURE), _GREATEST_TEMPERATURE)
    # The largest becomes 0, so nothing overflows, and exp() gives each token's ratio to the likeliest.
    row = (row - row.max()) / temperature
    ids = torch.arange(len(row), device=row.device)
    if 0 < params.top_k < len(row):
        ids, row = _largest(row, params.top_k)
    if params.top_p < 1:
        shares = row.softmax(0)
        # Tokens below this share make less than 1 - top_p together (half of it, for rounding): the nucleus is above.
        probable = (shares >= (1 - params.top_p) / (2 * len(row))).nonzero()[:, 0]
        order = probable[row[probable].argsort(descending=True, stable=True)]
        shares = shares[order]
        nucleus = order[shares.cumsum(0, dtype=torch.float64) - shares < params.top_p]
        ids, row = ids[nucleus], row[nucleus]
    if params.min_p > 0:
        likely = row >= math.log(params.min_p)
        ids, row = ids[likely], row[likely]
    return ids, row.exp()


def _draw(row: torch.Tensor, state: SamplingState, top_id: int) -> Drawn:
    if state.takes_top:
        return Drawn(top_id, None)
    params, adjusted = state.params, row
    if state.adjusts:
        adjusted = state.adjust(row)
        top_logit, top_index = adjusted.max(dim=-1)
        if not top_logit.isfinite():
            raise OptionError("logit_bias and penalties leave no token to draw: choose less extreme values")
        top_id = int(top_index)
    token_id = top_id if params.temperature == 0 else _pick(adjusted, params, state.random.random())
    return Drawn(token_id, None if params.logprobs is None else _logprob(row, token_id, params.logprobs))


def _pick(row: torch.Tensor, params: SamplingParams, point: float) -> int:
    """The token at `point`, from 0 up to but not 1, of the cumulative distribution."""
    ids, weights = candidates(row, params)
    cumulative = weights.cumsum(0, dtype=torch.float64)
    # right=True: a token of weight 0 is never the first whose sum exceeds the point.
    return int(ids[torch.searchsorted(cumulative, point * cumulative[-1], right=True)])


def _logprob(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    logprobs = row.log_softmax(0)
    ids, values = _largest(logprobs, min(num_top, len(row)))
    return TokenLogprob(token_id, float(logprobs[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _largest(row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the k largest, largest first, lower ids first among equals.

    `topk` leaves open which of equals it takes; it serves to find the k-th value, and only what reaches that is sorted.
    """
    if k == 0:
        return row.new_empty(0, dtype=torch.int64), row[:0]
    reaching = (row >= row.topk(k).values[-1]).nonzero()[:, 0]
    ids = reaching[row[reaching].argsort(descending=True, stable=True)][:k]
    return ids, row[ids]


def _not_numbers() -> NumericsError:
    return NumericsError(
        "the model's logits are not numbers (NaN or infinite): try weights_format='fp32', or fetch its files again"
    )
