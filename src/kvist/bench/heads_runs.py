"""Generation with one number of KV heads beside another, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from kvist.attention import ContiguousCache, Decoder
from kvist.attention.grouped_query import LayerCache
from kvist.bench.heads import UNCACHED_REPETITIONS, VOCAB_SIZE, HeadsRow, HeadsShape, Uncached
from kvist.bench.memory import live_bytes
from kvist.errors import CacheFullError, OptionError
from kvist.loading.progress import Progress
from kvist.memory import available_bytes, distinct_sizes
from kvist.models.cache_shape import attention_kind

TURN_TOKENS = 32
"""Tokens that a decoder generates before it is the next one's turn."""

_DEVICES = ("cpu", "cuda")  # one that computes by itself must be waited for
_PROBES = 4
_SCALAR_BYTES = 4
_Result = TypeVar("_Result")


@dataclass
class _Run:
    """One decoder on its way, and what it has taken so far. Only `measure_heads` changes it."""

    decoder: Decoder
    shape: HeadsShape
    text: torch.Tensor
    caches: list[LayerCache] = field(default_factory=list)
    prefill_ms: float = 0.0
    lengths: list[int] = field(default_factory=list)
    ms_per_token: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)
    process_bytes: list[int] = field(default_factory=list)
    cuda_bytes: list[int] = field(default_factory=list)
    measured_scalars: int = 0
    uncached_ms: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        """New tokens that are still to come."""
        return self.shape.prompt + self.shape.new_tokens - self.text.shape[1]

    def prefill(self) -> None:
        self.prefill_ms, (logits, self.caches) = self._timed(partial(self.decoder, self.text))
        self._append(logits)

    def turn(self) -> None:
        """Generate the next few tokens, timed one by one."""
        before, cuda_before = live_bytes(), self._cuda_bytes()
        times = []
        for _ in range(min(TURN_TOKENS, self.left)):
            ms, (logits, self.caches) = self._timed(partial(self.decoder, self.text[:, -1:], self.caches))
            self._append(logits)
            times.append(ms)
            if self.text.shape[1] - 1 == self.shape.counted_length:
                self.measured_scalars = self._scalars(self.caches[:1])
        self.lengths.append(self.text.shape[1] - 1)
        self.ms_per_token.append(statistics.median(times))
        self.new_tokens.append(len(times))
        self.cache_bytes.append(_SCALAR_BYTES * self._scalars(self.caches))
        self.process_bytes.append(live_bytes() - before + sum(self.process_bytes[-1:]))
        self.cuda_bytes.append(self._cuda_bytes() - cuda_before + sum(self.cuda_bytes[-1:]))

    def uncached_step(self, length: int) -> float:
        """Milliseconds that the token after `length` others takes when nothing was kept."""
        text = torch.randint(VOCAB_SIZE, (self.shape.batch, length), device=self.text.device)
        ms, _ = self._timed(partial(self.decoder.generate, text, 1, use_cache=False))
        return ms

    def row(self, uncached_lengths: Sequence[int]) -> HeadsRow:
        tokens = self.shape.counted_length
        return HeadsRow(
            num_kv_heads=self._num_kv_heads,
            kind=attention_kind(self.shape.num_heads, self._num_kv_heads),
            weights_bytes=_weights_bytes(self.decoder),
            prefill_ms=self.prefill_ms,
            lengths=tuple(self.lengths),
            ms_per_token=tuple(self.ms_per_token),
            new_tokens=tuple(self.new_tokens),
            cache_tokens=tokens,
            counted_scalars=self.shape.cache_scalars(self._num_kv_heads, tokens),
            measured_scalars=self.measured_scalars,
            cache_bytes=tuple(self.cache_bytes),
            process_bytes=tuple(self.process_bytes),
            cuda_bytes=tuple(self.cuda_bytes) if self.text.is_cuda else None,
            uncached=self._uncached(uncached_lengths) if uncached_lengths else None,
        )

    def _uncached(self, lengths: Sequence[int]) -> Uncached:
        return Uncached(tuple(lengths), tuple(self.uncached_ms), UNCACHED_REPETITIONS, self.shape.new_tokens)

    @property
    def _num_kv_heads(self) -> int:
        return self.decoder.config.num_kv_heads

    def _append(self, logits: torch.Tensor) -> None:
        self.text = torch.cat((self.text, logits[:, -1:].argmax(-1)), dim=1)

    def _scalars(self, caches: Sequence[LayerCache]) -> int:
        return sum(cache.num_scalars for cache in caches if isinstance(cache, ContiguousCache))

    def _cuda_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.text.device) if self.text.is_cuda else 0

    def _timed(self, task: Callable[[], _Result]) -> tuple[float, _Result]:
        began_s = time.perf_counter()
        result = task()
        if self.text.is_cuda:
            torch.cuda.synchronize(self.text.device)
        return 1e3 * (time.perf_counter() - began_s), result


