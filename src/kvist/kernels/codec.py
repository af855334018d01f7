"""The codec of keys and values: the vectors of one token and KV head to codes and scalars, and back.

    fp32, bf16   the code is the number
    int8         y ~ code * step                code from -127 to 127; an fp32 step for each head
    int4         y ~ floor + code * step        code from 0 to 15; a bf16 step and floor for each group of dims

Quantised values are rotated, y = H v; quantised keys are moved and scaled by what is fixed for a model as well,
y = H ((k - offset(P)) * scale), where the offset depends on the position P at which the token's page begins. H is a
Hadamard rotation, its own inverse: it spreads a few large dims over many.

Vectors stand as `[D, K, N]` here, dims first, so that every step runs over long rows. The arithmetic is float32 and in
the order in which it is written: a vector's codes depend on it and its page's number alone, neither on other vectors
nor on threads, and another kernel can give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist.kernels import native
from kvist.kernels.key_statics import KeyStatics, PageTurns
from kvist.kernels.rotation import rotate
from kvist.kv_format import QUANTISED_FORMATS

# Smaller steps are stored as zero: their inverse must stay finite.
_LEAST_STEP = 2.0**-100

_CODE_DTYPES = {32: torch.float32, 16: torch.bfloat16, 8: torch.int8, 4: torch.uint8}
_SCALAR_DTYPES = {0: torch.float32, 4: torch.float32, 2: torch.bfloat16}


@dataclass(frozen=True)
class StorageFormat:
    """How the vectors of one side, keys or values, are stored: `StorageFormat` of csrc/page_layout.h.

    Attributes:
        name: one of `kv_format.KV_FORMATS`.
        bits: of a code.
        codes_per_lane: codes in the 4 bytes of a lane.
        scalars: per token and group of dims: none, a step, or a step and a floor.
        scalar_bytes: of each of them.
    """

    name: str
    bits: int
    codes_per_lane: int
    scalars: int
    scalar_bytes: int

    @property
    def is_quantised(self) -> bool:
        return self.name in QUANTISED_FORMATS

    @property
    def code_dtype(self) -> torch.dtype:
        """What one code is held in outside a page."""
        return _CODE_DTYPES[self.bits]

    @property
    def scalar_dtype(self) -> torch.dtype:
        return _SCALAR_DTYPES[self.scalar_bytes]

    def group_dims(self, head_dim: int) -> int:
        """The dims that share scalars; they divide the head."""
        return native.group_dims(self.name, head_dim)

    def num_groups(self, head_dim: int) -> int:
        """How many groups of dims with scalars a head has: none in the plain formats."""
        return head_dim // self.group_dims(head_dim) if self.is_quantised else 0


def storage_formats() -> dict[str, StorageFormat]:
    """All storage formats by name, from the native library."""
    return {name: StorageFormat(name, **fields) for name, fields in native.page_layout()["formats"].items()}


class VectorCodec:
    """One side, keys or values, of one layer.

    Args:
        storage: the format.
        head_dim: `D`.
        statics: of quantised keys; None for values, and for keys that are coded as they are.
        turns: of the frequencies of `statics`, where other layers share them.
    """

    def __init__(
        self,
        storage: StorageFormat,
        head_dim: int,
        statics: KeyStatics | None = None,
        turns: PageTurns | None = None,
    ) -> None:
        self.storage = storage
        self.head_dim = head_dim
        self.group_dims = storage.group_dims(head_dim)
        self._move = self._feedback = None
        if statics is not None and storage.is_quantised:
            self._move = _KeyMove(statics, turns or PageTurns(statics.frequencies))
        if statics is not None and storage.bits == 4:
            # [g, g, groups, K, 1]: by the dim that was rounded, then by the dim that it moves.
            self._feedback = statics.feedback.permute(2, 3, 1, 0).unsqueeze(-1).contiguous()

    def encode(self, x: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes `[D, K, N]` and scalars `[groups, scalars, K, N]` of vectors `[D, K, N]`; plain formats have none.

        Args:
            x: the vectors.
            numbers: `[n]` int64, of the pages in their sequences, one for each run of `N / n` vectors.
        """
        if not self.storage.is_quantised:
            return _plain(x, self.storage.code_dtype), None
        y = x.float()
        if self._move is not None:
            y = self._move.apply(y, numbers)
        y = rotate(y)
        if self.storage.bits == 8:
            return _encode_int8(y)
        return _encode_int4(y, self.group_dims, self._feedback)

    def decode(self, codes: torch.Tensor, scalars: torch.Tensor | None, numbers: torch.Tensor) -> torch.Tensor:
        """The vectors `[D, K, N]` float32 that codes and scalars of `encode` stand for; `numbers` as there."""
        if scalars is None:
            return codes.float()
        groups = torch.unflatten(codes.float().contiguous(), 0, (-1, self.group_dims))
        steps = scalars.float().unsqueeze(1).unbind(2)
        y = groups * steps[0] if self.storage.bits == 8 else steps[1] + groups * steps[0]
        x = rotate(y.flatten(0, 1))
        return x if self._move is None else self._move.undo(x, numbers)


