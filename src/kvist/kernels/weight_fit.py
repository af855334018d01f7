"""Steps, minima and codes that lie nearest to groups of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

# Numbers that are worked on at once: what they take stays in the cache.
_CHUNK_NUMBERS: Final = 1 << 16

# How many steps the largest weight of a group is tried at: on either side of 0 for int4, from the least to the
# greatest for int4_min. Fewer steps than there are codes leave some unused, more cut off the largest weights.
_EXTENTS: Final = (-9.0, -8.5, -8.0, -7.5, -7.0, -6.5, -6.0, 6.0, 6.5, 7.0, 7.5, 8.0)
_SPANS: Final = (12.0, 13.0, 14.0, 14.5, 15.0, 15.5, 16.0, 17.0, 18.0)
# The least number of fp16, by which its denormal numbers lie apart.
_LEAST_FP16: Final = 2.0**-24

# How often the best is fitted anew to the codes that it gives.
_REFITS: Final = 2


@dataclass(frozen=True)
class Fit:
    """Of `n` groups of `g` weights.

    Attributes:
        codes: `[n, g]` uint8, from 0.
        steps: `[n]` float16; NaN where a weight is no number.
        minima: `[n]` float16, or None.
    """

    codes: torch.Tensor
    steps: torch.Tensor
    minima: torch.Tensor | None = None


def fit_int8(groups: torch.Tensor) -> Fit:
    """Codes around 128, from 1 to 255, of a step that spans the largest weight. `groups` is `[n, g]`."""

    def fit(x: torch.Tensor) -> Fit:
        largest = x.abs().amax(1, keepdim=True)
        steps = _fp16(largest / 127)
        # Small steps lie far apart in fp16: one that was rounded down would cut off the largest weights.
        steps = torch.where(largest > 127.5 * steps, steps + _LEAST_FP16, steps)
        return _checked(x, 127, _nearest(x, steps, -127, 127) + 128, steps)

    return _in_chunks(fit, groups)


def fit_int4(groups: torch.Tensor) -> Fit:
    """Codes around 8, from 0 to 15, of the step with the least squared error among some. `groups` is `[n, g]`."""

    def fit(x: torch.Tensor) -> Fit:
        peak = x.gather(1, x.abs().argmax(1, keepdim=True))
        best = _best(x, (_nearest(x, peak / extent, -8, 7) for extent in _EXTENTS), _step)
        for _ in range(_REFITS):
            best = _best(x, (best.codes, _nearest(x, best.steps, -8, 7)), _step)
        return _checked(x, 7, best.codes + 8, best.steps)

    return _in_chunks(fit, groups)


def fit_int4_min(groups: torch.Tensor) -> Fit:
    """Codes from 0 to 15, of the step and minimum with the least squared error among some. `groups` is `[n, g]`."""

    def fit(x: torch.Tensor) -> Fit:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        steps = [(high - low) / span for span in _SPANS]
        best = _best(x, (_nearest(x - (low + high) / 2 + 7.5 * step, step, 0, 15) for step in steps), _line)
        for _ in range(_REFITS):
            best = _best(x, (best.codes, _nearest(x - best.minima, best.steps, 0, 15)), _line)
        return _checked(x, 1, best.codes, best.steps, best.minima)

    return _in_chunks(fit, groups)


def finite_or_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` with NaN for what is infinite."""
    return torch.where(x.isfinite(), x, torch.nan)


def _in_chunks(fit: Callable[[torch.Tensor], Fit], groups: torch.Tensor) -> Fit:
    chunks = torch.split(groups, max(1, _CHUNK_NUMBERS // groups.shape[1]))
    fits = [fit(chunk.float()) for chunk in chunks]
    minima = [fit.minima for fit in fits if fit.minima is not None]
    return Fit(
        torch.cat([fit.codes for fit in fits]),
        torch.cat([fit.steps for fit in fits]),
        torch.cat(minima) if minima else None,
    )


def _checked(
    x: torch.Tensor, reach: int, codes: torch.Tensor, steps: torch.Tensor, minima: torch.Tensor | None = None
) -> Fit:
    """A fit with NaN where a weight is no number, or more than `reach` times what fp16 holds."""
    finite = (x.abs().amax(1, keepdim=True) / reach).half().isfinite()
    codes = torch.where(finite, codes, 0.0).to(torch.uint8)
    steps = torch.where(finite, steps, torch.nan).half().squeeze(1)
    return Fit(codes, steps, None if minima is None else torch.where(finite, minima, torch.nan).half().squeeze(1))


@dataclass(frozen=True)
class _Fitted:
    """Float32 codes `[n, g]`, around 0 where there is no minimum, and steps and minima `[n, 1]`, rounded to fp16."""

    codes: torch.Tensor
    steps: torch.Tensor
    minima: torch.Tensor


def _best(
    x: torch.Tensor, candidates: Iterable[torch.Tensor], fit: Callable[[torch.Tensor, torch.Tensor], _Fitted]
) -> _Fitted:
    """Of some codes those that are nearest with what fits them best; of equal ones the first."""
    best = fit(x, torch.zeros_like(x))
    least = torch.full_like(best.steps, torch.inf)
    for codes in candidates:
        fitted = fit(x, codes)
        error = (codes * fitted.steps + fitted.minima - x).square().sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = _Fitted(
            torch.where(better, codes, best.codes),
            torch.where(better, fitted.steps, best.steps),
            torch.where(better, fitted.minima, best.minima),
        )
    return best


def _step(x: torch.Tensor, codes: torch.Tensor) -> _Fitted:
    """The step of least squares."""
    steps = (codes * x).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True).clamp_min(1.0)
    return _Fitted(codes, _fp16(steps), torch.zeros_like(steps))


def _line(x: torch.Tensor, codes: torch.Tensor) -> _Fitted:
    """The step and minimum of least squares."""
    mean = codes.mean(1, keepdim=True)
    centred = codes - mean
    steps = _fp16((centred * x).sum(1, keepdim=True) / centred.square().sum(1, keepdim=True).clamp_min(0.5))
    return _Fitted(codes, steps, _fp16((x - steps * codes).mean(1, keepdim=True)))


def _nearest(x: torch.Tensor, steps: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return (x * torch.where(steps == 0, 0.0, 1 / steps)).round_().clamp_(least, most)


def _fp16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()
