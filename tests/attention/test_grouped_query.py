"""Grouped-query attention over padded tensors: against the expanded computation, with masks, in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import ROPE, close, expanded, inputs, module
from torch.utils._python_dispatch import TorchDispatchMode

from kvist.attention import ContiguousCache, GroupedQueryAttention, grouped_attention
from kvist.errors import OptionError

HEADS = [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1)]


# --- the order of heads, and what is never made -----------------------------------------------------------------------


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("options", [{}, {"rope": ROPE}, {"bias": True}], ids=["plain", "rope", "bias"])
def test_grouped_is_what_expanding_each_kv_head_for_its_own_group_gives(num_heads, num_kv_heads, options) -> None:
    attention, x = module(num_heads, num_kv_heads, **options), inputs(2, 9)
    y, _ = attention(x)
    for row in range(2):
        close(y[row], expanded(attention, x[row]))


def test_repeating_the_whole_row_of_heads_gives_something_else() -> None:
    attention, x = module(6, 2), inputs(1, 9)
    y, _ = attention(x)
    other = expanded(attention, x[0], whole_row=True)
    assert (y[0] - other).abs().max() > 0.05
    for ends in ((6, 6), (6, 1)):  # where all share or none, there is one order only
        attention = module(*ends)
        close(attention(x)[0][0], expanded(attention, x[0], whole_row=True))


def test_with_as_many_kv_heads_it_is_pytorchs_multi_head_attention() -> None:
    attention, x = module(3, 3, bias=True), inputs(2, 7)
    oracle = torch.nn.MultiheadAttention(24, 3, batch_first=True).eval()
    with torch.no_grad():
        for name, of_all in (("weight", oracle.in_proj_weight), ("bias", oracle.in_proj_bias)):
            of_all.copy_(torch.cat([getattr(getattr(attention, f"{part}_proj"), name) for part in "qkv"]))
        oracle.out_proj.load_state_dict(attention.o_proj.state_dict())
        hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
        expected, _ = oracle(x, x, x, attn_mask=hidden, need_weights=False)
        close(attention(x)[0], expected)


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation made, in scalars."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return made


def sizes(run: Callable[[], object]) -> int:
    with Sizes() as seen:
        run()
    return seen.largest


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_and_values_are_never_expanded_to_all_heads(gradients: bool, masked: bool) -> None:
    num_heads, num_kv_heads, length, head_dim = 16, 2, 512, 64
    q = torch.randn(1, 1, num_heads, head_dim, requires_grad=gradients)
    k, v = (torch.randn(1, num_kv_heads, length, head_dim, requires_grad=gradients) for _ in range(2))
    visible = torch.ones(1, 1, length, dtype=torch.bool) if masked else None

    def run() -> None:
        mixed = grouped_attention(q, k, v, visible, scale=0.1)
        if gradients:
            mixed.sum().backward()

    all_heads = num_heads * length * head_dim
    assert sizes(run) <= num_kv_heads * length * head_dim  # gradients of keys and values, no more
    assert sizes(lambda: k.repeat_interleave(8, dim=1)) == all_heads  # what is looked for would be seen


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_cache_begins_empty_and_grows_along_the_length() -> None:
    attention, x = module(6, 2), inputs(3, 5)
    cache = ContiguousCache.empty(3, 2, 8)
    assert cache.keys.shape == cache.values.shape == (3, 2, 0, 8)
    lengths = []
    for index in range(5):
        earlier = cache
        _, cache = attention(x[:, index : index + 1], cache)
        lengths.append(cache.length)
        assert cache.keys.shape == (3, 2, index + 1, 8)
        assert torch.equal(cache.keys[:, :, :index], earlier.keys)
    assert lengths == [1, 2, 3, 4, 5]
    assert cache.num_scalars == 2 * 3 * 2 * 5 * 8
    assert earlier.length == 4  # what was appended to stays as it was


def test_a_cache_can_be_gone_on_from_in_two_ways() -> None:
    attention, x = module(6, 2, rope=ROPE), inputs(1, 6)
    _, cache = attention(x[:, :4])
    for other in (x[:, 4:], -x[:, 4:]):
        y, _ = attention(other, cache)
        close(y[0], expanded(attention, torch.cat((x[0, :4], other[0])))[4:])


def test_1024_tokens_hold_as_many_scalars_as_the_arithmetic_says() -> None:
    for num_kv_heads, scalars in ((16, 2_097_152), (4, 524_288), (1, 131_072)):
        cache = ContiguousCache.empty(1, num_kv_heads, 64)
        new = torch.zeros(1, 1024, num_kv_heads, 64)
        assert cache.appended(new, new).num_scalars == scalars


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chunks_over_a_cache_give_what_recomputing_everything_gives(data: st.DataObject) -> None:
    num_heads, num_kv_heads = data.draw(st.sampled_from(HEADS), "heads")
    chunks = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6), "chunks")
    batch = data.draw(st.integers(1, 3), "batch")
    rope = data.draw(st.sampled_from([None, ROPE]), "rope")
    attention, x = module(num_heads, num_kv_heads, rope=rope), inputs(batch, sum(chunks), data.draw(st.integers(0, 99)))
    with torch.no_grad():
        whole, _ = attention(x)
        cache, parts = None, []
        for part in x.split(chunks, dim=1):
            y, cache = attention(part, cache)
            parts.append(y)
    close(torch.cat(parts, dim=1), whole)


def test_positions_may_be_given_and_are_those_that_are_counted() -> None:
    attention, x = module(6, 2, rope=ROPE), inputs(2, 6)
    expected, _ = attention(x)
    close(attention(x, positions=torch.arange(6))[0], expected)
    close(attention(x, positions=torch.arange(6).expand(2, 6) + 1000)[0], expected)  # distances alone count
    assert (attention(x, positions=2 * torch.arange(6))[0] - expected).abs().max() > 0.01
    _, cache = attention(x[:, :4])
    close(attention(x[:, 4:], cache, positions=torch.tensor([4, 5]))[0], expected[:, 4:])


# --- masks ------------------------------------------------------------------------------------------------------------


def padded_batch(rows: list[torch.Tensor], left: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[L, E]` of different lengths in one tensor, with NaN for padding, and which are tokens."""
    longest = max(map(len, rows))
    x, mask = torch.full((len(rows), longest, 24), torch.nan), torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, (row, at_left) in enumerate(zip(rows, left, strict=True)):
        place = slice(longest - len(row), longest) if at_left else slice(0, len(row))
        x[index, place], mask[index, place] = row, True
    return x, mask


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_of_a_padded_batch_give_what_they_give_alone(data: st.DataObject) -> None:
    num_heads, num_kv_heads = data.draw(st.sampled_from(HEADS), "heads")
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any), "lengths")
    left = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)), "left")
    more = data.draw(st.integers(0, 3), "more")
    attention = module(num_heads, num_kv_heads, rope=ROPE, bias=True)
    rows = [inputs(1, length + more, seed)[0] for seed, length in enumerate(lengths)]
    with torch.no_grad():
        x, mask = padded_batch([row[:length] for row, length in zip(rows, lengths, strict=True)], left)
        y, cache = attention(x, mask=mask)
        later = []
        for step in range(more):  # what follows has no padding: the cache remembers where there is some
            new, cache = attention(
                torch.stack([row[n + step] for row, n in zip(rows, lengths, strict=True)])[:, None], cache
            )
            later.append(new)
        assert (y[~mask] == 0).all()
        for index, row in enumerate(rows):
            if len(row):
                alone = expanded(attention, row)
                close(torch.cat([y[index, mask[index]], *(new[index] for new in later)]), alone)


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_with_everything_masked_gives_zeros_and_its_gradients_are_numbers(bias: bool) -> None:
    attention, x = module(6, 2, bias=bias), inputs(2, 4).requires_grad_()
    mask = torch.tensor([[True] * 4, [False] * 4])
    y, _ = attention(x, mask=mask)
    assert (y[1] == 0).all()
    assert (y[0] != 0).all()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())


