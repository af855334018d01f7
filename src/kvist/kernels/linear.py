"""Products with quantised weights in plain PyTorch: the twin of the native kernel, to the same bits, on any device.

    y[t, n] = sum over groups g, ascending, of (s * step(n, g)) * step(t, g)        s = sum over g's columns of
              with a minimum  (s * step(n, g) + minimum(n, g) * a) * step(t, g)         code(n) * code(t)
                                                                                    a = sum of code(t)

Rows of the input are quantised too, in groups of 32 columns, to codes from -127 to 127 and fp32 steps. Sums of codes
are whole numbers and exact; what is fp32 is rounded after each product and each sum, in the order written. So a row of
`y` depends on its row of the input and on the weights alone, however the work is cut.

With fine rows the product is a sum of two: of the row's codes, and of the codes of what these leave of the row.
"""

from __future__ import annotations

import torch

from kvist.kernels.weight_codec import GROUP_COLUMNS, QuantisedWeight, unpack

# Smaller steps stand for zeros: their inverse must stay finite.
_LEAST_STEP = 2.0**-100


def linear(x: torch.Tensor, weight: QuantisedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x @ W.T` with `x` quantised row by row: `[T, N]`.

    Args:
        x: `[T, K]` float32 or bfloat16. A row with what is no number, or infinite, gives NaN throughout.
        weight: `W`, `[N, K]`, on the device of `x`.
        dtype: of the result; that of `x` by default.
    """
    matrix = unpack(weight)
    weight_codes = torch.unflatten(matrix.codes.float() - weight.kind.zero, 1, (-1, GROUP_COLUMNS))
    weight_steps = matrix.steps.float()

    def product(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(len(x), weight.num_rows, dtype=torch.float32)
        for group in range(codes.shape[1]):
            # Exact in float32: less than 2^24.
            terms = codes[:, group] @ weight_codes[:, group].T * weight_steps[:, group]
            if matrix.minima is not None:
                terms = terms + matrix.minima[:, group].float() * codes[:, group].sum(1, keepdim=True)
            y += terms * steps[:, group, None]
        return y

    codes, steps = quantise_rows(x)
    y = product(codes, steps)
    if weight.fine_rows:
        y = y + product(*quantise_rows(x.float() - (codes * steps.unsqueeze(2)).flatten(1)))
    return y.to(x.dtype if dtype is None else dtype)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T, K / 32, 32]`, whole numbers from -127 to 127 in float32, and steps `[T, K / 32]` float32 of rows.

    A group with a number that is not finite has zeros for codes and NaN for its step.
    """
    groups = torch.unflatten(x.float(), 1, (-1, GROUP_COLUMNS))
    largest = groups.abs().amax(2)
    steps = largest / 127
    steps = torch.where(steps < _LEAST_STEP, 0.0, steps)
    codes = (groups * torch.where(steps > 0, 1 / steps, 0.0).unsqueeze(2)).round()
    finite = largest.isfinite()
    return torch.where(finite.unsqueeze(2), codes, 0.0), torch.where(finite, steps, torch.nan)
