"""The cache's surface: room, views, rewinding, the budget."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from dataclasses import dataclass, field

import pytest
import torch

from kvist.cache.kv_cache import KVCache, Span, kv_bytes_per_token
from kvist.config import CacheConfig, LayerConfig, parse_bytes
from kvist.errors import OptionError

LAYERS = (LayerConfig(2, 8, None), LayerConfig(1, 16, 4))
BYTES = (2 * 2 * 8 + 2 * 16) * 4


def cache_of(num_tokens: int, kv_format: str = "fp32") -> KVCache:
    return KVCache(LAYERS, CacheConfig(kv_format, num_tokens * kv_bytes_per_token(LAYERS, kv_format)))


def append(cache: KVCache, sequence: int, keys: torch.Tensor) -> None:
    """Append tokens whose keys in the first layer are `keys` `[T, 2, 8]`, values the negative."""
    view = cache.view([Span(sequence, len(keys))])
    view.write(0, keys, -keys)
    view.write(1, keys.reshape(-1, 1, 16), -keys.reshape(-1, 1, 16))
    cache.commit(view)


def first_layer(cache: KVCache, sequence: int) -> torch.Tensor:
    """The keys held of the first layer, `[L, 2, 8]`, checked against its values."""
    view = cache.view([Span(sequence, 0)])
    keys, values = view.read(0, 0)
    assert torch.equal(values, -keys)
    return keys.transpose(0, 1)


def test_bytes_per_token_count_keys_and_values_of_all_layers() -> None:
    assert kv_bytes_per_token(LAYERS, "fp32") == BYTES
    assert kv_bytes_per_token(LAYERS, "bf16") == BYTES // 2


def test_what_is_written_is_read_over_growth() -> None:
    cache = cache_of(1000)
    one, other = cache.open(), cache.open()
    keys = torch.randn(300, 2, 8)
    for start in range(0, 300, 7):
        chunk = keys[start : start + 7]
        for sequence, sign in ((one, 1), (other, 2)):
            assert cache.reserve(sequence, start + len(chunk))
            append(cache, sequence, chunk * sign)
    assert torch.equal(first_layer(cache, one), keys)
    assert torch.equal(first_layer(cache, other), 2 * keys)


def test_growing_token_by_token_copies_seldom() -> None:
    cache = cache_of(10_000)
    sequence = cache.open()
    capacities = set()
    for length in range(1, 5001):
        assert cache.reserve(sequence, length)
        capacities.add(cache.used_bytes)
    assert len(capacities) < 16


def test_a_step_that_is_not_committed_leaves_the_sequence_as_it_was() -> None:
    cache = cache_of(100)
    sequence = cache.open()
    cache.reserve(sequence, 50)
    keys = torch.randn(10, 2, 8)
    append(cache, sequence, keys)
    failed = cache.view([Span(sequence, 5)])
    failed.write(0, torch.full((5, 2, 8), torch.nan), torch.full((5, 2, 8), torch.nan))
    assert cache.length(sequence) == 10
    more = torch.randn(5, 2, 8)
    append(cache, sequence, more)
    assert torch.equal(first_layer(cache, sequence), torch.cat((keys, more)))


def test_rewinding_and_writing_again() -> None:
    cache = cache_of(100)
    sequence = cache.open()
    cache.reserve(sequence, 50)
    keys = torch.randn(10, 2, 8)
    append(cache, sequence, keys)
    cache.rewind(sequence, 4)
    append(cache, sequence, 3 * keys[:2])
    assert torch.equal(first_layer(cache, sequence), torch.cat((keys[:4], 3 * keys[:2])))
    with pytest.raises(ValueError, match="cannot rewind to 7: the sequence holds 6"):
        cache.rewind(sequence, 7)


def test_the_budget_bounds_all_sequences_together() -> None:
    cache = cache_of(100)
    one, other = cache.open(), cache.open()
    assert cache.reserve(one, 60)
    assert not cache.reserve(other, 41)
    assert cache.used_bytes == 60 * BYTES
    assert cache.reserve(other, 40)
    assert not cache.reserve(one, 61)
    cache.release(other)
    assert cache.reserve(one, 100)
    cache.release(one)
    assert cache.used_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_used_bytes_are_those_of_the_tensors(seed: int) -> None:
    rng = random.Random(seed)
    cache = cache_of(500)
    sequences: list[int] = []
    for _ in range(200):
        if sequences and rng.random() < 0.2:
            cache.release(sequences.pop(rng.randrange(len(sequences))))
        elif rng.random() < 0.4:
            sequences.append(cache.open())
        elif sequences:
            cache.reserve(rng.choice(sequences), rng.randrange(300))
        assert cache.used_bytes == sum(cache.capacity(sequence) for sequence in sequences) * BYTES
        assert cache.used_bytes <= cache.config.memory_bytes


def test_used_bytes_may_be_asked_for_while_sequences_come_and_go() -> None:
    cache = cache_of(10_000)
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for sequence in [cache.open() for _ in range(50)]:
                cache.release(sequence)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {cache.used_bytes for _ in range(20_000)} == {0}
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


@dataclass
class Allocations:
    left: int = -1  # how many succeed; all, where it is negative
    peak_bytes: int = 0
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Watches the tensors that a cache grows into."""
    watch = Allocations()
    new_empty = torch.Tensor.new_empty

    def watched(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        if watch.left == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        watch.left -= 1
        made = new_empty(tensor, *shape)
        watch.made.append(weakref.ref(made))
        watch.peak_bytes = max(watch.peak_bytes, sum(held.nbytes for one in watch.made if (held := one()) is not None))
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", watched)
    return watch


def test_a_growth_holds_one_tensor_twice_and_no_more(allocations: Allocations) -> None:
    cache = KVCache([LAYERS[0]] * 20, CacheConfig("fp32", 2**30))
    sequence = cache.open()
    assert cache.reserve(sequence, 100)
    assert cache.reserve(sequence, 200)
    one_tensor = 100 * 2 * 8 * 4
    assert allocations.peak_bytes == cache.used_bytes + one_tensor


@pytest.mark.parametrize("succeeding", range(4))
def test_a_growth_that_the_machine_has_no_memory_for_loses_nothing(allocations: Allocations, succeeding: int) -> None:
    cache = cache_of(100)
    sequence, fresh = cache.open(), cache.open()
    assert cache.reserve(sequence, 10)
    keys = torch.randn(30, 2, 8)
    append(cache, sequence, keys[:10])
    for grown in (sequence, fresh):
        allocations.left = succeeding
        with pytest.raises(RuntimeError, match="can't allocate"):
            cache.reserve(grown, 30)
        allocations.left = -1
    assert (cache.capacity(sequence), cache.capacity(fresh)) == (10, 0)
    assert torch.equal(first_layer(cache, sequence), keys[:10])
    # What the first tensors took is counted all the same, so that the budget holds.
    held = sum(one.nbytes for ref in allocations.made if (one := ref()) is not None)
    assert cache.used_bytes == held
    assert cache.reserve(sequence, 30)
    append(cache, sequence, keys[10:])
    assert torch.equal(first_layer(cache, sequence), keys)
    cache.release(sequence)
    cache.release(fresh)
    assert cache.used_bytes == 0


def test_positions_are_those_of_each_sequence() -> None:
    cache = cache_of(100)
    one, other = cache.open(), cache.open()
    cache.reserve(one, 20)
    cache.reserve(other, 20)
    append(cache, one, torch.randn(5, 2, 8))
    view = cache.view([Span(other, 3), Span(one, 2)])
    assert view.positions().tolist() == [0, 1, 2, 5, 6]
    assert view.row_starts == (0, 3)


def test_misuse_is_refused() -> None:
    cache = cache_of(100)
    sequence = cache.open()
    with pytest.raises(ValueError, match="no room reserved"):
        cache.view([Span(sequence, 1)])
    cache.reserve(sequence, 10)
    with pytest.raises(ValueError, match="twice"):
        cache.view([Span(sequence, 1), Span(sequence, 1)])
    cache.release(sequence)
    with pytest.raises(KeyError, match="not open"):
        cache.reserve(sequence, 1)


def test_formats_and_sizes_are_checked() -> None:
    with pytest.raises(OptionError, match="unknown kv_format 'bf61': did you mean 'bf16'"):
        CacheConfig("bf61", 1)
    with pytest.raises(OptionError, match="memory_bytes is 0: it must be at least 1"):
        CacheConfig("bf16", 0)
    with pytest.raises(OptionError, match="memory_bytes is None: it must be an integer"):
        CacheConfig("bf16", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        ("7", 7),
        (4096, 4096),
        ("1TiB", 2**40),
        ("1TB", 10**12),
        ("1.5t", 1_500_000_000_000),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "-1", "0", "1 parsec", "MiB", "1e9", "nan", "0.1", True, None, -5, "9" * 400, 10**400, "9e99TiB"],
    ids=lambda text: f"{text!r:.20}",
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a size in bytes") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 200


def test_a_number_that_python_does_not_write_out_is_no_size_either() -> None:
    with pytest.raises(OptionError, match="is not a size in bytes"):
        parse_bytes(10**5000)