def test_a_mask_of_pairs_says_which_sees_which() -> None:
    attention, x = module(6, 2, bias=True), inputs(1, 5)
    pairs = torch.ones(1, 5, 5, dtype=torch.bool)
    close(attention(x, mask=pairs)[0], attention(x)[0])  # causality stays
    pairs[0, 3:, :3] = False  # two texts in one row
    pairs[0, 1] = False
    y, _ = attention(x, mask=pairs)
    close(y[0, 3:], expanded(attention, x[0, 3:]))
    assert (y[0, 1] == 0).all()
    _, cache = attention(x[:, :3])
    close(attention(x[:, 3:], cache, mask=pairs[:, 3:])[0], y[:, 3:])


def test_without_causality_all_see_all() -> None:
    attention, x = module(6, 2, causal=False), inputs(1, 5)
    y, _ = attention(x)
    close(attention(x.flip(1))[0].flip(1), y)  # nothing has an order
    attention.causal = True
    close(attention(x)[0][:, -1], y[:, -1])  # the last token sees all as well
    assert (attention(x)[0][:, 0] - y[:, 0]).abs().max() > 0.01


# --- cross-attention --------------------------------------------------------------------------------------------------


def test_cross_attention_reads_an_encoder_that_was_projected_once() -> None:
    attention, states, x = module(6, 2), inputs(2, 7, seed=1), inputs(2, 3, seed=2)
    calls: list[object] = []
    attention.k_proj.register_forward_hook(lambda *_: calls.append(None))
    memory = attention.encode(states)
    together, _ = attention(x, memory)
    parts = []
    for index in range(3):
        y, after = attention(x[:, index : index + 1], memory)
        assert after is memory
        parts.append(y)
    assert len(calls) == 1
    close(torch.cat(parts, dim=1), together)
    q = attention.q_proj(x).view(2, 3, 6, 8)
    k, v = (side(states).view(2, 7, 2, 8).repeat_interleave(3, dim=2) for side in (attention.k_proj, attention.v_proj))
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).softmax(-1)
    close(together, attention.o_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)))


