"""Where a step's time goes: every operation is found, the parts add up, and the clocks are gone afterwards."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tiny_files import hf_config, hf_state, write_tiny_directory

import kvist.engine.engine as engine_parts
from kvist.bench import profile
from kvist.bench.format_runs import FormatRuns, Workload
from kvist.bench.profile import StepProfile, _Clocks, _native_calls, profile_step
from kvist.bench.prompts import Prompts
from kvist.kv_format import LayerFormats
from kvist.loading import LoadedModel, load


@pytest.fixture(scope="module", params=["fp32", "int8"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """Weights that PyTorch multiplies, and packed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVIST_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = write_tiny_directory(tmp_path_factory.mktemp("models") / "tiny", hf_state("llama"), config=hf_config())
        yield load(folder, request.param)


@pytest.fixture
def runs(loaded: LoadedModel) -> FormatRuns:
    kv_format = LayerFormats.parse("bf16")
    return FormatRuns(loaded, kv_format, Prompts(loaded.tokenizer, "twigs"), Workload((70,), 4, True), None)


def test_every_operation_of_a_step_is_named(loaded, runs) -> None:
    found = profile_step(runs, loaded.decoder, 70, 2)
    calls = {operation.name: operation.calls for operation in found.operations}
    layers = loaded.config.num_layers
    # A native layer clocks its stages: the products are one, and the norm before the MLP belongs to the residuals.
    is_native = loaded.weights_format == "int8"
    assert calls["products with weights"] == layers * (1 if is_native else 7)
    assert calls["norms"] == layers * (1 if is_native else 2) + 1
    assert calls["rope, heads apart"] == layers
    assert calls["attention"] == calls["append to the cache"] == calls["gate"] == calls["residuals"] == layers
    for name in ("output product", "token vectors", "sampling", "inputs of the step", "engine, rest", "decoder, rest"):
        assert calls[name] == 1, name
    assert not [name for name in calls if name.startswith("native")]


def test_the_parts_are_parts_of_the_step(loaded, runs) -> None:
    found = profile_step(runs, loaded.decoder, 70, 1)
    by_name = {operation.name: operation for operation in found.operations}
    for name in ("attention", "append to the cache"):
        assert 0 < by_name[name].native_ms <= by_name[name].ms + 1e-9
    is_native = loaded.weights_format == "int8"
    assert (by_name["products with weights"].native_ms > 0) == is_native
    assert by_name["sampling"].native_ms == 0 < found.pytorch_ms
    assert list(found.operations) == sorted(found.operations, key=lambda operation: -operation.ms)
    assert found.clocked_step_ms == pytest.approx(sum(operation.ms for operation in found.operations))


def test_no_clock_stays_behind(loaded, runs) -> None:
    library = importlib.import_module("kvist.kernels._native")
    sample, attend = engine_parts.sample, vars(library.PageStep)["attend"]
    profile_step(runs, loaded.decoder, 70, 1)
    assert engine_parts.sample is sample
    assert vars(library.PageStep)["attend"] is attend
    assert "step" not in vars(runs.engine)
    assert "logits" not in vars(loaded.decoder)
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in loaded.decoder.modules())


def test_a_run_that_fails_leaves_no_clock_behind(loaded, runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_pytorch_ms", lambda run: 1 / 0)
    sample = engine_parts.sample
    with pytest.raises(ZeroDivisionError):
        profile_step(runs, loaded.decoder, 70, 1)
    assert engine_parts.sample is sample


def test_an_operation_counts_what_no_clock_inside_it_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 10, 25, 40, 90, 100])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    clocks = _Clocks()
    kernel = clocks.around(lambda: None, None, native=True)
    inner = clocks.around(kernel, "inner")
    clocks.around(inner, "outer")()
    spent = {name: (one.own_ns, one.native_ns, one.calls) for name, one in clocks.spent.items()}
    assert spent == {"inner": (80, 15, 1), "outer": (20, 0, 1)}
    assert (clocks.total_ns, clocks.native_ns) == (100, 15)


def test_a_native_call_outside_of_any_operation_is_not_counted() -> None:
    clocks = _Clocks()
    assert clocks.around(lambda: 7, None, native=True)() == 7
    assert clocks.spent == {}


def test_what_is_left_is_python() -> None:
    found = StepProfile("bf16", 70, step_ms=10, native_ms=6, pytorch_ms=3, operations=())
    assert found.python_ms == 1
    assert replace(found, native_ms=8).python_ms == 0


def test_a_native_call_that_is_not_known_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        def run(self) -> int:
            return 7

    library = types.SimpleNamespace(Layer=Layer, draw=lambda: 8, __name__="library")
    monkeypatch.setattr("importlib.import_module", lambda name: library)
    clocks = _Clocks()
    for owner, attribute, clocked in _native_calls(clocks):
        monkeypatch.setattr(owner, attribute, clocked)
    assert (Layer().run(), library.draw()) == (7, 8)
    assert {name: one.calls for name, one in clocks.spent.items()} == {"native Layer.run": 1, "native draw": 1}
