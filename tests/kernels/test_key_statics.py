"""What quantised keys are coded with: the moments of a text, their statics, and offsets that turn with the page."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from key_texts import frequencies, moments_of, random, received, statics_of, text_like, turned
from kvist.attention.rope import inverse_frequencies
from kvist.config import Llama3RopeScaling, RopeConfig
from kvist.kernels.codec import VectorCodec, storage_formats
from kvist.kernels.key_statics import KeyMoments, KeyStatics, PageTurns, key_moments, key_statics
from kvist.kernels.rotation import rotate

FORMATS = storage_formats()
QUANTISED = ("int8", "int4")
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (0, 1, 100)
LLAMA3 = RopeConfig(500_000.0, Llama3RopeScaling(32.0, 1.0, 4.0, 8192))


def pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def page_offset(statics: KeyStatics, number: int) -> torch.Tensor:
    """The offset of a page by the definition, `[K, D]` float64."""
    return turned(statics.offset, 64 * number, statics.frequencies)


def round_trip(name: str, k: torch.Tensor, statics: KeyStatics | None, numbers: torch.Tensor) -> torch.Tensor:
    """What the format makes of keys `[T, K, D]`, with the number of each one's page."""
    codec = VectorCodec(FORMATS[name], k.shape[-1], statics)
    return codec.decode(*codec.encode(k.permute(2, 1, 0), numbers), numbers).permute(2, 1, 0)