@pytest.mark.parametrize("mask", [None, torch.ones(2, 3, 0, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)])
def test_an_encoder_that_gave_nothing_is_seen_as_zeros(mask: torch.Tensor | None) -> None:
    attention = module(6, 2, bias=True)
    y, _ = attention(inputs(2, 3), attention.encode(inputs(2, 0)), mask=mask)
    assert y.shape == (2, 3, 24)
    assert not y.any()


@pytest.mark.parametrize("bias", [False, True])
def test_an_encoder_may_have_another_width_than_the_decoder(bias: bool) -> None:
    attention, x = module(6, 2, bias=bias, kv_dim=40), inputs(2, 3)
    states = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(1))
    y, memory = attention(x, attention.encode(states))
    assert (memory.keys.shape, y.shape) == ((2, 2, 7, 8), (2, 3, 24))
    q = attention.q_proj(x).view(2, 3, 6, 8)
    k, v = (
        torch.nn.functional.linear(states, side.weight, side.bias).view(2, 7, 2, 8).repeat_interleave(3, dim=2)
        for side in (attention.k_proj, attention.v_proj)
    )
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).softmax(-1)
    close(y, attention.o_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)))


def test_padding_of_an_encoder_is_not_seen() -> None:
    attention, states, x = module(6, 2, bias=True), inputs(2, 7, seed=1), inputs(2, 3, seed=2)
    mask = torch.tensor([[True] * 4 + [False] * 3, [False] * 7])
    states[~mask] = torch.nan
    y, _ = attention(x, attention.encode(states, mask))
    close(y[0], attention(x[:1], attention.encode(states[:1, :4]))[0][0])
    assert (y[1] == 0).all()
    real = torch.tensor([[True, True, False], [True] * 3])
    assert (attention(x, attention.encode(states, mask), mask=real)[0][0, 2] == 0).all()


# --- training, dtypes, devices ----------------------------------------------------------------------------------------


def test_gradients_are_those_of_finite_differences_through_a_cache_too() -> None:
    attention = module(4, 2, rope=ROPE).double()
    x = inputs(1, 4).double().requires_grad_()

    def stepwise(x: torch.Tensor) -> torch.Tensor:
        y, cache = attention(x[:, :3])
        return torch.cat((y, attention(x[:, 3:], cache)[0]), dim=1)

    assert torch.autograd.gradcheck(lambda x: attention(x)[0], (x,))
    assert torch.autograd.gradcheck(stepwise, (x,))


def test_dropout_acts_in_training_alone_and_keeps_the_mean() -> None:
    attention, x = module(6, 2, dropout=0.5), inputs(1, 6)
    expected, _ = attention(x)
    attention.train()
    torch.manual_seed(1)
    drawn = torch.stack([attention(x)[0] for _ in range(2000)])
    assert (drawn[0] - drawn[1]).abs().max() > 0.01
    assert (drawn.mean(0) - expected).abs().max() < 0.05
    attention.eval()
    assert torch.equal(attention(x)[0], expected)


def test_norms_of_queries_and_keys_are_applied() -> None:
    norms = {name: torch.nn.RMSNorm(8, 1e-6) for name in ("q_norm", "k_norm")}
    attention, x = module(6, 2, **norms), inputs(1, 5)
    assert (attention(x)[0] - module(6, 2)(x)[0]).abs().max() > 0.01
    with torch.no_grad():
        attention.q_proj.weight.mul_(7)
        close(attention(x)[0], module(6, 2, **norms)(x)[0])  # the norm takes the factor away


