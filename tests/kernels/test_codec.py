"""The codec of keys and values, without pages: what comes back, and what depends on what."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from key_texts import random, statics_of
from kvist.kernels.codec import VectorCodec, _encode_int4, storage_formats
from kvist.kernels.key_statics import KeyStatics
from kvist.kernels.rotation import rotate
from kvist.kv_format import KV_FORMATS, QUANTISED_FORMATS

FORMATS = storage_formats()
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 256)
QUANTISED = ("int8", "int4")
FIRST_PAGE = torch.zeros(1, dtype=torch.int64)


def codec_of(name: str, head_dim: int, statics: KeyStatics | None = None) -> VectorCodec:
    return VectorCodec(FORMATS[name], head_dim, statics)


def round_trip(codec: VectorCodec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(*codec.encode(x, FIRST_PAGE), FIRST_PAGE)


# --- the rotation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 2, 20, *HEAD_DIMS])
def test_the_rotation_is_hadamards_and_its_own_inverse(head_dim: int) -> None:
    matrix = rotate(torch.eye(head_dim, dtype=torch.float64))
    block = head_dim & -head_dim
    assert torch.allclose(matrix @ matrix, torch.eye(head_dim, dtype=torch.float64), atol=1e-12)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix.abs().sum(0), torch.full((head_dim,), block**0.5, dtype=torch.float64))
    # Sylvester's: the sign is the parity of the bits that both indices have.
    rows = torch.arange(block)
    parity = (rows[:, None] & rows).apply_(int.bit_count) % 2
    assert torch.allclose(matrix[:block, :block], (1 - 2 * parity).double() * block**-0.5)


# --- the formats ------------------------------------------------------------------------------------------------------


def test_the_quantised_formats_are_those_with_scalars() -> None:
    assert set(FORMATS) == set(KV_FORMATS)
    assert {name for name, storage in FORMATS.items() if storage.scalars} == set(QUANTISED_FORMATS)


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_plain_formats_store_the_nearest_number(head_dim: int) -> None:
    x = random(head_dim, 2, 50)
    assert torch.equal(round_trip(codec_of("fp32", head_dim), x), x)
    assert torch.equal(round_trip(codec_of("bf16", head_dim), x), x.bfloat16().float())


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_int8_is_off_by_half_a_step_at_most(head_dim: int, scale: float) -> None:
    x = random(head_dim, 2, 50) * scale
    error = rotate(round_trip(codec_of("int8", head_dim), x) - x)
    step = rotate(x).abs().amax(0) / 127
    assert (error.abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_int4_is_off_by_about_half_a_step_and_what_bf16_moves_the_floor_by(head_dim: int, scale: float) -> None:
    """bf16 moves the ends of the range by up to 2^-8 of its 15 steps and of its floor; the fit trades dims off."""
    error, step, floor = int4_errors(random(head_dim, 2, 50) * scale)
    assert ((error / scale).square().mean(1).sqrt() <= (0.56 * step + floor / 256) / scale).all()
    typical = ((error / scale).square().mean() / (step / scale).square().mean()).sqrt()
    assert typical < 0.30  # rounding alone: 12^-0.5 = 0.289


def test_int4_is_off_by_several_steps_where_bf16_is_coarser_than_they_are() -> None:
    """A group far from zero whose numbers hardly differ."""
    x = 0.1 * random(64, 1, 1000)
    x[0] += 800
    error, step, floor = int4_errors(x)
    off = error.square().mean(1).sqrt()
    assert (off <= 0.56 * step + floor / 256).all()
    assert 2 < (off / step).max() < 8


def int4_errors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of vectors `[D, K, N]` the errors `[groups, g, K, N]`, a 15th of each group's range, and where it begins."""
    codec = codec_of("int4", len(x))
    y, error = (v.unflatten(0, (-1, codec.group_dims)) for v in (rotate(x), rotate(round_trip(codec, x) - x)))
    return error, (y.amax(1) - y.amin(1)) / 15, y.amin(1).abs()


def test_int4_takes_the_step_that_fits_best() -> None:
    """Uneven groups gain by least squares against the plain range."""
    codec = codec_of("int4", 32)
    x = rotate(random(32, 1, 400).pow(3))
    y, fitted = rotate(x), rotate(round_trip(codec, x))
    step = ((y.amax(0) - y.amin(0)) / 15).bfloat16().float()
    floor = y.amin(0).bfloat16().float()
    plain = floor + ((y - floor) / step).round().clamp(0, 15) * step
    errors = [(z - y).square().sum(0) for z in (fitted, plain)]
    assert (errors[0] <= errors[1] * 1.001).all()
    assert errors[0].sum() < 0.97 * errors[1].sum()