# --- the moments of a text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 64, 130])
@pytest.mark.parametrize("head_dim", [6, 80])
def test_moments_are_those_of_their_definition(head_dim: int, num_tokens: int) -> None:
    """Token by token; the planes' rates are any."""
    q, k = random(num_tokens, 6, head_dim), random(num_tokens, 2, head_dim, seed=1)
    weights, rates = random(2, num_tokens, seed=2).exp(), random(head_dim // 2, seed=3).exp()
    moments = key_moments(q, k, weights, rates)
    share = weights.double() / weights.double().sum(-1, keepdim=True)
    firsts = [token // 64 * 64 for token in range(num_tokens)]
    offset = sum((turned(k[token], -first, rates) for token, first in enumerate(firsts)), torch.zeros(1)) / num_tokens
    x = torch.stack([k[token].double() - turned(offset, first, rates) for token, first in enumerate(firsts)])
    assert torch.allclose(moments.offset, offset)
    assert torch.allclose(moments.first_key_moment, share[:, :1] * x[0].square())
    assert torch.allclose(moments.key_metric, torch.einsum("kt,tkd,tke->kde", share[:, 1:], x[1:], x[1:]))
    by_kv_head = q.double().view(num_tokens, 2, 3, head_dim)
    assert torch.allclose(
        moments.query_metric, torch.einsum("tkgd,tkge->kde", by_kv_head, by_kv_head) / (3 * num_tokens)
    )
    assert moments.num_tokens == num_tokens
    assert all(part.dtype == torch.float64 for part in vars(moments).values() if isinstance(part, torch.Tensor))


def test_attention_counts_by_its_shares_alone() -> None:
    q, k = text_like(64)
    one, other = (key_moments(q, k, factor * received(q, k), frequencies(64)) for factor in (1, 8))
    assert torch.equal(one.key_metric, other.key_metric)
    assert torch.equal(one.first_key_moment, other.first_key_moment)


@pytest.mark.parametrize("rope", [RopeConfig(10_000.0), LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_offset_is_the_mean_that_turns_with_the_pages(head_dim: int, rope: RopeConfig) -> None:
    rates = inverse_frequencies(rope, head_dim)
    planted = 5 * random(2, head_dim, seed=3)
    noise = random(20 * 64, 2, head_dim, seed=4)
    k = torch.stack([turned(planted, token // 64 * 64, rates) for token in range(len(noise))]) + noise
    moments = moments_of(random(len(noise), 4, head_dim), k.float(), rates)
    assert (moments.offset - planted).abs().max() < 5 / math.sqrt(len(noise))
    assert torch.equal(key_statics(moments, rates, head_dim).offset, moments.offset.float())


# --- the statics of the moments ---------------------------------------------------------------------------------------


def averaged(metric: torch.Tensor, rates: torch.Tensor, starts: list[float]) -> torch.Tensor:
    """The mean of R(s) M R(s)^T, one start after the other."""
    total = torch.zeros_like(metric)
    for start in starts:
        total += turned(turned(metric, start, rates).mT, start, rates)
    return total / len(starts)


@pytest.mark.parametrize("horizon", [1, 300, 8192])
@pytest.mark.parametrize("head_dim", [24, 80])
def test_statics_serve_wherever_the_text_may_stand(head_dim: int, horizon: int) -> None:
    """Against the formulas, with the moments turned to 64 places one by one."""
    rates = inverse_frequencies(LLAMA3, head_dim)
    moments = moments_of(*text_like(head_dim), rates)
    group_dims = FORMATS["int4"].group_dims(head_dim)
    statics = key_statics(moments, rates, group_dims, horizon=horizon)
    starts = [float(round(max(0, horizon - 300) * i / 63)) for i in range(64)]
    key_moment = averaged(moments.key_metric, rates, starts).diagonal(dim1=-2, dim2=-1) + moments.first_key_moment
    query_metric = averaged(moments.query_metric, rates, starts)
    scale = (query_metric.diagonal(dim1=-2, dim2=-1) / key_moment) ** 0.25
    scale /= scale.log().mean(-1, keepdim=True).exp()
    assert scale.log().abs().max() < math.log(32)
    assert torch.allclose(statics.scale.double(), scale, rtol=1e-5)
    hadamard = rotate(torch.eye(head_dim, dtype=torch.float64))
    for kv_head, group in [(0, 0), (1, head_dim // group_dims - 1)]:
        divided = query_metric[kv_head] / scale[kv_head, :, None] / scale[kv_head]
        metric = hadamard @ divided @ hadamard
        metric += 0.01 * metric.diagonal().mean() * torch.eye(head_dim, dtype=torch.float64)
        dims = slice(group * group_dims, (group + 1) * group_dims)
        lower = statics.feedback[kv_head, group].double()
        diagonal = torch.linalg.solve(lower, torch.linalg.solve(lower, metric[dims, dims]).mT)
        assert torch.allclose(lower @ diagonal.diagonal().diag() @ lower.T, metric[dims, dims], rtol=1e-4)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_statics_have_their_shapes(head_dim: int) -> None:
    statics = statics_of(head_dim)
    group_dims = FORMATS["int4"].group_dims(head_dim)
    num_groups = head_dim // group_dims
    assert statics.offset.shape == statics.scale.shape == (2, head_dim)
    assert torch.equal(statics.frequencies, frequencies(head_dim))
    assert statics.feedback.shape == (2, num_groups, group_dims, group_dims)
    assert torch.equal(statics.feedback, statics.feedback.tril())
    assert torch.equal(statics.feedback.diagonal(dim1=-2, dim2=-1), torch.ones(2, num_groups, group_dims))
    # A scale has no size of its own: queries stand divided by it.
    assert torch.allclose(statics.scale.log().mean(-1), torch.zeros(2), atol=0.05)
    assert all(part.dtype == torch.float32 for part in vars(statics).values())


def test_what_the_text_never_used_does_no_harm() -> None:
    """Dims of no query or no key, and a head that is silent altogether."""
    q, k = text_like(64)
    for dim in (3, 35):
        q[:, :2, dim] = 0
    for dim in (9, 41):
        k[:, 0, dim] = 0
    q[:, 2:], k[:, 1] = 0, 0
    statics = key_statics(moments_of(q, k), frequencies(64), 32)
    for part in vars(statics).values():
        assert part.isfinite().all()
    assert (statics.scale > 0).all()
    assert torch.equal(statics.scale[1], torch.ones(64))
    assert torch.equal(statics.feedback[1], torch.eye(32).expand(2, 32, 32))


@pytest.mark.parametrize("used_by", ["queries", "keys"])
def test_a_scale_stays_within_its_bounds(used_by: str) -> None:
    """Where one dim of 64 is all that queries use, and keys all others, or the other way about."""
    one = torch.zeros(1, 64, dtype=torch.float64)
    one[0, 3] = 1
    queries, keys = (one, 1 - one) if used_by == "queries" else (1 - one, one)
    nothing = torch.zeros(1, 64, dtype=torch.float64)
    moments = KeyMoments(nothing, keys.diag_embed(), nothing, queries.diag_embed(), num_tokens=300)
    scale = key_statics(moments, frequencies(64), 32, horizon=1).scale[0]
    assert scale[3] == (32 if used_by == "queries" else 1 / 32)
    assert (scale[torch.arange(64) != 3].log().abs() < math.log(2)).all()


# --- the turn of a page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [RopeConfig(10_000.0), LLAMA3], ids=["plain", "llama3"])
def test_pages_turn_by_their_first_positions(rope: RopeConfig) -> None:
    rates = inverse_frequencies(rope, 128)
    offset = random(128, 3, 1)
    numbers = pages(0, 1, 2, 100, 2047, 1)
    of_pages = PageTurns(rates).turn(offset, numbers)
    assert of_pages.shape == (128, 3, 6)
    for row, number in enumerate(numbers.tolist()):
        expected = turned(offset[:, :, 0].T, 64 * number, rates).T
        assert (of_pages[:, :, row] - expected).abs().max() < 1e-6
    assert torch.equal(of_pages[:, :, :1], offset)


def test_a_turn_depends_on_the_page_alone() -> None:
    """Not on what was asked for before, nor on threads."""
    rates, offset = frequencies(256), random(256, 2, 1)
    at_once = PageTurns(rates).turn(offset, torch.arange(300))
    grown = PageTurns(rates)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for number in (0, 63, 64, 299, 5):
            assert torch.equal(grown.turn(offset, pages(number)), at_once[:, :, [number]])
    finally:
        torch.set_num_threads(before)
    assert grown.turn(offset, pages()).shape == (256, 2, 0)
    assert PageTurns(rates).turn(offset, pages()).shape == (256, 2, 0)


# --- keys through the statics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", PAGES)
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_come_back_within_the_error_of_their_format(name: str, head_dim: int, number: int) -> None:
    """As a vector without statics does, measured in the space in which keys are coded."""
    plain = torch.eye(FORMATS["int4"].group_dims(head_dim))
    statics = statics_of(head_dim)
    statics = dataclasses.replace(statics, feedback=plain.expand_as(statics.feedback))
    offset = page_offset(statics, number)
    k = offset.float() + 3 * random(50, 2, head_dim)
    error = round_trip(name, k, statics, pages(number)) - k
    y, off = (rotate((x * statics.scale).permute(2, 1, 0).float()) for x in (k - offset, error))
    if name == "int8":
        assert (off.abs() <= 0.501 * y.abs().amax(0) / 127 + 1e-5).all()
        return
    y, off = (x.unflatten(0, (-1, len(plain))) for x in (y, off))
    step = (y.amax(1) - y.amin(1)) / 15
    assert (off.square().mean(1).sqrt() <= 0.56 * step + y.amin(1).abs() / 256).all()
    assert off.square().mean().sqrt() < 0.30 * step.square().mean().sqrt()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_a_page_s_own_offset_is_stored_as_nothing(name: str, head_dim: int) -> None:
    statics = statics_of(head_dim)
    numbers = pages(*PAGES)
    k = PageTurns(statics.frequencies).turn(statics.offset.T.unsqueeze(-1), numbers)
    codec = VectorCodec(FORMATS[name], head_dim, statics)
    codes, scalars = codec.encode(k, numbers)
    assert scalars is not None
    assert not codes.any()
    assert not scalars.any()
    assert torch.equal(codec.decode(codes, scalars, numbers), k)
    # Of another page it is a key like others.
    assert codec.encode(k, numbers.roll(1))[0].any()


@pytest.mark.parametrize("name", QUANTISED)
def test_pages_differ_by_their_offsets_alone(name: str) -> None:
    statics = statics_of(64)
    beside = random(64, 2, 200)
    outcomes = []
    for number in PAGES:
        k = beside + page_offset(statics, number).T.unsqueeze(-1)
        codes, scalars = VectorCodec(FORMATS[name], 64, statics).encode(k.float(), pages(number))
        assert scalars is not None
        outcomes.append((codes.float(), scalars.float()))
    for codes, scalars in outcomes[1:]:
        # The last bit of an offset turns the rounding of a few.
        assert (codes != outcomes[0][0]).float().mean() < 0.01
        assert torch.allclose(scalars, outcomes[0][1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_plain_keys_know_no_offset(name: str) -> None:
    k = random(20, 2, 64)
    assert torch.equal(round_trip(name, k, statics_of(64), pages(100)), round_trip(name, k, None, pages(0)))


@pytest.mark.parametrize("start", [0, 6400])
@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_statics_bring_scores_nearer_wherever_a_text_stands(name: str, head_dim: int, start: int) -> None:
    """What counts is the error of q . k less what it has in common over the keys, which softmax does not see."""
    q, k = (turned(x, start, frequencies(head_dim)).float() for x in text_like(head_dim))
    queries = q.view(len(q), 2, 2, head_dim)
    numbers = (start + torch.arange(len(k))) // 64

    def score_error(statics: KeyStatics | None) -> float:
        error = torch.einsum("tkgd,skd->kgts", queries, round_trip(name, k, statics, numbers) - k)
        return float((error - error.mean(-1, keepdim=True)).square().mean().sqrt())

    statics = statics_of(head_dim)
    assert score_error(statics) < 0.85 * score_error(None)
    if name == "int4":
        plain = dataclasses.replace(statics, feedback=torch.eye(statics.feedback.shape[-1]).expand_as(statics.feedback))
        assert score_error(statics) < 0.97 * score_error(plain)
    fixed = dataclasses.replace(statics, frequencies=torch.zeros(head_dim // 2))
    assert score_error(statics) < (0.7 if start else 0.9) * score_error(fixed)


def test_feedback_without_correlation_rounds_to_the_nearest() -> None:
    plain = KeyStatics(torch.zeros(2, 64), torch.ones(2, 64), torch.eye(32).expand(2, 2, 32, 32), frequencies(64))
    x = random(64, 2, 100)
    codes, scalars = VectorCodec(FORMATS["int4"], 64, plain).encode(x, pages(1))
    expected, expected_scalars = VectorCodec(FORMATS["int4"], 64).encode(x, pages(1))
    assert torch.equal(codes, expected)
    assert scalars is not None
    assert expected_scalars is not None
    assert torch.equal(scalars, expected_scalars)


def test_a_shared_key_costs_quantised_scores_nothing() -> None:
    """Keys that differ little from a mean that turns with the pages are coded by the difference."""
    shared = 100 * random(2, 64)
    numbers = torch.arange(500) // 64
    k = torch.stack([turned(shared, 64 * number, frequencies(64)) for number in numbers.tolist()]).float()
    k += random(500, 2, 64, seed=1)
    q = random(500, 4, 64, seed=2)
    moments: KeyMoments = moments_of(q, k)
    statics = key_statics(moments, frequencies(64), 32)
    off = (round_trip("int4", k, statics, numbers) - k).square().mean().sqrt()
    assert off < 0.2 < 5 < (round_trip("int4", k, None, numbers) - k).square().mean().sqrt()