def test_bf16_is_close_to_float32() -> None:
    attention, x = module(6, 2, rope=ROPE), inputs(2, 6)
    expected, _ = attention(x)
    attention.bfloat16()
    y, cache = attention(x[:, :5].bfloat16())
    last, _ = attention(x[:, 5:].bfloat16(), cache)
    assert cache.keys.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat((y, last), dim=1).float(), expected, rtol=0, atol=0.02)


DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]  # meta: nothing is made on another device


@pytest.mark.parametrize("device", DEVICES)
def test_everything_stays_on_its_device(device: str) -> None:
    attention, x = module(6, 2, rope=ROPE, bias=True).to(device), inputs(2, 4).to(device)
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    y, cache = attention(x, mask=mask)
    y, cache = attention(x[:, :1], cache)
    cross = module(6, 2).to(device)
    z, _ = cross(x, cross.encode(x, mask))
    assert {y.device.type, z.device.type, cache.keys.device.type} == {device}
    assert cache.keys.shape == (2, 2, 5, 8)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((24, 6, 4), {}, r"^num_kv_heads is 4: it must divide the 6 query heads: choose 1, 2, 3 or 6$"),
        ((24, 6, 12), {}, r"^num_kv_heads is 12: it must divide the 6 query heads: choose 1, 2, 3 or 6$"),
        ((24, 1, 2), {}, r"^num_kv_heads is 2: with one query head it must be 1$"),
        ((24, 6, 0), {}, r"^num_kv_heads is 0: it must be at least 1$"),
        ((24, 0, 1), {}, r"^num_heads is 0: it must be at least 1$"),
        ((0, 6, 1), {}, r"^embed_dim is 0"),
        ((25, 6, 2), {}, r"^embed_dim 25 does not divide by 6 heads: give head_dim$"),
        ((24, 6, 2, 0), {}, r"^head_dim is 0"),
        ((24, 6, 2, 5), {"rope": ROPE}, r"^head_dim is 5: rope turns pairs of dims, so it must be even$"),
        ((24, 6, 2), {"kv_dim": 0}, r"^kv_dim is 0: it must be at least 1$"),
        ((24, 6, 2), {"kv_dim": 40, "rope": ROPE}, r"^cross-attention has no common positions to turn by"),
        ((24, 6, 2), {"dropout": 1.5}, r"^dropout is 1.5: it must be at least 0 and at most 1$"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, options, message) -> None:
    with pytest.raises(OptionError, match=message):
        GroupedQueryAttention(*arguments, **options)


def _forward(options: dict[str, object], *arguments: object, **named: object) -> None:
    module(6, 2, **options)(*arguments, **named)


X = inputs(2, 3)
TRUE = torch.ones(2, 3, dtype=torch.bool)
OTHER_CACHE = ContiguousCache.empty(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _forward({}, X[0]), r"^x is \(3, 24\): it must be \[B, L, E\] with E = 24$"),
        (lambda: _forward({}, X[..., :5]), r"^x is \(2, 3, 5\)"),
        (lambda: _forward({}, X, OTHER_CACHE), r"^the cache has \(B, K, D\) = \(2, 3, 8\): .* they are \(2, 2, 8\)$"),
        (lambda: _forward({}, X, positions=torch.arange(3)), r"^positions are for rope, which this module has none of"),
        (lambda: _forward({"rope": ROPE}, X, positions=torch.arange(4)), r"^positions are \(4,\): they must be \(3,\)"),
        (lambda: _forward({}, X, mask=TRUE.float()), r"^mask is \(2, 3\) torch.float32: it must be bool, \(2, 3\) or"),
        (lambda: _forward({}, X, mask=TRUE[:, :2]), r"^mask is \(2, 2\) torch.bool: .* \(2, 3\) or \(2, 3, 3\)$"),
        (lambda: _forward({"causal": False}, X, ContiguousCache.empty(2, 2, 8)), r"^without causality earlier tokens"),
        (lambda: module(6, 2, rope=ROPE).encode(X), r"^cross-attention has no common positions"),
        (
            lambda: module(6, 2).encode(X, mask=torch.ones(2, 3, 3, dtype=torch.bool)),
            r"^mask is \(2, 3, 3\) .* \(2, 3\)$",
        ),
        (lambda: module(6, 2, kv_dim=40).encode(X), r"^states is \(2, 3, 24\): .* \[B, S, kv_dim\] with kv_dim = 40$"),
        (
            lambda: _forward({"kv_dim": 40}, X),
            r"^keys and values are made of an encoder's output of width 40, not of x",
        ),
        (lambda: _forward({"kv_dim": 40}, X, ContiguousCache.empty(2, 2, 8)), r"^keys and values are made of an enc"),
        (lambda: _forward({}, X, module(6, 2).encode(X), positions=torch.arange(3)), r"^positions are for rope"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