def measure_heads(
    shape: HeadsShape,
    *,
    no_cache: bool,
    device: torch.device | str = "cpu",
    progress: Progress,
    bandwidth: Callable[[], float] | None = None,
) -> tuple[list[HeadsRow], tuple[float, ...]]:
    """Generate with each number of KV heads, in turns of a few tokens, so that what the machine does meets all alike.

    Args:
        shape: what is generated.
        no_cache: whether to time steps without a cache too, at `shape.uncached_lengths`.
        device: to compute on, cpu or cuda: the clock waits for these. The weights are random, in float32.
        progress: told how many of all turns are through.
        bandwidth: gives the read bandwidth of the moment, bytes per second; asked before, after, and now and then where
            the device is the CPU.

    Returns:
        A row for each number of KV heads, and the read bandwidths.

    Raises:
        OptionError: the device cannot be used.
        CacheFullError: the machine lacks the memory for all decoders at once.
    """
    device = _usable(device)
    if device.type == "cpu":
        _check_memory(shape)  # another device says so itself
    else:
        bandwidth = None
    torch.manual_seed(0)
    prompt = torch.randint(VOCAB_SIZE, (shape.batch, shape.prompt), device=device)
    with torch.inference_mode():
        runs = [
            _Run(Decoder(shape.config(num_kv_heads)).to(device).eval(), shape, prompt)
            for num_kv_heads in shape.kv_heads
        ]
        for run in runs:  # what is slow the first time is not measured
            run.decoder.generate(prompt, 2)
            run.prefill()
        uncached_lengths = shape.uncached_lengths if no_cache else ()
        rounds = -(-(shape.new_tokens - 1) // TURN_TOKENS)
        done, total = 0, rounds + len(uncached_lengths)
        bandwidths: list[float] = []
        for index in range(rounds):
            if bandwidth is not None and index % -(-rounds // _PROBES) == 0:
                bandwidths.append(bandwidth())
            for run in runs:
                run.turn()
            progress("generating", done := done + 1, total)
        if bandwidth is not None:
            bandwidths.append(bandwidth())
        for run in runs:
            run.caches = []
        for length in uncached_lengths:
            turns = [[run.uncached_step(length) for run in runs] for _ in range(UNCACHED_REPETITIONS)]
            for run, times in zip(runs, zip(*turns, strict=True), strict=True):
                run.uncached_ms.append(statistics.median(times))
            progress("generating without a cache", done := done + 1, total)
    return [run.row(uncached_lengths) for run in runs], tuple(bandwidths)


def _usable(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"the device {name} cannot be used: {reason}") from None
    if device.type not in _DEVICES:
        raise OptionError(
            f"the device {name} cannot be used: the clock is right on {' and '.join(_DEVICES)} alone, give one of them"
        )
    return device


def _weights_bytes(decoder: Decoder) -> int:
    return sum(parameter.nbytes for parameter in decoder.parameters())


def _check_memory(shape: HeadsShape) -> None:
    needed = 0
    for num_kv_heads in shape.kv_heads:
        with torch.device("meta"):
            needed += _weights_bytes(Decoder(shape.config(num_kv_heads)))
        # A layer's cache is there twice while it grows.
        needed += _SCALAR_BYTES * (shape.layers + 1) * shape.cache_scalars(num_kv_heads, shape.length)
    free = available_bytes()
    if needed > free:
        taken, left = distinct_sizes(needed, free)
        raise CacheFullError(
            f"{len(shape.kv_heads)} decoders and their caches take {taken}, and {left} are free: ask for fewer layers, "
            "KV heads, tokens or dims"
        )