class _KeyMove:
    """(k - offset(P)) * scale for keys `[D, K, N]`, and back; pages' numbers as in `VectorCodec.encode`."""

    def __init__(self, statics: KeyStatics, turns: PageTurns) -> None:
        self._offset, self._scale = (x.T.unsqueeze(-1).contiguous() for x in (statics.offset, statics.scale))
        self._turns = turns

    def apply(self, k: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return (_runs(k, numbers) - self._offsets(numbers)).view(k.shape) * self._scale

    def undo(self, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return (_runs(y / self._scale, numbers) + self._offsets(numbers)).view(y.shape)

    def _offsets(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._turns.turn(self._offset, numbers).unsqueeze(-1)


def _runs(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`[D, K, N]` as `[D, K, n, N / n]`."""
    return x.contiguous().view(*x.shape[:2], len(numbers), x.shape[2] // max(1, len(numbers)))


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to `dtype`. What rounding makes of the bits of a NaN differs between CPUs: it is one pattern here."""
    codes = x.to(dtype)
    return codes if dtype.itemsize >= x.dtype.itemsize else torch.where(x.isnan(), torch.nan, codes)


# --- int8 -------------------------------------------------------------------------------------------------------------


def _encode_int8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A vector that is not finite has a step of NaN, one of zeros has a step of zero."""
    step = y.abs().amax(0) / 127
    step = torch.where(step < _LEAST_STEP, 0.0, step)
    step = torch.where(step.isfinite(), step, torch.nan)
    codes = (y * _inverse(step)).round_().clamp_(-127, 127).nan_to_num_(0.0)
    return codes.to(torch.int8), step.view(1, 1, *step.shape)


# --- int4 -------------------------------------------------------------------------------------------------------------


def _encode_int4(y: torch.Tensor, group_dims: int, feedback: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and floor span a group's range, or are those that fit its codes best where that leaves a smaller error.

    A vector that is not finite has steps and floors of NaN, a constant group has a step of zero.
    """
    groups = torch.unflatten(y, 0, (-1, group_dims)).transpose(0, 1)  # [g, groups, K, N]
    low = groups.amin(0) + 0.0  # not -0: which zero is the least depends on where a vector stands
    step, floor = _bf16((groups.amax(0) - low) / 15), _bf16(low)
    finite = (step.isfinite() & floor.isfinite()).all(0)
    step = torch.where(step < _LEAST_STEP, 0.0, step)
    step, floor, codes = _fitted(groups, step, floor)
    if feedback is not None:
        codes = _fed_back(groups, step, floor, feedback)
    codes = torch.where(finite, codes, 0.0).to(torch.uint8)
    scalars = torch.where(finite, torch.stack((step, floor), dim=1).to(torch.bfloat16), torch.nan)
    return codes.transpose(0, 1).flatten(0, 1), scalars


def _fitted(
    groups: torch.Tensor, step: torch.Tensor, floor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step, floor and codes: as given, or of the least squares on the codes that they give, whichever is nearer."""
    codes = _nearest(groups, step, floor)
    mean_code, mean = _sum(codes) / len(groups), _sum(groups) / len(groups)
    centred = codes - mean_code
    slope = _bf16(_sum(centred * (groups - mean)) / _sum(centred.square()).clamp_min(1.0))
    base = _bf16(mean - slope * mean_code)
    fitted = _nearest(groups, slope, base)
    better = _squared_error(groups, fitted, slope, base) < _squared_error(groups, codes, step, floor)
    better &= slope >= _LEAST_STEP
    return torch.where(better, slope, step), torch.where(better, base, floor), torch.where(better, fitted, codes)


def _fed_back(groups: torch.Tensor, step: torch.Tensor, floor: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """Codes `[g, groups, K, N]`, rounded from the last dim of a group to its first.

    Each rounding error moves the targets of the dims before it, so that the error of the scores, not of the key, is
    small (as GPTQ does for weights, arXiv 2210.17323).
    """
    inverse, target, codes = _inverse(step), groups.clone(), torch.empty_like(groups)
    for dim in reversed(range(len(groups))):
        codes[dim] = ((target[dim] - floor) * inverse).round_().clamp_(0, 15)
        error = floor + codes[dim] * step - groups[dim]
        target[:dim] -= feedback[dim, :dim] * error
    return codes


def _nearest(x: torch.Tensor, step: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return ((x - floor) * _inverse(step)).round_().clamp_(0, 15)


def _squared_error(x: torch.Tensor, codes: torch.Tensor, step: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return _sum((floor + codes * step - x).square())


def _sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the first dim in an order of its own: the upper half onto the lower, again and again."""
    while len(x) > 1:
        half = 1 << ((len(x) - 1).bit_length() - 1)
        paired = x[: len(x) - half] + x[half:]
        x = paired if len(paired) == half else torch.cat((paired, x[len(paired) : half]))
    return x[0]


def _inverse(step: torch.Tensor) -> torch.Tensor:
    return torch.where(step > 0, 1 / step, 0.0)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()
