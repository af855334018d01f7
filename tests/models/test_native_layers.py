"""Native layers against their modules, and promise 1 for the hidden states of whole models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from quantised_tiny import NAN_TOKEN, QUANTISED_CONFIGS, cache_of, quantised_decoder, statics_of_decoder, tokens
from tiny import run_step
from torch import nn

from kvist.cache.cache_view import Span
from kvist.cache.kv_cache import KVCache
from kvist.errors import SequenceError
from kvist.kernels import native
from kvist.kernels.key_statics import KeyStatics
from kvist.models.decoder import Decoder
from kvist.models.matrices import QuantisedLinear, WideLinear
from kvist.models.native_layer import LayerSteps, Rope, use_native_layers
from kvist.models.step_inputs import StepInputs

# Codes of weights as files have them, and as they are made; q, k and v differ in the last.
FORMATS = [("int8",), ("int4",), ("int4_min",), ("int4_min", "int8", "int4", "int8", "int4")]
KV_FORMATS = ["bf16", "int8", "k=int8,v=int4", "int4"]
LENGTH = 150


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class BothSteps(LayerSteps):
    """Runs each layer natively after its module, from the same hidden states, and keeps how far apart rows are."""

    errors: list[torch.Tensor]

    def _native_call(self, index: int, layer: nn.Module, x: torch.Tensor, rope: Rope) -> native.LayerCall | None:
        call = super()._native_call(index, layer, x, rope)
        assert call is not None
        expected = layer(x, rope, self._cache, index)
        change = (expected - x).norm(dim=1)
        assert change.min() > 0.01
        self._run_native([call])
        self.errors.append((x - expected).norm(dim=1) / change)
        return None

    def run(self, layers: Iterable[nn.Module], x: torch.Tensor, ropes: Iterable[Rope]) -> torch.Tensor:
        for index, (layer, rope) in enumerate(zip(layers, ropes, strict=True)):
            self._native_call(index, layer, x, rope)
        return x


@pytest.mark.parametrize(("formats", "kv_format"), list(zip(FORMATS, KV_FORMATS, strict=True)))
@pytest.mark.parametrize("family", QUANTISED_CONFIGS)
def test_a_native_layer_does_what_its_module_does(
    family: str, formats: tuple[str, ...], kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for codes of inputs that lie between two steps: they may round to either.

    That changes a row by as much as rounding does, and the later ones of its sequence by as much, since theirs round to
    others then.
    """
    decoder = quantised_decoder(family, formats)
    cache = cache_of(decoder, kv_format)
    monkeypatch.setattr(BothSteps, "errors", [], raising=False)
    monkeypatch.setattr("kvist.models.llama.LayerSteps", BothSteps)
    monkeypatch.setattr("kvist.models.gemma3.LayerSteps", BothSteps)
    sequence = cache.open()
    for start, stop in ((0, 70), (70, 71), (71, 76), (76, 100)):
        run_step(decoder.hidden_states, cache, {sequence: tokens(100, seed=1)[start:stop]})
    errors = torch.stack([torch.cat(BothSteps.errors[layer :: decoder.config.num_layers]) for layer in range(3)])
    assert errors.shape == (3, 100)
    assert (errors < 1e-4).float().mean() > 0.5
    assert errors.max() < 0.1


