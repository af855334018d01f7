"""Weights as codes, and codes as packed bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvist.kernels.weight_codec import (
    GGUF_TYPES,
    GROUP_COLUMNS,
    TILE_ROWS,
    WEIGHT_FORMATS,
    WeightCodes,
    decode,
    decode_rows,
    gguf_codes,
    pack,
    quantise,
    unpack,
    widened,
)

SHAPES = [(1, 32), (15, 64), (16, 96), (17, 160), (48, 576), (100, 32)]


def random(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def relative_error(weights: torch.Tensor, codes: WeightCodes) -> float:
    return float((codes.decode() - weights).norm() / weights.norm())


def same(a: WeightCodes, b: WeightCodes) -> bool:
    minima = a.minima is b.minima if a.minima is None or b.minima is None else torch.equal(a.minima, b.minima)
    return a.kind == b.kind and torch.equal(a.codes, b.codes) and torch.equal(a.steps, b.steps) and minima


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_what_is_packed_comes_back(format: str, num_rows: int, num_columns: int) -> None:
    codes = quantise(random(num_rows, num_columns), format)
    packed = pack(codes)
    assert packed.data.shape == (-(-num_rows // TILE_ROWS), packed.kind.tile_bytes(num_columns))
    assert same(unpack(packed), codes)
    assert torch.equal(decode(packed), codes.decode())


@pytest.mark.parametrize(("format", "bits"), [("int8", 8.5), ("int4", 4.5), ("int4_min", 5.0)])
def test_a_weight_takes_the_bits_that_its_format_says(format: str, bits: float) -> None:
    assert pack(quantise(random(32, 128), format)).data.numel() * 8 == bits * 32 * 128


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_packed_bytes_lie_where_the_drawing_says(format: str) -> None:
    codes = quantise(random(40, 96), format)
    kind, data = codes.kind, pack(codes).data
    for row, column in [(0, 0), (5, 3), (17, 36), (39, 95), (33, 70)]:
        group, within = column // GROUP_COLUMNS, column % GROUP_COLUMNS
        block, in_block = divmod(group, kind.groups_per_block)
        start = block * (64 + kind.groups_per_block * kind.code_bytes)
        per_lane = 32 // kind.bits
        line, in_lane = divmod(within, per_lane)
        place = start + 64 + in_block * kind.code_bytes + line * 64 + row % 16 * 4 + in_lane % 4
        code = int(data[row // 16, place]) >> 4 * (in_lane // 4) & (1 << kind.bits) - 1
        assert code == codes.codes[row, column]
        scalars = data[row // 16, start : start + 64].view(torch.float16).view(2, 16)
        assert scalars[in_block, row % 16] == codes.steps[row, group]
        if codes.minima is not None:
            assert scalars[1, row % 16] == codes.minima[row, group]


@pytest.mark.parametrize("num_columns", [0, 31, 40])
def test_columns_come_in_groups_of_32(num_columns: int) -> None:
    with pytest.raises(ValueError, match=f"the matrix has {num_columns} columns: it must have a multiple of 32"):
        quantise(random(4, num_columns), "int8")


# --- GGUF -------------------------------------------------------------------------------------------------------------


EXACT_TYPES = [name for name in GGUF_TYPES if name != "Q4_K"]


@pytest.mark.parametrize("name", EXACT_TYPES)
def test_the_codes_of_a_gguf_tensor_stand_for_its_weights(name: str) -> None:
    kind = GGMLQuantizationType[name]
    blocks = quantize(random(19, 160).numpy(), kind)
    codes = gguf_codes(blocks, name)
    np.testing.assert_array_equal(codes.decode().numpy(), dequantize(blocks, kind))
    assert same(unpack(pack(codes)), codes)


def test_q4_k_loses_no_more_than_its_scalars_in_fp16() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (7, 2 * 144), np.uint8)
    for block in (blocks[:, :144], blocks[:, 144:]):
        block[:, :4] = rng.uniform(1e-3, 1e-2, (7, 2)).astype(np.float16).view(np.uint8)
    codes = gguf_codes(blocks, "Q4_K")
    assert codes.minima is not None
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_K))
    bound = (15 * codes.steps.float() + codes.minima.float().abs()) * 2**-11
    assert ((codes.decode() - expected).abs() <= 1.01 * bound.repeat_interleave(GROUP_COLUMNS, 1)).all()
    assert same(unpack(pack(codes)), codes)


@pytest.mark.parametrize("name", EXACT_TYPES)
def test_any_bytes_are_codes(name: str) -> None:
    """Each code that a block can hold, with steps of any sign."""
    kind = GGMLQuantizationType[name]
    some = quantize(random(19, 160).numpy(), kind)
    blocks = np.random.default_rng(0).integers(0, 256, some.shape, np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, kind)
    given = gguf_codes(blocks, name).decode().numpy()
    finite = np.isfinite(expected).reshape(19, -1, GROUP_COLUMNS).all(2).repeat(GROUP_COLUMNS, 1)
    np.testing.assert_array_equal(given[finite], expected[finite])
    assert finite.mean() > 0.8
    assert not np.isinf(given).any()


def test_blocks_that_are_read_only_warn_nobody() -> None:
    blocks = quantize(random(3, 64).numpy(), GGMLQuantizationType.Q8_0)
    blocks.flags.writeable = False
    assert gguf_codes(blocks, "Q8_0").codes.shape == (3, 64)


def test_blocks_of_other_types_and_torn_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of Q6_K have no codes of groups of 32: Q4_0, Q4_1, Q4_K, Q5_0"):
        gguf_codes(np.zeros((1, 210), np.uint8), "Q6_K")
    with pytest.raises(ValueError, match="rows have 19 bytes: those of Q4_0 are multiples of 18"):
        gguf_codes(np.zeros((1, 19), np.uint8), "Q4_0")
    with pytest.raises(ValueError, match="rows have 100 bytes: those of Q4_K are multiples of 144"):
        gguf_codes(np.zeros((1, 100), np.uint8), "Q4_K")


def test_codes_of_four_bits_are_widened_to_the_same_weights() -> None:
    codes = quantise(random(19, 96), "int4")
    assert torch.equal(widened(codes).decode(), codes.decode())
    with pytest.raises(ValueError, match="codes of int4_min are not widened"):
        widened(quantise(random(19, 96), "int4_min"))


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_single_rows_are_decoded(format: str) -> None:
    packed = pack(quantise(random(37, 96), format))
    rows = torch.tensor([0, 36, 16, 15, 36])
    assert torch.equal(decode_rows(packed, rows), decode(packed)[rows])
    assert decode_rows(packed, rows[:0]).shape == (0, 96)


# --- from numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "name"), [("int8", "Q8_0"), ("int4", "Q4_0"), ("int4_min", "Q4_1")])
def test_weights_lose_less_than_gguf_makes_them_lose(format: str, name: str) -> None:
    weights = random(64, 576)
    theirs = gguf_codes(quantize(weights.numpy(), GGMLQuantizationType[name]), name)
    ours = quantise(weights, format)
    assert relative_error(weights, ours) < relative_error(weights, theirs) * (1.01 if format == "int8" else 0.96)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_group_of_one_value_keeps_it(format: str, value: float) -> None:
    decoded = quantise(torch.full((2, 64), value), format).decode()
    assert torch.allclose(decoded, torch.full((2, 64), value), rtol=1e-3)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_weights_of_codes_keep_their_codes(format: str) -> None:
    """Weights that were quantised before, and use the whole range, lose nothing but rounding."""
    kind = WEIGHT_FORMATS[format]
    codes = torch.arange(32).repeat(4, 2) % 16 if kind.bits == 4 else torch.linspace(1, 255, 64).round().repeat(4, 1)
    weights = (codes - kind.zero) * 0.125 + (1.5 if kind.has_minimum else 0)
    assert relative_error(weights, quantise(weights, format)) < 1e-3


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_no_number_spoils_its_own_group_alone(format: str, what: float) -> None:
    """So do weights that fp16 steps cannot reach."""
    weights = random(20, 96)
    expected = quantise(weights, format).decode()
    weights[3, 40] = what
    given = quantise(weights, format).decode()
    assert given[3, 32:64].isnan().all()
    given[3, 32:64] = expected[3, 32:64]
    assert torch.equal(given, expected)


@pytest.mark.parametrize("scale", [1.0, 3e-4, 3e-5, 1e-5, 3e-6, 1e-6])
def test_eight_bits_lose_less_than_four_of_weights_of_any_size(scale: float) -> None:
    """Steps of 3e-8 are the least of fp16, and far apart."""
    weights = random(48, 160) * (scale / 0.02)
    eight, four = (relative_error(weights, quantise(weights, format)) for format in ("int8", "int4_min"))
    assert eight < max(0.01, 0.02 * 1e-6 / scale)
    assert eight < 0.3 * four


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_may_have_any_float_dtype(dtype: torch.dtype) -> None:
    weights = random(20, 96).to(dtype)
    assert same(quantise(weights, "int4"), quantise(weights.float(), "int4"))