def test_a_group_whose_values_differ_keeps_a_step() -> None:
    """Also where the floor in bf16 lies so far off that a constant at its neighbour would be nearer."""
    generator = torch.Generator().manual_seed(0)
    y = 1.0039 + 1e-4 * torch.rand(32, 2, 200, generator=generator)
    _, scalars = codec_of("int4", 32).encode(rotate(y), FIRST_PAGE)
    assert scalars is not None
    assert (scalars[:, 0] > 0).all()


def test_a_floor_beyond_bf16_is_not_finite() -> None:
    y = torch.zeros(32, 1, 2)
    y[3, 0, 0] = -3.4e38  # finite in float32
    codes, scalars = _encode_int4(y, 32, None)
    assert scalars[:, :, 0, 0].isnan().all()
    assert not codes.any()
    assert not scalars[:, :, 0, 1].any()


def fed_back_codes(
    values: Sequence[np.float32], step: np.float32, floor: np.float32, feedback: Sequence[Sequence[np.float32]]
) -> list[int]:
    """The int4 codes of one group of one vector, rounded from its last dim to its first.

    What is lost in a dim, between its value and `floor + code * step`, moves the targets of the dims before it. Each
    operation rounds to float32 by itself.

    Args:
        values: of the group's dims.
        step, floor: of the group.
        feedback: by the dim that was rounded, then by the dim that it moves.
    """
    inverse = np.float32(1) / step if step > 0 else np.float32(0)
    targets, codes = list(values), [0] * len(values)
    for dim in reversed(range(len(values))):
        codes[dim] = int(min(max(np.rint((targets[dim] - floor) * inverse), 0), 15))
        error = floor + np.float32(codes[dim]) * step - values[dim]
        for moved in range(dim):
            targets[moved] -= feedback[dim][moved] * error
    return codes


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_feedback_gives_the_codes_of_its_plain_twin(head_dim: int) -> None:
    statics = statics_of(head_dim)
    feedback = 0.5 * random(*statics.feedback.shape, seed=1)
    ones = torch.eye(feedback.shape[-1])
    statics = dataclasses.replace(statics, feedback=feedback.tril(-1) + ones)
    codec = codec_of("int4", head_dim, statics)
    offset = statics.offset.T.unsqueeze(-1)
    k = offset + rotate(random(head_dim, 2, 12).pow(3)) / statics.scale.T.unsqueeze(-1)
    codes, scalars = codec.encode(k, FIRST_PAGE)
    assert scalars is not None
    # On the first page the offset is not turned.
    y = rotate((k - offset) * statics.scale.T.unsqueeze(-1)).unflatten(0, (-1, codec.group_dims))
    by_group = codes.unflatten(0, (-1, codec.group_dims))
    differing = 0
    for group, kv_head, token in itertools.product(range(len(y)), range(2), range(12)):
        values = y[group, :, kv_head, token]
        step, floor = scalars[group, :, kv_head, token].float()
        rows = statics.feedback[kv_head, group].numpy()
        twin = fed_back_codes(list(values.numpy()), step.numpy()[()], floor.numpy()[()], rows)
        assert by_group[group, :, kv_head, token].tolist() == twin
        nearest = ((values - floor) / step).round().clamp(0, 15)
        differing += nearest.tolist() != twin
    assert differing > len(y) * 8  # of 24


@pytest.mark.parametrize("name", QUANTISED)
def test_large_dims_do_not_drown_the_others(name: str) -> None:
    x = random(64, 1, 100)
    x[5] *= 100
    error = round_trip(codec_of(name, 64), x) - x
    assert error.abs().max() < (1.5 if name == "int8" else 30)
    assert error[5].square().mean() < 3 * error.square().mean()


@pytest.mark.parametrize("name", KV_FORMATS)
def test_zeros_come_back_as_zeros(name: str) -> None:
    x = torch.zeros(64, 1, 3)
    assert torch.equal(round_trip(codec_of(name, 64), x), x)


