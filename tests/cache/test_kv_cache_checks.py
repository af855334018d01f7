"""What a cache is made of and given: configurations, statics, layers, arguments."""

from __future__ import annotations

import pytest
import torch
from kv_cache_cases import EXACT, FULL, WINDOWED, cache_of

from cache_checks import check_books, reserved_tokens
from key_texts import identity_statics
from kvist.cache import kv_cache
from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.page_codec import PageCodec
from kvist.cache.page_layout import PageLayout
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import OptionError, RewindError, SequenceError
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import LayerFormats

# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "at least 1"),
        ({"rewind_slack_tokens": -1}, "rewind_slack_tokens is -1: it must be at least 0"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0: it must be at least 1"),
    ],
)
def test_configurations_are_checked(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CacheConfig(**{"kv_format": EXACT, "memory_bytes": 1, **changes})  # type: ignore[arg-type]


# --- statics ----------------------------------------------------------------------------------------------------------


def test_quantised_keys_without_statics_are_refused() -> None:
    def built(kv_format: str, statics: list[KeyStatics | None] | None) -> KVCache:
        return KVCache((FULL, WINDOWED), CacheConfig(LayerFormats.parse(kv_format), 2**20), key_statics=statics)

    first, second = identity_statics((FULL, WINDOWED))
    for kv_format in ("int8", "int4", "k=int8,v=fp32"):
        with pytest.raises(ValueError, match=r"layer 0 keeps its keys in int\d and has no statics"):
            built(kv_format, None)
        with pytest.raises(ValueError, match=r"layer 1 keeps its keys in int\d and has no statics"):
            built(kv_format, [first, None])
        built(kv_format, [first, second])
    with pytest.raises(ValueError, match="layer 1 keeps its keys in int4 and has no statics"):
        built("bf16/1:int4", [first, None])
    built("int4/1:bf16", [first, None])
    built("k=bf16,v=int4", None)
    with pytest.raises(ValueError, match="key_statics of 3 layers for 2"):
        built("int8", [first, second, second])


def test_statics_move_to_the_device_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()

    def codec(layout: PageLayout, statics: list[KeyStatics]) -> PageCodec:
        devices.update(value.device.type for of_layer in statics for value in vars(of_layer).values())
        return PageCodec(layout)

    monkeypatch.setattr(kv_cache, "PageCodec", codec)
    config = CacheConfig(LayerFormats.parse("int8"), 2**20)
    KVCache((FULL, WINDOWED), config, "meta", key_statics=identity_statics((FULL, WINDOWED)))
    assert devices == {"meta"}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 16, None), "num_kv_heads is 0: it must be at least 1"),
        ((1, 0, None), "head_dim is 0: it must be at least 1"),
        ((1, 16, 0), "window is 0: it must be at least 1, or None to see all"),
    ],
)
def test_layers_are_checked(shape: tuple[int, int, int | None], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerConfig(*shape)


def test_a_cache_has_layers() -> None:
    for build in (lambda: KVCache([], CacheConfig(EXACT, 1 << 20)), lambda: CachePlan([], EXACT, 0, 1)):
        with pytest.raises(OptionError, match="there are no layers: a cache needs one at least"):
            build()


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1.5, float("nan"), float("inf"), -1, None, "7", True])
def test_numbers_of_tokens_are_integers(number: object) -> None:
    cache = cache_of(64)
    sequence = cache.open()
    for call in (cache.reserve, cache.rewind):
        with pytest.raises((OptionError, RewindError), match=r"it must be|cannot rewind to"):
            call(sequence, number)  # type: ignore[arg-type]
    assert cache.reserve(sequence, 64)
    with pytest.raises(OptionError, match=f"num_tokens of sequence {sequence} is"):
        cache.view([Span(sequence, number)])  # type: ignore[arg-type]
    assert (cache.length(sequence), reserved_tokens(cache, sequence)) == (0, 64)
    check_books(cache)


def test_a_view_is_committed_where_it_belongs() -> None:
    ours, theirs = cache_of(64), cache_of(64)
    sequence = ours.open()
    assert ours.reserve(sequence, 3)
    view = ours.view([Span(sequence, 3)])
    with pytest.raises(SequenceError, match="the view is of another cache"):
        theirs.commit(view)
    assert ours.length(sequence) == 0
    ours.commit(view)
    assert ours.length(sequence) == 3


def test_keys_and_values_have_the_shape_of_their_layer() -> None:
    cache = cache_of(64)
    sequence = cache.open()
    assert cache.reserve(sequence, 3)
    view = cache.view([Span(sequence, 3)])
    whole = torch.zeros(3, 2, 16)
    for k, v in ((whole[:1], whole[:1]), (whole, whole[:, :1]), (whole[..., :8], whole), (whole[0], whole[0])):
        with pytest.raises(ValueError, match=r"layer 0 takes keys and values \(3, 2, 16\)"):
            view.write(0, k, v)
    with pytest.raises(ValueError, match="layer 9 is not in this cache: it has 2, from 0 on"):
        view.write(9, whole, whole)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_keys_values_and_queries_are_floating_point(dtype: torch.dtype) -> None:
    cache = cache_of(64)
    sequence = cache.open()
    assert cache.reserve(sequence, 3)
    view, floats, others = cache.view([Span(sequence, 3)]), torch.ones(3, 2, 16), torch.ones(3, 2, 16, dtype=dtype)
    for k, v, name in ((others, floats, "k"), (floats, others, "v")):
        with pytest.raises(ValueError, match=f"{name} is of {dtype}: it must have floating-point numbers"):
            view.write(0, k, v)
    view.write(0, floats, floats)
    with pytest.raises(ValueError, match=f"q is of {dtype}: it must have floating-point numbers"):
        view.attend(0, others, scale=1.0)
    assert view.attend(0, floats, scale=1.0).isfinite().all()
