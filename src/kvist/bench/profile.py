"""Where the time of a step goes, by operation.

Clocks stand at the border of every module of the decoder, of every native call, and of the engine's own parts. Each
counts for its operation what no clock inside it has counted, so that the operations add up to the step. Where layers
become fewer and larger operations there are fewer clocks, and the sum is still the step.

    Engine.step | inputs | Decoder | Layer | norm |
                                           | attention | linear | native apply      counted for the linear layer
                                                       | native attend              an operation of its own
                                   | native layer | its stages                      which it clocks itself
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import kvist.engine.engine as engine_parts
from kvist.attention import GatedMLP, StepAttention
from kvist.bench.format_runs import FormatRuns
from kvist.engine import Engine
from kvist.kernels import native
from kvist.kernels.native_types import LayerCall
from kvist.models.decoder import Decoder
from kvist.models.layers import RMSNorm
from kvist.models.matrices import QuantisedEmbedding, QuantisedLinear

_LAYERS = "run_layers"
# None: for the operation that calls it.
_NATIVE_NAMES = {
    "HiddenRows.norm": "norms",
    "PageStep.attend": "attention",
    "PageStep.append": "append to the cache",
    "LinearWeight.apply": None,
    "LinearWeight.decode_rows": None,
}
_MODULE_NAMES: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((RMSNorm,), "norms"),
    ((nn.Linear, QuantisedLinear), "products with weights"),
    ((nn.Embedding, QuantisedEmbedding), "token vectors"),
    ((StepAttention,), "rope, heads apart"),
    ((GatedMLP,), "gate"),
    ((Decoder,), "decoder, rest"),
)
_ENGINE_PARTS = {"step_inputs": "inputs of the step", "sample": "sampling"}
_ENGINE, _OUTPUT = "engine, rest", "output product"
_ABSENT = object()
# Above every level of PyTorch's profiler, which else writes to standard error whenever it starts.
_NO_LOG = "99"


@dataclass(frozen=True)
class Operation:
    """A part of a step.

    Attributes:
        name: of the operation.
        calls: in a step.
        ms: that all of them take in a step, without operations inside them.
        native_ms: of these, in native kernels.
    """

    name: str
    calls: float
    ms: float
    native_ms: float


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a step of decode goes.

    Attributes:
        kv_format: of the cache.
        context: tokens in it.
        step_ms: of a step without clocks.
        native_ms: of it, in native kernels.
        pytorch_ms: of it, in PyTorch's operations, as its profiler sees them.
        operations: of a step with clocks, which is longer; those that take longest first.
    """

    kv_format: str
    context: int
    step_ms: float
    native_ms: float
    pytorch_ms: float
    operations: tuple[Operation, ...]

    @property
    def python_ms(self) -> float:
        """What is left: Python, and the way into the operations."""
        return max(0.0, self.step_ms - self.native_ms - self.pytorch_ms)

    @property
    def clocked_step_ms(self) -> float:
        return sum(operation.ms for operation in self.operations)


@dataclass
class _Spent:
    own_ns: int = 0
    native_ns: int = 0
    calls: int = 0


@dataclass
class _Frame:
    name: str
    began_ns: int
    inner_ns: int = 0


@dataclass
class _Clocks:
    """A stack of running operations; what each has spent by itself."""

    frames: list[_Frame] = field(default_factory=list)
    spent: dict[str, _Spent] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        return sum(spent.own_ns for spent in self.spent.values())

    @property
    def native_ns(self) -> int:
        return sum(spent.native_ns for spent in self.spent.values())

    def enter(self, name: str) -> None:
        self.frames.append(_Frame(name, time.perf_counter_ns()))

    def leave(self, *, native: bool = False, counted: bool = True) -> None:
        frame = self.frames.pop()
        elapsed = time.perf_counter_ns() - frame.began_ns
        spent = self.spent.setdefault(frame.name, _Spent())
        spent.own_ns += elapsed - frame.inner_ns
        spent.native_ns += elapsed if native else 0
        spent.calls += counted
        if self.frames:
            self.frames[-1].inner_ns += elapsed

    def around(self, function: Callable[..., Any], name: str | None, *, native: bool = False) -> Callable[..., Any]:
        """The function with a clock; without a name it counts for the operation that calls it."""

        def clocked(*arguments: Any, **named: Any) -> Any:
            if name is None and not self.frames:
                return function(*arguments, **named)
            self.enter(self.frames[-1].name if name is None else name)
            try:
                return function(*arguments, **named)
            finally:
                self.leave(native=native, counted=name is not None)

        return clocked

    def around_layers(self, run: Callable[..., None]) -> Callable[..., None]:
        """`run_layers` with clocks: its stages are operations, and the way into it counts for what calls it."""
        stages = native.layer_stages()

        def clocked(calls: Sequence[LayerCall], *, num_threads: int, stage_ns: torch.Tensor | None) -> None:
            stage_ns = torch.zeros(len(stages), dtype=torch.int64)
            run(calls, num_threads=num_threads, stage_ns=stage_ns)
            for stage, ns in zip(stages, stage_ns.tolist(), strict=True):
                spent = self.spent.setdefault(stage, _Spent())
                spent.own_ns += ns
                spent.native_ns += ns
                spent.calls += len(calls)
                if self.frames:
                    self.frames[-1].inner_ns += ns

        return clocked


