"""The same module over pages: what it gives over tensors, for any lengths of rows and any chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import ROPE, close, expanded, inputs, module

from kvist.attention import PagedCache
from kvist.errors import CacheFullError, OptionError, ReservationError, StateError


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_pages_give_what_tensors_and_recomputing_give(data: st.DataObject) -> None:
    num_heads, num_kv_heads = data.draw(st.sampled_from([(6, 6), (6, 2), (6, 1)]), "heads")
    chunks = data.draw(st.lists(st.sampled_from([1, 2, 5, 63, 64, 65]), min_size=1, max_size=5), "chunks")
    batch = data.draw(st.integers(1, 3), "batch")
    masks = [
        torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * n, max_size=batch * n))).view(batch, n)
        if n < 10 and data.draw(st.booleans())
        else None
        for n in chunks
    ]
    attention, x = module(num_heads, num_kv_heads, rope=ROPE, bias=True), inputs(batch, sum(chunks))
    pages, cache = PagedCache(batch, num_kv_heads, 8, max_tokens=sum(chunks)), None
    paged, contiguous, real = [], [], []
    with torch.no_grad():
        for part, mask in zip(x.split(chunks, dim=1), masks, strict=True):
            y, after = attention(part, pages, mask=mask)
            assert after is pages
            paged.append(y)
            z, cache = attention(part, cache, mask=mask)
            contiguous.append(z)
            real.append(torch.ones(part.shape[:2], dtype=torch.bool) if mask is None else mask)
        y, z, kept = (torch.cat(parts, dim=1) for parts in (paged, contiguous, real))
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
        assert torch.equal(pages.num_tokens(), kept.sum(1))
        assert torch.equal(cache.num_tokens(), kept.sum(1))
        row = data.draw(st.integers(0, batch - 1), "row")
        if kept[row].any():
            close(y[row, kept[row]], expanded(attention, x[row, kept[row]]))
        assert (y[~kept] == 0).all()


def test_padding_takes_no_pages() -> None:
    attention, x = module(6, 2), inputs(2, 70)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 1:] = False
    pages = PagedCache(2, 2, 8, max_tokens=128)
    with torch.no_grad():
        attention(x, pages, mask=mask)
    one_page = PagedCache(1, 2, 8, max_tokens=1)
    with torch.no_grad():
        attention(x[:1, :1], one_page)
    assert pages.length == 70
    assert pages.num_bytes == 3 * one_page.num_bytes  # two pages and one


def test_formats_are_honoured() -> None:
    attention, x = module(6, 2, head_dim=16), inputs(1, 80)
    with torch.no_grad():
        expected, _ = attention(x)
        errors = []
        for kv_format in ("fp32", "bf16", "k=bf16,v=int8"):
            y, _ = attention(x, PagedCache(1, 2, 16, max_tokens=80, kv_format=kv_format))
            errors.append((y - expected).abs().max().item())
    assert errors[0] < 1e-5 < errors[1] < errors[2] < 0.1


def test_a_step_beyond_the_room_is_refused_and_changes_nothing() -> None:
    attention, x = module(6, 2), inputs(1, 8)
    pages = PagedCache(1, 2, 8, max_tokens=5)
    with torch.no_grad():
        attention(x[:, :4], pages)
        with pytest.raises(ReservationError, match="no room reserved for 2 more tokens"):
            attention(x[:, 4:6], pages)
        y, _ = attention(x[:, 4:5], pages)
    assert pages.length == 5
    close(y[0, 0], expanded(attention, x[0, :5])[4])


def test_what_pages_cannot_do_is_refused() -> None:
    attention, x = module(6, 2, dropout=0.1), inputs(2, 4)
    pages = PagedCache(2, 2, 8, max_tokens=8)
    with pytest.raises(StateError, match=r"^a paged cache keeps no gradients: run under"):
        attention(x, pages)
    with torch.no_grad():
        with pytest.raises(OptionError, match=r"^mask is \(2, 4, 4\) torch.bool: it must be bool, \(2, 4\)$"):
            attention(x, pages, mask=torch.ones(2, 4, 4, dtype=torch.bool))
        with pytest.raises(OptionError, match=r"^the cache has \(B, K, D\) = \(2, 2, 8\)"):
            attention(x[:1], pages)
        with pytest.raises(OptionError, match=r"^without causality"):
            module(6, 2, causal=False)(x, pages)
        attention.train()
        with pytest.raises(StateError, match="read without dropout"):
            attention(x, pages)
    assert pages.length == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": "int8"}, "^kv_format is int8: quantised keys need statics of a trained model"),
        ({"kv_format": "int5"}, "^unknown kv_format 'int5'"),
        ({"max_tokens": 0}, "^max_tokens is 0"),
        ({"batch": 0}, "^batch is 0"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options, message) -> None:
    with pytest.raises(OptionError, match=message):
        PagedCache(**{"batch": 1, "num_kv_heads": 2, "head_dim": 8, "max_tokens": 4, **options})


def test_more_than_the_system_grants_is_said_in_the_caches_own_words() -> None:
    with pytest.raises(
        CacheFullError, match=r"^2 rows of 10,000,000,000,000 tokens take .*: lower batch or max_tokens$"
    ):
        PagedCache(2, 2, 64, max_tokens=10**13)
