"""Native layers against their modules, and promise 1 for the hidden states of whole models."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
from kvist.kernels.native_types import LayerCall
from kvist.models.decoder import Decoder
from kvist.models.layers import DecoderLayer, RMSNorm
from kvist.models.matrices import QuantisedLinear, WideLinear
from kvist.models.native_layer import LayerSteps, Rope, use_native_layers
from kvist.models.step_inputs import StepInputs

# Codes of weights as files have them, and as they are made; q, k and v differ in the last.
FORMATS = [("int8",), ("int4",), ("int4_min",), ("bf16",), ("int4_min", "bf16", "int4", "int8", "int4")]
KV_FORMATS = ["bf16", "int8", "k=int8,v=int4", "bf16", "int4"]
LENGTH = 150


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class BothSteps(LayerSteps):
    """Runs each layer natively after its module, from the same hidden states, and keeps how far apart rows are."""

    errors: list[torch.Tensor]

    def _native_call(self, index: int, layer: nn.Module, x: torch.Tensor, rope: Rope) -> LayerCall | None:
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
    assert errors.max() < (1e-4 if formats == ("bf16",) else 0.1)


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


def check_promise(family: str, kv_format: str, formats: tuple[str, ...] = FORMATS[-1]) -> None:
    decoder = quantised_decoder(family, formats)
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


@pytest.mark.parametrize("kv_format", dict.fromkeys(KV_FORMATS))
@pytest.mark.parametrize("family", QUANTISED_CONFIGS)
def test_hidden_states_are_the_same_however_they_are_computed(family: str, kv_format: str) -> None:
    """Cold on one thread, two and three, in chunks, decoded, and beside other sequences."""
    check_promise(family, kv_format)


@pytest.mark.parametrize("family", QUANTISED_CONFIGS)
def test_those_of_bf16_weights_too(family: str) -> None:
    check_promise(family, "bf16", ("bf16",))


def test_those_of_modules_too() -> None:
    """A prompt's rows and a single one take the same products, natively or not."""
    decoder = quantised_decoder("qwen3", ("bf16",))
    cache, text = cache_of(decoder, "bf16"), tokens(20, seed=4)
    sequence = cache.open()
    parts = [
        run_step(partial(decoder.hidden_states, plain_layers=True), cache, {sequence: text[first:stop]})[sequence]
        for first, stop in ((0, 13), (13, 14), (14, 20))
    ]
    assert torch.equal(torch.cat(parts), plain(decoder, text))


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


@pytest.mark.parametrize("apart", [False, True])
def test_a_layer_with_a_matrix_that_the_library_does_not_take_runs_as_a_module(apart: bool) -> None:
    """One of fp32, and one whose columns are not contiguous."""
    decoder = quantised_decoder("llama", ("bf16",))
    down = layers_of(decoder)[1].parts().mlp.down_proj
    before = check_plain(decoder)
    assert are_native(decoder) == [True, True, True]
    weight = down.weight.T.contiguous().T if apart else down.weight.float()
    down.weight = nn.Parameter(weight, requires_grad=False)
    assert (check_plain(decoder) - before).norm() < 0.02 * before.norm()
    assert are_native(decoder) == [True, False, True]


def test_a_layer_whose_weights_want_gradients_runs_as_a_module_where_they_are_recorded() -> None:
    decoder = quantised_decoder("llama", ("bf16",))
    weight = layers_of(decoder)[1].parts().mlp.down_proj.weight.requires_grad_()
    cache, text = cache_of(decoder, "bf16"), torch.tensor(tokens(20, seed=4))
    expected = check_plain(decoder)
    sequence = cache.open()
    assert cache.reserve(sequence, 20)
    view = cache.view([Span(sequence, 20)])
    found = decoder.hidden_states(StepInputs(text, view.positions(), torch.arange(20), view))
    assert (found - expected).norm() < 0.02 * expected.norm()
    found.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_a_layer_with_a_matrix_that_is_not_quantised_runs_as_a_module() -> None:
    decoder = quantised_decoder("llama")
    mlp = decoder.get_submodule("layers.1.mlp")
    down = mlp.down_proj
    assert isinstance(down, QuantisedLinear)
    mlp.down_proj = WideLinear(160, 96, bias=False).requires_grad_(False)
    use_native_layers(decoder)
    assert are_native(decoder) == [True, False, True]
    check_plain(decoder)


def layers_of(decoder: Decoder) -> list[DecoderLayer]:
    return [module for module in decoder.modules() if isinstance(module, DecoderLayer)]


def are_native(decoder: Decoder) -> list[bool]:
    return [layer.native is not None and layer.native.handle is not None for layer in layers_of(decoder)]


def plain(decoder: Decoder, text: list[int]) -> torch.Tensor:
    cache = cache_of(decoder, "bf16")
    sequence = cache.open()
    return run_step(lambda inputs: decoder.hidden_states(inputs, plain_layers=True), cache, {sequence: text})[sequence]