def profile_step(runs: FormatRuns, decoder: Decoder, context: int, repetitions: int) -> StepProfile:
    """Find where the time of decoding one sequence after `context` tokens goes.

    Runs without clocks, with clocks and under PyTorch's profiler take turns, and the fastest of each counts: what
    disturbs a run only adds to it.

    Args:
        runs: the model and its cache.
        decoder: the model's.
        context: tokens before those that are decoded.
        repetitions: of each.
    """
    runs.decode(context)
    step_ms, native_ms, pytorch_ms, fastest = math.inf, math.inf, math.inf, _Clocks()
    num_steps = runs.new_tokens + 1  # the first of a run computes the prompt's last token
    for _ in range(repetitions):
        step_ms = min(step_ms, runs.decode(context).seconds * 1e3 / runs.new_tokens)
        clocks = _Clocks()
        with _clocked(clocks, runs.engine, decoder):
            runs.decode(context)
        native_ms = min(native_ms, clocks.native_ns / num_steps / 1e6)
        fastest = min(clocks, fastest, key=lambda one: one.total_ns or math.inf)
        pytorch_ms = min(pytorch_ms, _pytorch_ms(partial(runs.decode, context)) / num_steps)
    operations = [
        Operation(name, spent.calls / num_steps, spent.own_ns / num_steps / 1e6, spent.native_ns / num_steps / 1e6)
        for name, spent in fastest.spent.items()
    ]
    return StepProfile(
        kv_format=str(runs.kv_format),
        context=context,
        step_ms=step_ms,
        native_ms=native_ms,
        pytorch_ms=pytorch_ms,
        operations=tuple(sorted(operations, key=lambda operation: -operation.ms)),
    )


@contextmanager
def _clocked(clocks: _Clocks, engine: Engine, decoder: Decoder) -> Iterator[None]:
    """Clocks for as long as the context lasts."""

    def before(module: nn.Module, inputs: object) -> None:
        clocks.enter(_module_name(module))

    def after(module: nn.Module, inputs: object, outputs: object) -> None:
        clocks.leave()

    with ExitStack() as stack:
        for module in decoder.modules():
            for handle in (
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after, always_call=True),
            ):
                stack.callback(handle.remove)
        replacements = [
            (engine, "step", clocks.around(engine.step, _ENGINE)),
            (decoder, "logits", clocks.around(decoder.logits, _OUTPUT)),
        ]
        for part, name in _ENGINE_PARTS.items():  # one that was renamed raises: its time would go to another operation
            replacements.append((engine_parts, part, clocks.around(getattr(engine_parts, part), name)))
        replacements += _native_calls(clocks)
        for owner, attribute, clocked in replacements:
            stack.enter_context(_replaced(owner, attribute, clocked))
        yield


def _module_name(module: nn.Module) -> str:
    for kinds, name in _MODULE_NAMES:
        if isinstance(module, kinds):
            return name
    name = type(module).__name__
    return "residuals" if name.endswith("Layer") else name


def _native_calls(clocks: _Clocks) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Every function of the native library and every method of its types, with a clock."""
    library = importlib.import_module("kvist.kernels._native")
    found: list[tuple[Any, str, Callable[..., Any]]] = []
    for name, value in vars(library).items():
        if name.startswith("_") or not callable(value):
            continue
        if name == _LAYERS:
            found.append((library, name, clocks.around_layers(value)))
            continue
        if not isinstance(value, type):
            found.append((library, name, clocks.around(value, f"native {name}", native=True)))
            continue
        for method, function in vars(value).items():
            if not method.startswith("_") and callable(function):
                whole = f"{name}.{method}"
                named = _NATIVE_NAMES.get(whole, f"native {whole}")
                found.append((value, method, clocks.around(function, named, native=True)))
    return found


@contextmanager
def _replaced(owner: Any, attribute: str, replacement: object) -> Iterator[None]:
    original = vars(owner).get(attribute, _ABSENT)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        if original is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)


def _pytorch_ms(run: Callable[[], object]) -> float:
    """How long PyTorch's operations take in a run."""
    from torch.profiler import ProfilerActivity

    os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    averages = profiler.key_averages()
    return sum(float(event.self_cpu_time_total) for event in averages if event.key.startswith("aten::")) / 1e3
