"""Quantised weights: a matrix to codes with steps, and codes to the bytes that kernels read.

A row is cut into groups of 32 columns, each with a step in fp16, and in one format with a minimum too, as in GGUF:

    int8       w ~ (code - 128) * step           8.5 bits for each weight; GGUF Q8_0 and Q5_0
    int4       w ~ (code - 8) * step             4.5 bits; GGUF Q4_0
    int4_min   w ~ code * step + minimum         5 bits; GGUF Q4_1

Packed, 16 rows are a tile, one row to a lane of 4 bytes, so that products need no sums across lanes. A tile's bytes lie
in the order in which a product over all columns reads them, in lines of 64 bytes (csrc/linear.h):

    int8, int4   | steps of groups 0 and 1 | codes of group 0 | codes of group 1 | steps of groups 2 and 3 | ...
    int4_min     | steps, minima of group 0 | codes of group 0 | steps, minima of group 1 | ...

    scalars      16 fp16 for the 16 rows; of two groups, or the steps and the minima of one
    int8 codes   8 lines; lane r of line i: the codes of row r, columns 4 i to 4 i + 3
    int4 codes   4 lines; lane r of line i: in the low nibbles columns 8 i to 8 i + 3, in the high ones the next four

Where the number of groups is odd, the last pair ends after its first group. Rows beyond the matrix are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvist.kernels.weight_fit import finite_or_nan, fit_int4, fit_int4_min, fit_int8

GROUP_COLUMNS: Final = 32
TILE_ROWS: Final = 16
_LINE_BYTES: Final = 64
_LANE_CODES: Final = 4

GGUF_TYPES: Final = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0")
"""The block types whose codes are taken as they are."""

_Q4_K_BYTES, _Q4_K_GROUPS = 144, 8


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is stored.

    Attributes:
        name: by which it is asked for.
        bits: of a code.
        zero: the code that stands for 0, where there is no minimum.
        has_minimum: whether a group has one.
    """

    name: str
    bits: int
    zero: int
    has_minimum: bool

    @property
    def groups_per_block(self) -> int:
        """Groups whose scalars share a line."""
        return 1 if self.has_minimum else 2

    @property
    def code_bytes(self) -> int:
        """The bytes that a tile has for the codes of one group."""
        return TILE_ROWS * GROUP_COLUMNS * self.bits // 8

    def tile_bytes(self, num_columns: int) -> int:
        """The bytes of a tile."""
        groups = num_columns // GROUP_COLUMNS
        return -(-groups // self.groups_per_block) * _LINE_BYTES + groups * self.code_bytes


WEIGHT_FORMATS: Final = {
    kind.name: kind
    for kind in (
        WeightFormat("int8", 8, 128, False),
        WeightFormat("int4", 4, 8, False),
        WeightFormat("int4_min", 4, 0, True),
    )
}


@dataclass(frozen=True)
class WeightCodes:
    """A matrix as codes. A group with a weight that is no number has a step of NaN.

    Attributes:
        kind: the format.
        codes: `[N, K]` uint8, from 0.
        steps: `[N, K / 32]` float16.
        minima: `[N, K / 32]` float16, or None where the format has none.
    """

    kind: WeightFormat
    codes: torch.Tensor
    steps: torch.Tensor
    minima: torch.Tensor | None = None

    def decode(self) -> torch.Tensor:
        """The weights `[N, K]` float32 that these stand for."""
        groups = torch.unflatten(self.codes.float() - self.kind.zero, 1, (-1, GROUP_COLUMNS))
        weights = groups * self.steps.float().unsqueeze(2)
        if self.minima is not None:
            weights = weights + self.minima.float().unsqueeze(2)
        return weights.flatten(1)


@dataclass(frozen=True)
class QuantisedWeight:
    """A packed matrix.

    Attributes:
        format: one of `WEIGHT_FORMATS`.
        num_rows, num_columns: `N` and `K`.
        data: `[tiles, tile bytes]` uint8, contiguous.
        fine_rows: whether rows that it is multiplied with are quantised twice: they, and what that left of them.
    """

    format: str
    num_rows: int
    num_columns: int
    data: torch.Tensor
    fine_rows: bool = False

    @property
    def kind(self) -> WeightFormat:
        return WEIGHT_FORMATS[self.format]


def quantise(weights: torch.Tensor, format: str) -> WeightCodes:
    """The codes of `[N, K]` weights of any float dtype, `K` a multiple of 32.

    int8 spans the largest weight of a group; int4 searches for the scale with the least squared error.
    """
    kind = WEIGHT_FORMATS[format]
    _check_columns(weights.shape[1])
    fit = {"int8": fit_int8, "int4": fit_int4, "int4_min": fit_int4_min}[format]
    fitted = fit(torch.unflatten(weights, 1, (-1, GROUP_COLUMNS)).flatten(0, 1))
    shape = (weights.shape[0], -1)
    minima = None if fitted.minima is None else fitted.minima.view(shape)
    return WeightCodes(kind, fitted.codes.view(shape), fitted.steps.view(shape), minima)


def gguf_codes(blocks: npt.NDArray[np.uint8], name: str) -> WeightCodes:
    """The codes of `[N, bytes per row]` blocks of a GGUF tensor, unchanged; those of Q5_0 as int8.

    Steps and minima are those of the file too, but for Q4_K, which has products of two numbers, rounded to fp16 here.

    Args:
        blocks: as they lie in the file; they are copied.
        name: one of `GGUF_TYPES`.

    Raises:
        ValueError: the type is none of these, or the bytes are no whole blocks.
    """
    if name == "Q4_K":
        return _q4_k_codes(blocks)
    if name not in GGUF_TYPES:
        raise ValueError(f"blocks of {name} have no codes of groups of 32: {', '.join(GGUF_TYPES)} have")
    scalars = 2 if name == "Q4_1" else 1
    high_bytes = 4 if name == "Q5_0" else 0
    code_bytes = 32 if name == "Q8_0" else 16
    block_bytes = 2 * scalars + high_bytes + code_bytes
    num_rows, row_bytes = blocks.shape
    if row_bytes % block_bytes:
        raise ValueError(f"rows have {row_bytes} bytes: those of {name} are multiples of {block_bytes}")
    groups = np.ascontiguousarray(blocks).reshape(num_rows, row_bytes // block_bytes, block_bytes)

    def scalar(index: int) -> torch.Tensor:
        numbers = np.ascontiguousarray(groups[..., 2 * index : 2 * index + 2]).view(np.float16)[..., 0]
        return finite_or_nan(torch.from_numpy(numbers.copy()))

    stored = groups[..., 2 * scalars + high_bytes :]
    # Two's complement plus 128, or nibbles: the low ones are the first half of the group.
    codes = stored ^ 0x80 if name == "Q8_0" else np.concatenate((stored & 0x0F, stored >> 4), axis=2)
    if name == "Q5_0":
        high = np.unpackbits(groups[..., 2 : 2 + high_bytes], axis=2, bitorder="little")
        codes = (codes | high << 4) + np.uint8(WEIGHT_FORMATS["int8"].zero - 16)
    kind = WEIGHT_FORMATS[{"Q4_0": "int4", "Q4_1": "int4_min"}.get(name, "int8")]
    minima = scalar(1) if kind.has_minimum else None
    return WeightCodes(kind, torch.from_numpy(codes.reshape(num_rows, -1)), scalar(0), minima)


def _q4_k_codes(blocks: npt.NDArray[np.uint8]) -> WeightCodes:
    """Of blocks of 8 groups: two fp16, which scale steps and minima; 6 bits of each for every group; 4-bit codes."""
    from gguf.quants import Q4_K

    num_rows, row_bytes = blocks.shape
    if row_bytes % _Q4_K_BYTES:
        raise ValueError(f"rows have {row_bytes} bytes: those of Q4_K are multiples of {_Q4_K_BYTES}")
    whole = np.ascontiguousarray(blocks).reshape(-1, _Q4_K_BYTES)
    scales = whole[:, :4].copy().view(np.float16).astype(np.float32)
    steps, minima = (x.astype(np.float32) for x in Q4_K.get_scale_min(whole[:, 4:16].copy()))
    stored = whole[:, 16:].reshape(-1, _Q4_K_GROUPS // 2, 1, GROUP_COLUMNS)
    codes = np.concatenate((stored & 0x0F, stored >> 4), axis=2)
    with np.errstate(all="ignore"):  # a scale beyond fp16 is the file's affair
        scalars = [(scales[:, :1] * steps).astype(np.float16), (-scales[:, 1:] * minima).astype(np.float16)]
    kept = [finite_or_nan(torch.from_numpy(x.reshape(num_rows, -1))) for x in scalars]
    return WeightCodes(WEIGHT_FORMATS["int4_min"], torch.from_numpy(codes.reshape(num_rows, -1)), *kept)


def widened(codes: WeightCodes) -> WeightCodes:
    """The same weights in int8 instead of int4, both without a minimum."""
    wide, narrow = WEIGHT_FORMATS["int8"], WEIGHT_FORMATS["int4"]
    if codes.kind != narrow:
        raise ValueError(f"codes of {codes.kind.name} are not widened: those of {narrow.name} are")
    return WeightCodes(wide, codes.codes + (wide.zero - narrow.zero), codes.steps)


def pack(matrix: WeightCodes) -> QuantisedWeight:
    """The bytes of a matrix as kernels read them.

    Raises:
        ValueError: the columns are no multiple of 32.
    """
    kind, num_columns = matrix.kind, matrix.codes.shape[1]
    _check_columns(num_columns)
    codes, scalars = _tiles(matrix.codes), [_tiles(matrix.steps)]
    if matrix.minima is not None:
        scalars.append(_tiles(matrix.minima))

    # Whole blocks first, of which the last may be cut off after its first group.
    num_tiles, num_groups = len(codes), num_columns // GROUP_COLUMNS
    num_blocks = -(-num_groups // kind.groups_per_block)
    spare = num_blocks * kind.groups_per_block - num_groups
    padded = torch.nn.functional.pad(torch.stack(scalars, dim=3), (0, 0, 0, spare))
    scalar_lines = padded.view(num_tiles, TILE_ROWS, num_blocks, 2).permute(0, 2, 3, 1).contiguous().view(torch.uint8)

    per_lane = 8 // kind.bits  # runs of four codes
    padded = torch.nn.functional.pad(codes, (0, spare * GROUP_COLUMNS))
    lanes = padded.view(num_tiles, TILE_ROWS, num_blocks, -1, per_lane, _LANE_CODES)
    lanes = lanes[..., 0, :] if per_lane == 1 else lanes[..., 0, :] | lanes[..., 1, :] << 4
    code_lines = lanes.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_blocks, -1)

    data = torch.cat((scalar_lines.view(num_tiles, num_blocks, -1), code_lines), dim=2).flatten(1)
    data = data[:, : kind.tile_bytes(num_columns)].contiguous()
    return QuantisedWeight(kind.name, len(matrix.codes), num_columns, data)


def unpack(weight: QuantisedWeight) -> WeightCodes:
    """What was packed."""
    kind, num_tiles = weight.kind, len(weight.data)
    num_groups = weight.num_columns // GROUP_COLUMNS
    block_bytes = _LINE_BYTES + kind.groups_per_block * kind.code_bytes
    num_blocks = -(-num_groups // kind.groups_per_block)
    data = torch.nn.functional.pad(weight.data, (0, num_blocks * block_bytes - weight.data.shape[1]))
    data = data.view(num_tiles, num_blocks, block_bytes)

    scalars = data[..., :_LINE_BYTES].contiguous().view(torch.float16).view(num_tiles, num_blocks, 2, TILE_ROWS)
    lanes = data[..., _LINE_BYTES:].reshape(num_tiles, num_blocks, -1, TILE_ROWS, _LANE_CODES).permute(0, 3, 1, 2, 4)
    codes = lanes if kind.bits == 8 else torch.stack((lanes & 0x0F, lanes >> 4), dim=4)

    def rows(tiles: torch.Tensor, width: int) -> torch.Tensor:
        return tiles.reshape(num_tiles * TILE_ROWS, -1)[: weight.num_rows, :width].contiguous()

    if kind.has_minimum:
        steps, minima = (rows(x.transpose(1, 2), num_groups) for x in scalars.unbind(2))
        return WeightCodes(kind, rows(codes, weight.num_columns), steps, minima)
    return WeightCodes(kind, rows(codes, weight.num_columns), rows(scalars.permute(0, 3, 1, 2), num_groups))


def decode(weight: QuantisedWeight) -> torch.Tensor:
    """The weights `[N, K]` float32 that a packed matrix stands for."""
    return unpack(weight).decode()


def decode_rows(weight: QuantisedWeight, rows: torch.Tensor) -> torch.Tensor:
    """The weights `[T, K]` float32 of some rows `[T]`, int64."""
    if len(rows) == 0:
        return weight.data.new_empty(0, weight.num_columns, dtype=torch.float32)
    tiles = QuantisedWeight(weight.format, len(rows) * TILE_ROWS, weight.num_columns, weight.data[rows // TILE_ROWS])
    return decode(tiles).view(len(rows), TILE_ROWS, -1)[torch.arange(len(rows)), rows % TILE_ROWS]


def _tiles(rows: torch.Tensor) -> torch.Tensor:
    """`[N, n]` as `[tiles, 16, n]`, zeros behind the last row."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS)).view(-1, TILE_ROWS, rows.shape[1])


def _check_columns(num_columns: int) -> None:
    if num_columns == 0 or num_columns % GROUP_COLUMNS:
        raise ValueError(f"the matrix has {num_columns} columns: it must have a multiple of {GROUP_COLUMNS}")