@pytest.mark.parametrize("name", QUANTISED)
def test_steps_too_small_to_divide_by_are_none(name: str) -> None:
    codec = codec_of(name, 64)
    codes, scalars = codec.encode(random(64, 2, 5) * 1e-33, FIRST_PAGE)
    assert scalars is not None
    assert not codes.any()
    assert not scalars[:, 0].any()
    assert (codec.decode(codes, scalars, FIRST_PAGE).abs() <= 1e-31).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_vector_that_is_not_finite_is_none_as_a_whole(name: str, bad: float, head_dim: int) -> None:
    x = random(head_dim, 2, 4)
    x[7, 1, 2], x[9, 1, 2] = bad, bad
    codec = codec_of(name, head_dim)
    codes, scalars = codec.encode(x, FIRST_PAGE)
    assert scalars is not None
    assert scalars[:, :, 1, 2].isnan().all()
    assert not codes[:, 1, 2].any()
    y = codec.decode(codes, scalars, FIRST_PAGE)
    assert y[:, 1, 2].isnan().all()
    good = round_trip(codec, random(head_dim, 2, 4))
    others = torch.tensor([True, True, False, True])
    assert torch.equal(y[:, 0], good[:, 0])
    assert torch.equal(y[:, 1, others], good[:, 1, others])


# --- what depends on what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_statics", [False, True])
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_codes_do_not_depend_on_company_or_memory_order(name: str, head_dim: int, with_statics: bool) -> None:
    statics = statics_of(head_dim) if with_statics else None
    codec = codec_of(name, head_dim, statics)
    x = random(head_dim, 2, 67, seed=3) * 5
    numbers = torch.arange(67) * 31 % 40
    codes, scalars = codec.encode(x, numbers)
    by_token = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    alone = [codec_of(name, head_dim, statics).encode(by_token[:, :, [row]], numbers[[row]]) for row in range(67)]
    assert torch.equal(torch.cat([one for one, _ in alone], dim=-1), codes)
    if scalars is not None:
        assert torch.equal(torch.cat([one for _, one in alone if one is not None], dim=-1), scalars)
    decoded = codec.decode(codes, scalars, numbers)
    assert torch.equal(torch.cat([codec.decode(*alone[row], numbers[[row]]) for row in range(67)], dim=-1), decoded)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_run_of_one_page_is_as_its_tokens_one_by_one(name: str) -> None:
    codec = codec_of(name, 64, statics_of(64))
    x, numbers = random(64, 2, 21), torch.tensor([7, 0, 90])
    of_runs, of_tokens = codec.encode(x, numbers), codec.encode(x, numbers.repeat_interleave(7))
    assert all(torch.equal(one, other) for one, other in zip(of_runs, of_tokens, strict=True))
    assert torch.equal(codec.decode(*of_runs, numbers), codec.decode(*of_tokens, numbers.repeat_interleave(7)))
    nothing = codec.encode(x[:, :, :0], numbers[:0])
    assert codec.decode(*nothing, numbers[:0]).shape == (64, 2, 0)


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_do_not_depend_on_threads(name: str) -> None:
    statics = statics_of(64)
    x, numbers = random(64, 2, 3000), torch.arange(3000) // 64
    before = torch.get_num_threads()
    outcomes = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            codec = codec_of(name, 64, statics)
            codes, scalars = codec.encode(x, numbers)
            assert scalars is not None
            outcomes.append((codes, scalars, codec.decode(codes, scalars, numbers)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.parametrize("name", QUANTISED)
def test_what_was_decoded_encodes_to_itself_nearly(name: str) -> None:
    codec = codec_of(name, 64)
    once = round_trip(codec, random(64, 2, 50))
    twice = round_trip(codec, once)
    assert (twice - once).abs().max() < (1e-5 if name == "int8" else 0.3)


# --- bits that are the same on every CPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_nan_of_bf16_has_one_pattern(name: str) -> None:
    x = torch.tensor([0x7FC00000, -1, 0x7F800001, 0x7FC12345], dtype=torch.int32).view(torch.float32)
    codes, scalars = codec_of(name, 64).encode(x.repeat(16, 1, 1).view(64, 1, 1), FIRST_PAGE)
    stored = codes if scalars is None else scalars
    assert set(stored.view(torch.int16).flatten().tolist()) == {0x7FC0}


def test_a_bf16_number_keeps_its_bits_in_bf16() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(64, 1, -1)
    codes, _ = codec_of("bf16", 64).encode(bits.view(torch.bfloat16), FIRST_PAGE)
    assert torch.equal(codes.view(torch.int16), bits)


def test_a_floor_of_zero_has_one_sign_wherever_its_vector_stands() -> None:
    x = torch.full((64, 1, 40), -0.0)  # rotated, one dim is -0 and the others are 0
    _, scalars = codec_of("int4", 64).encode(x, FIRST_PAGE)
    assert scalars is not None
    assert set(scalars.view(torch.int16).flatten().tolist()) == {0}