class Model:
    """Steps over the sequences of a model; hidden states of each."""

    def __init__(self, decoder: Decoder, kv_format: str, statics: tuple[KeyStatics, ...]) -> None:
        self.decoder, self._format, self._statics = decoder, kv_format, statics
        self.cache = self._cache()

    def _cache(self) -> KVCache:
        return cache_of(self.decoder, self._format, self._statics)

    def step(self, news: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        return run_step(self.decoder.hidden_states, self.cache, news)

    def in_chunks(self, text: list[int], *stops: int) -> torch.Tensor:
        sequence = self.cache.open()
        starts = (0, *stops)
        parts = [self.step({sequence: text[a:b]})[sequence] for a, b in zip(starts, (*stops, len(text)), strict=True)]
        return torch.cat(parts)


def check_promise(family: str, kv_format: str) -> None:
    decoder = quantised_decoder(family, FORMATS[-1])
    model = Model(decoder, kv_format, statics_of_decoder(decoder))
    text = tokens(LENGTH, seed=2)
    torch.set_num_threads(1)
    cold = model.in_chunks(text)
    assert cold.shape[0] == LENGTH
    assert cold.isfinite().all()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(model.in_chunks(text), cold)
    assert torch.equal(model.in_chunks(text, 1, 8, 72, 137), cold)
    assert torch.equal(model.in_chunks(text, *range(100, LENGTH)), cold)

    # Beside strangers: some decoding, one of numbers that are none.
    sequence, *others = (model.cache.open() for _ in range(4))
    parts = []
    for start, stop in ((0, 3), (3, 68), (68, 69), (69, 70), (70, 149), (149, 150)):
        news = {other: tokens(1 + (stop * other) % 19, seed=stop) for other in others}
        news[others[1]][0] = NAN_TOKEN
        order = [*others[:2], sequence, *others[2:]]
        found = model.step({**news, sequence: text[start:stop]} if stop % 2 else
                           {number: {**news, sequence: text[start:stop]}[number] for number in order})  # fmt: skip
        assert found[others[1]].isnan().any()
        parts.append(found[sequence])
    assert torch.equal(torch.cat(parts), cold)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("family", QUANTISED_CONFIGS)
def test_hidden_states_are_the_same_however_they_are_computed(family: str, kv_format: str) -> None:
    """Cold on one thread, two and three, in chunks, decoded, and beside other sequences."""
    check_promise(family, kv_format)


def test_a_long_prompt_goes_through_in_chunks_of_rows() -> None:
    """More rows than the products of a layer take at once."""
    decoder = quantised_decoder("llama")
    model = Model(decoder, "int8", statics_of_decoder(decoder))
    text = tokens(2040, seed=3)
    torch.set_num_threads(2)
    cold = model.in_chunks(text)
    assert torch.equal(model.in_chunks(text, 1030, 2000), cold)


@pytest.mark.parametrize("family", QUANTISED_CONFIGS)
def test_few_rows_pass_all_layers_in_one_call_and_many_layer_by_layer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, made = quantised_decoder(family), []
    run_layers = native.run_layers
    monkeypatch.setattr(
        native, "run_layers", lambda calls, **named: (made.append(len(calls)), run_layers(calls, **named))
    )
    cache = cache_of(decoder, "bf16")
    sequence = cache.open()
    text = tokens(301, seed=6)
    found = run_step(decoder.hidden_states, cache, {sequence: text[:300]})[sequence]
    assert made == [1, 1, 1]
    last = run_step(decoder.hidden_states, cache, {sequence: text[300:]})[sequence]
    assert made == [1, 1, 1, 3]
    monkeypatch.setattr("kvist.models.native_layer._MOST_ROWS", 1000)
    whole = Model(decoder, "bf16", statics_of_decoder(decoder)).in_chunks(text)
    assert made[4:] == [3]
    assert torch.equal(torch.cat([found, last]), whole)


def test_a_step_without_tokens_changes_nothing() -> None:
    decoder = quantised_decoder("gemma3")
    cache = cache_of(decoder, "bf16")
    nothing = torch.empty(0, dtype=torch.int64)
    view = cache.view([Span(cache.open(), 0)])
    assert decoder.hidden_states(StepInputs(nothing, view.positions(), nothing, view)).shape == (0, 96)


# --- which layers are native ------------------------------------------------------------------------------------------


def test_a_layer_with_a_matrix_that_is_not_quantised_runs_as_a_module() -> None:
    decoder = quantised_decoder("llama")
    mlp = decoder.get_submodule("layers.1.mlp")
    down = mlp.down_proj
    assert isinstance(down, QuantisedLinear)
    mlp.down_proj = WideLinear(160, 96, bias=False).requires_grad_(False)
    use_native_layers(decoder)
    natives = [layer.native for layer in decoder.layers]  # type: ignore[union-attr, operator]
    assert [handle is None for handle in natives] == [False, True, False]
    cache = cache_of(decoder, "bf16")
    sequence = cache.open()
    found = run_step(decoder.hidden_states, cache, {sequence: tokens(20, seed=4)})[sequence]
    expected = plain(decoder, tokens(20, seed=4))
    assert (found - expected).norm() < 0.02 * expected.norm()


def plain(decoder: Decoder, text: list[int]) -> torch.Tensor:
    cache = cache_of(decoder, "bf16")
    sequence = cache.open()
    return run_step(lambda inputs: decoder.hidden_states(inputs, plain_layers=True), cache, {sequence: text})[sequence]


def test_hooks_see_plain_layers() -> None:
    decoder, seen = quantised_decoder("gemma3"), []
    for layer in decoder.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[3]))
    plain(decoder, tokens(5, seed=5))
    assert seen == [0, 1, 2]


def test_a_view_that_is_out_of_date_is_refused() -> None:
    decoder = quantised_decoder("llama")
    cache = cache_of(decoder, "bf16")
    sequence = cache.open()
    cache.reserve(sequence, 2)
    view = cache.view([Span(sequence, 1)])
    inputs = StepInputs(torch.tensor([9]), view.positions(), torch.tensor([0]), view)
    cache.commit(view)
    with pytest.raises(SequenceError, match="ask for another"):
        decoder.hidden_states(inputs)


# --- instruction sets -------------------------------------------------------------------------------------------------

CHECK = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
import pytest, test_native_layers as test
print(test.native.isa())
for family, formats, kv_format in (("gemma3", test.FORMATS[3], "int8"), ("llama_narrow_heads", ("int4",), "int4")):
    with pytest.MonkeyPatch.context() as patch:
        test.test_a_native_layer_does_what_its_module_does(family, formats, kv_format, patch)
    test.check_promise(family, kv_format)
"""


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_keeps_the_promise(isa: str) -> None:
    environment = os.environ | {native.MAX_ISA_VARIABLE: isa}
    result = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, check=False)
    assert (result.stdout.strip(), result.stderr, result.returncode) == (isa, "", 0)