def check_plain(decoder: Decoder) -> torch.Tensor:
    """A step gives what its modules give; returned."""
    cache, text = cache_of(decoder, "bf16"), tokens(20, seed=4)
    sequence = cache.open()
    found, expected = run_step(decoder.hidden_states, cache, {sequence: text})[sequence], plain(decoder, text)
    assert (found - expected).norm() < 0.02 * expected.norm()
    return found


def relu(layer: DecoderLayer) -> None:
    layer.parts().mlp.activation = "relu"


def gelu(layer: DecoderLayer) -> None:
    layer.parts().mlp.activation = "gelu"


def bf16_norm(layer: DecoderLayer) -> None:
    layer.parts().mlp_input_norm.to(torch.bfloat16)


def bf16_bias(layer: DecoderLayer) -> None:
    layer.parts().attention.q_proj.bias = torch.ones(128, dtype=torch.bfloat16)


def norm_of_another_class(layer: DecoderLayer) -> None:
    class Doubled(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    layer.post_attention_layernorm = Doubled(96, 1e-6).requires_grad_(False)


def another_eps(layer: DecoderLayer) -> None:
    layer.parts().mlp_input_norm.eps = 0.1


@pytest.mark.parametrize("change", [relu, gelu, bf16_norm, bf16_bias, norm_of_another_class, another_eps])
def test_a_layer_that_the_library_does_not_know_runs_as_a_module(change: Callable[[DecoderLayer], None]) -> None:
    decoder = quantised_decoder("qwen3")
    before = check_plain(decoder)
    change(layers_of(decoder)[1])
    use_native_layers(decoder)
    assert are_native(decoder) == [True, False, True]
    assert not torch.equal(check_plain(decoder), before)


def test_a_layer_of_odd_heads_is_not_native() -> None:
    decoder = quantised_decoder("llama")
    layers_of(decoder)[0].parts().attention.head_dim = 1
    use_native_layers(decoder)
    assert are_native(decoder) == [False, True, True]


# --- layers that change -----------------------------------------------------------------------------------------------


def in_place(layer: DecoderLayer) -> None:
    layer.parts().mlp_input_norm.weight.mul_(3)


def in_place_of_data(layer: DecoderLayer) -> None:
    layer.parts().attention_input_norm.weight.data.mul_(3)


def written_bias(layer: DecoderLayer) -> None:
    bias = layer.parts().attention.q_proj.bias
    assert bias is not None
    bias.copy_(torch.linspace(-2, 2, len(bias)))


def another_bias(layer: DecoderLayer) -> None:
    layer.parts().attention.k_proj.bias = torch.linspace(-2, 2, 64)


def no_bias(layer: DecoderLayer) -> None:
    layer.parts().attention.v_proj.bias = None


def bias_where_none_was(layer: DecoderLayer) -> None:
    layer.parts().mlp.up_proj.bias = torch.linspace(-2, 2, 160)


def other_memory_of_a_norm(layer: DecoderLayer) -> None:
    layer.parts().mlp_input_norm.weight.data = torch.linspace(1, 3, 96)


def another_norm_weight(layer: DecoderLayer) -> None:
    q_norm = layer.parts().attention.q_norm
    assert q_norm is not None
    q_norm.weight = nn.Parameter(torch.linspace(1, 3, 32), requires_grad=False)


def loaded(layer: DecoderLayer) -> None:
    layer.load_state_dict({name: torch.full_like(value, 2) for name, value in layer.state_dict().items()})


def assigned(layer: DecoderLayer) -> None:
    values = {name: torch.full_like(value, 2) for name, value in layer.state_dict().items()}
    layer.load_state_dict(values, assign=True)


def another_mlp(layer: DecoderLayer) -> None:
    layer.mlp = layers_of(quantised_decoder("qwen3", ("int4",)))[0].parts().mlp


def another_matrix(layer: DecoderLayer) -> None:
    layer.parts().mlp.down_proj = layers_of(quantised_decoder("qwen3", ("int4",)))[0].parts().mlp.down_proj


def other_packed_bytes(layer: DecoderLayer) -> None:
    gate = layer.parts().mlp.gate_proj
    gate.data = gate.data.flip(0)


def other_memory_of_packed_bytes(layer: DecoderLayer) -> None:
    gate = layer.parts().mlp.gate_proj
    gate.data.data = gate.data.flip(0)


def written_packed_bytes(layer: DecoderLayer) -> None:
    data = layer.parts().attention.o_proj.data
    data.copy_(data.flip(0))


def other_bf16_weights(layer: DecoderLayer) -> None:
    layer.parts().mlp.up_proj.weight = nn.Parameter(layer.parts().mlp.gate_proj.weight.flip(0), requires_grad=False)


def other_memory_of_bf16_weights(layer: DecoderLayer) -> None:
    layer.parts().mlp.up_proj.weight.data = layer.parts().mlp.up_proj.weight.data.flip(0)


def written_bf16_weights(layer: DecoderLayer) -> None:
    layer.parts().attention.o_proj.weight.mul_(3)


CHANGES = [
    in_place, in_place_of_data, written_bias, another_bias, no_bias, bias_where_none_was, other_memory_of_a_norm,
    another_norm_weight, loaded, assigned, another_mlp, another_matrix, other_packed_bytes,
    other_memory_of_packed_bytes, written_packed_bytes, other_bf16_weights, other_memory_of_bf16_weights,
    written_bf16_weights,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_is_computed_with(change: Callable[[DecoderLayer], None]) -> None:
    """Made under inference mode, as an engine's models are, or not."""
    for inference in (False, True):
        with torch.inference_mode(inference):
            decoder = quantised_decoder("qwen3", ("bf16",) if "bf16" in change.__name__ else ("int4_min", "int8"))
        before = check_plain(decoder)
        natives = [layer.native for layer in layers_of(decoder)]
        check_plain(decoder)
        assert [layer.native for layer in layers_of(decoder)] == natives, "made anew for nothing"
        with torch.inference_mode(inference), torch.no_grad():
            change(layers_of(decoder)[1])
        assert not torch.equal(check_plain(decoder), before)
        assert are_native(decoder) == [True, True, True]


def test_a_changed_norm_that_is_kept_less_one_is_computed_with() -> None:
    decoder = quantised_decoder("gemma3")
    before = check_plain(decoder)
    in_place_of_data(layers_of(decoder)[0])
    assert not torch.equal(check_plain(decoder), before)
    assert are_native(decoder) == [True, True, True]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_another_dtype_runs_its_modules(family: str, dtype: torch.dtype) -> None:
    decoder = quantised_decoder(family)
    before = check_plain(decoder)
    decoder.to(dtype)
    found = check_plain(decoder)
    assert are_native(decoder) == [False, False, False]
    assert (found - before).norm() < 0.1 * before.norm()
    decoder.to(torch.float32)
    check_plain(decoder)
    assert are_native(decoder) == [True, True, True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda decoder: pickle.loads(pickle.dumps(decoder))])
def test_a_model_is_copied_with_its_weights(copied: Callable[[Decoder], Decoder]) -> None:
    decoder = quantised_decoder("qwen3")
    before, other = check_plain(decoder), copied(decoder)
    for layer in layers_of(decoder):
        in_place(layer)
        written_packed_bytes(layer)
    assert not torch.equal(check_plain(decoder), before)
    assert torch.equal(check_plain(other), before)
    assert are_native(other) == [True, True, True]


def test_a_part_that_is_of_another_dtype_for_a_while_is_native_again() -> None:
    decoder = quantised_decoder("qwen3")
    norm = layers_of(decoder)[1].parts().mlp_input_norm
    norm.to(torch.bfloat16)
    check_plain(decoder)
    assert are_native(decoder) == [True, False, True]
    norm.to(torch.float32)
    check_plain(decoder)
    assert are_native(decoder) == [True, True, True]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_moves_to_shared_memory_is_read_there(family: str) -> None:
    """The tensors stay, and so do their storages: only the memory is another, and the old one is freed."""
    decoder = quantised_decoder(family)
    before = check_plain(decoder)
    for part in (layers_of(decoder)[0].parts().attention.q_proj, layers_of(decoder)[1], decoder):
        part.share_memory()
        overwriting = [torch.full((1 << 12,), 255, dtype=torch.uint8) for _ in range(500)]
        assert torch.equal(check_plain(decoder), before)
        del overwriting
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        tensor.data = tensor.data.clone()
    check_plain(decoder)
    layers_of(decoder)[2].parts().mlp.up_proj.data.share_memory_()  # without its module
    assert torch.equal(check_plain(decoder), before)
    assert are_native(decoder) == [True, True, True]


def test_a_model_that_leaves_the_cpu_is_native_there_no_more() -> None:
    decoder = quantised_decoder("qwen3").to("meta")
    assert {tensor.device.type for tensor in (*decoder.parameters(), *decoder.buffers())} == {"meta"}
    assert not any(are_native(decoder))


# --- hooks and views --------------------------------------------------------------------------------------------------


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
for family, formats, kv_format in (("gemma3", test.FORMATS[-1], "int8"), ("llama_narrow_heads", ("int4",), "int4")):
    with pytest.MonkeyPatch.context() as patch:
        test.test_a_native_layer_does_what_its_module_does(family, formats, kv_format, patch)
    test.check_promise(family, kv_format)
test.check_promise("qwen2", "bf16", ("bf16",))
"""


@pytest.mark.parametrize("isa", native.available_isas())
def test_every_instruction_set_keeps_the_promise(isa: str) -> None:
    environment = os.environ | {native.MAX_ISA_VARIABLE: isa}
    result = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, check=False)
    assert (result.stdout.strip(), result.stderr, result.returncode) == (isa, "", 0)
