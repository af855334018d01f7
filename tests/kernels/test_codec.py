"""The codec of keys and values, without pages: what comes back, and what depends on what."""

from __future__ import annotations

import pytest
import torch

from kvist.config import STORAGE_FORMATS
from kvist.kernels.codec import VectorCodec, storage_formats
from kvist.kernels.key_statics import KeyMoments, KeyStatics, key_statics
from kvist.kernels.rotation import rotate

FORMATS = storage_formats()
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 256)
QUANTISED = ("int8", "int4")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codec_of(name: str, head_dim: int, statics: KeyStatics | None = None) -> VectorCodec:
    return VectorCodec(FORMATS[name], head_dim, statics)


def round_trip(codec: VectorCodec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(*codec.encode(x))


def text_like(head_dim: int, num_kv_heads: int = 2, num_tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys `[K, N, D]` with what real ones have: means, a few large dims, a first token like no other."""
    spread = random(num_kv_heads, 1, head_dim, seed=1).exp()
    k = random(num_kv_heads, num_tokens, head_dim, seed=2) * spread + 3 * random(num_kv_heads, 1, head_dim, seed=3)
    k[:, 0] *= 4
    mixing = random(num_kv_heads, head_dim, head_dim, seed=4) * torch.linspace(0.05, 1, head_dim) ** 3
    return random(num_kv_heads, num_tokens, head_dim, seed=5) @ mixing, k


def moments_of(q: torch.Tensor, k: torch.Tensor) -> KeyMoments:
    q, k = q.double(), k.double()
    mean = k.mean(1)
    received = (q @ k.mT * k.shape[-1] ** -0.5).softmax(-1).mean(1)
    moment = torch.einsum("kt,ktd->kd", received, (k - mean[:, None]).square())
    return KeyMoments(mean, moment, q.mT @ q / q.shape[1])


def statics_of(head_dim: int) -> KeyStatics:
    return key_statics(moments_of(*text_like(head_dim)), FORMATS["int4"].group_dims(head_dim))


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
def test_int4_is_off_by_half_a_step_at_most_in_the_mean(head_dim: int, scale: float) -> None:
    """bf16 moves the ends of the range by up to 2^-8 of its 15 steps and of its floor; the fit trades dims off."""
    codec = codec_of("int4", head_dim)
    x = random(head_dim, 2, 50) * scale
    y, error = (v.unflatten(0, (-1, codec.group_dims)) for v in (rotate(x), rotate(round_trip(codec, x) - x)))
    step = (y.amax(1) - y.amin(1)) / 15
    floor = y.amin(1).abs()
    assert ((error / scale).square().mean(1).sqrt() <= (0.56 * step + floor / 256) / scale).all()
    typical = ((error / scale).square().mean() / (step / scale).square().mean()).sqrt()
    assert typical < 0.30  # rounding alone: 12^-0.5 = 0.289


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


@pytest.mark.parametrize("name", QUANTISED)
def test_large_dims_do_not_drown_the_others(name: str) -> None:
    x = random(64, 1, 100)
    x[5] *= 100
    error = round_trip(codec_of(name, 64), x) - x
    assert error.abs().max() < (1.5 if name == "int8" else 30)
    assert error[5].square().mean() < 3 * error.square().mean()


@pytest.mark.parametrize("name", STORAGE_FORMATS)
def test_zeros_come_back_as_zeros(name: str) -> None:
    x = torch.zeros(64, 1, 3)
    assert torch.equal(round_trip(codec_of(name, 64), x), x)


@pytest.mark.parametrize("name", QUANTISED)
def test_steps_too_small_to_divide_by_are_none(name: str) -> None:
    codec = codec_of(name, 64)
    codes, scalars = codec.encode(random(64, 2, 5) * 1e-33)
    assert scalars is not None
    assert not codes.any()
    assert not scalars[:, 0].any()
    assert (codec.decode(codes, scalars).abs() <= 1e-31).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_vector_that_is_not_finite_is_none_as_a_whole(name: str, bad: float, head_dim: int) -> None:
    x = random(head_dim, 2, 4)
    x[7, 1, 2], x[9, 1, 2] = bad, bad
    codec = codec_of(name, head_dim)
    codes, scalars = codec.encode(x)
    assert scalars is not None
    assert scalars[:, :, 1, 2].isnan().all()
    assert not codes[:, 1, 2].any()
    y = codec.decode(codes, scalars)
    assert y[:, 1, 2].isnan().all()
    good = round_trip(codec, random(head_dim, 2, 4))
    others = torch.tensor([True, True, False, True])
    assert torch.equal(y[:, 0], good[:, 0])
    assert torch.equal(y[:, 1, others], good[:, 1, others])


# --- what depends on what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_statics", [False, True])
@pytest.mark.parametrize("name", STORAGE_FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_codes_do_not_depend_on_company_or_memory_order(name: str, head_dim: int, with_statics: bool) -> None:
    codec = codec_of(name, head_dim, statics_of(head_dim) if with_statics else None)
    x = random(head_dim, 2, 67, seed=3) * 5
    codes, scalars = codec.encode(x)
    by_token = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    alone = [codec.encode(by_token[:, :, [token]]) for token in range(67)]
    assert torch.equal(torch.cat([one for one, _ in alone], dim=-1), codes)
    if scalars is not None:
        assert torch.equal(torch.cat([one for _, one in alone if one is not None], dim=-1), scalars)


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_do_not_depend_on_threads(name: str) -> None:
    codec = codec_of(name, 64, statics_of(64))
    x = random(64, 2, 3000)
    before = torch.get_num_threads()
    outcomes = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            codes, scalars = codec.encode(x)
            assert scalars is not None
            outcomes.append((codes, scalars, codec.decode(codes, scalars)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


@pytest.mark.parametrize("name", QUANTISED)
def test_what_was_decoded_encodes_to_itself_nearly(name: str) -> None:
    codec = codec_of(name, 64)
    once = round_trip(codec, random(64, 2, 50))
    twice = round_trip(codec, once)
    assert (twice - once).abs().max() < (1e-5 if name == "int8" else 0.3)


# --- statics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_statics_have_their_shapes(head_dim: int) -> None:
    statics = statics_of(head_dim)
    group_dims = FORMATS["int4"].group_dims(head_dim)
    q, k = text_like(head_dim)
    assert torch.allclose(statics.offset, k.mean(1), atol=1e-5)
    assert statics.feedback.shape == (2, head_dim // group_dims, group_dims, group_dims)
    assert torch.equal(statics.feedback, statics.feedback.tril())
    assert torch.equal(statics.feedback.diagonal(dim1=-2, dim2=-1), torch.ones(2, head_dim // group_dims, group_dims))
    # A scale has no size of its own: queries stand divided by it.
    assert torch.allclose(statics.scale.log().mean(-1), torch.zeros(2), atol=0.05)
    assert q.shape == k.shape


def test_dims_that_the_text_never_used_do_no_harm() -> None:
    q, k = text_like(64)
    q[:, :, 3], k[:, :, 9] = 0, 0
    statics = key_statics(moments_of(q, k), 32)
    for part in (statics.offset, statics.scale, statics.feedback):
        assert part.isfinite().all()
    assert (statics.scale > 0).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_statics_bring_scores_nearer(name: str, head_dim: int) -> None:
    """What counts is the error of q . k less what it has in common over the keys, which softmax does not see."""
    q, k = text_like(head_dim)
    keys = k.permute(2, 0, 1)

    def score_error(statics: KeyStatics | None) -> float:
        error = (round_trip(codec_of(name, head_dim, statics), keys) - keys).permute(1, 2, 0)
        return float((q @ error.mT).square().mean().sqrt())

    statics = statics_of(head_dim)
    without_feedback = KeyStatics(statics.offset, statics.scale, torch.eye(32).expand(2, head_dim // 32, 32, 32))
    assert score_error(statics) < 0.75 * score_error(None)
    if name == "int4" and head_dim % 32 == 0:
        assert score_error(statics) < 0.9 * score_error(without_feedback)


def test_feedback_without_correlation_rounds_to_the_nearest() -> None:
    plain = KeyStatics(torch.zeros(2, 64), torch.ones(2, 64), torch.eye(32).expand(2, 2, 32, 32))
    x = random(64, 2, 100)
    codes, scalars = codec_of("int4", 64, plain).encode(x)
    expected, expected_scalars = codec_of("int4", 64).encode(x)
    assert torch.equal(codes, expected)
    assert scalars is not None
    assert expected_scalars is not None
    assert torch.equal(scalars, expected_scalars)


def test_a_shared_key_costs_quantised_scores_nothing() -> None:
    """Keys that differ little from their mean are coded by the difference."""
    k = 100 * random(2, 1, 64) + random(2, 500, 64, seed=1)
    q = random(2, 500, 64, seed=2)
    statics = key_statics(moments_of(q, k), 32)
    keys = k.permute(2, 0, 1)
    off = (round_trip(codec_of("int4", 64, statics), keys) - keys).square().mean().sqrt()
    assert off < 0.2 < 5 < (round_trip(codec_of("int4", 64), keys) - keys).square().mean().sqrt()
