"""Weights in int8 and int4: what is kept in which format, packed once, and computed with the bits of the twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import new_cache, run_step
from tiny_files import EMBED_DIM, hf_config, write_tiny_directory, write_tiny_gguf
from tiny_files import hf_state as wild_state

from kvist import LLM, SamplingParams
from kvist.errors import ModelFileError, OptionError
from kvist.kernels import linear
from kvist.kernels.weight_codec import decode
from kvist.loading import LoadedModel, load
from kvist.loading.prepared import prepared_copies
from kvist.loading.weights import weights_bytes
from kvist.models.matrices import QuantisedEmbedding, QuantisedLinear, QuantisedMatrix, WideLinear
from kvist.models.step_inputs import StepInputs

pytestmark = pytest.mark.usefixtures("own_cache")

TOKENS = [5, 90, 17, 260, 33, 101, 8]
# Mean divergences of tiny random models, which exaggerate; real ones are judged by `kvist eval`.
INT8, INT4 = 5e-3, 0.2
KEPT_TYPES = {"Q4_0": "int4", "Q4_1": "int4_min", "Q5_0": "int8", "Q8_0": "int8"}


def hf_state(architecture: str, **options: bool) -> dict[str, torch.Tensor]:
    """With matrices as small as trained ones are: larger ones blow every rounding up."""
    state = wild_state(architecture, **options)
    return {name: tensor * 0.2 if tensor.dim() == 2 else tensor for name, tensor in state.items()}


def logits(model: LoadedModel) -> torch.Tensor:
    cache = new_cache(model.decoder)
    sequence = cache.open()
    return run_step(model.decoder, cache, {sequence: TOKENS})[sequence]


def plain_logits(model: LoadedModel) -> torch.Tensor:
    """The same through the layers' modules, one product at a time."""

    def run(inputs: StepInputs) -> torch.Tensor:
        return model.decoder.logits(model.decoder.hidden_states(inputs, plain_layers=True))

    cache = new_cache(model.decoder)
    sequence = cache.open()
    return run_step(run, cache, {sequence: TOKENS})[sequence]


def matrices(model: LoadedModel) -> dict[str, QuantisedMatrix]:
    return {name: module for name, module in model.decoder.named_modules() if isinstance(module, QuantisedMatrix)}


def formats(model: LoadedModel) -> set[str]:
    return {module.packed.format for module in matrices(model).values()}


def divergence(model: LoadedModel, exact: torch.Tensor) -> float:
    """Mean KL divergence from exact logits, in nats."""
    expected, found = exact.log_softmax(-1), logits(model).log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("block_type", KEPT_TYPES)
def test_a_gguf_files_codes_are_kept_as_they_are(architecture: str, block_type: str, tmp_path: Path) -> None:
    state = hf_state(architecture, tied=False)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture, state, tensor_type=block_type)
    model, exact = load(path), load(path, "fp32")
    assert model.weights_format == "gguf"
    assert formats(model) == {KEPT_TYPES[block_type]}
    parameters = dict(exact.decoder.named_parameters())
    assert len(matrices(model)) == sum(parameter.dim() == 2 for parameter in parameters.values())
    for name, module in matrices(model).items():
        assert torch.equal(decode(module.packed), parameters[f"{name}.weight"])
    assert model.weights_bytes < 0.4 * exact.weights_bytes
    assert divergence(model, logits(exact)) < INT8


@pytest.mark.parametrize("block_type", ["Q5_1", "F32"])
def test_blocks_without_a_format_of_their_own_go_to_the_nearest(block_type: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", state=hf_state("llama"), tensor_type=block_type)
    exact = load(path, "fp32")
    model = load(path)
    assert (model.weights_format, formats(model)) == (("gguf", {"int8"}) if block_type == "Q5_1" else ("bf16", set()))
    assert divergence(model, logits(exact)) < INT8


@pytest.mark.parametrize(
    ("weights_format", "block_type", "layers", "outer"),
    [
        ("int8", "F32", "int8", "int8"), ("int8", "Q4_0", "int8", "int8"), ("int8", "Q4_1", "int8", "int8"),
        ("int4", "F32", "int4_min", "int8"), ("int4", "Q4_0", "int4", "int8"), ("int4", "Q8_0", "int4_min", "int8"),
    ],
)  # fmt: skip
def test_a_format_that_is_asked_for_is_that_of_every_matrix(
    weights_format: str, block_type: str, layers: str, outer: str, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", state=hf_state("llama", tied=False), tensor_type=block_type)
    model, exact = load(path, weights_format), load(path, "fp32")
    found = {name: module.packed.format for name, module in matrices(model).items()}
    assert {found.pop("embed_tokens"), found.pop("lm_head")} == {outer}
    assert set(found.values()) == {layers}
    assert model.weights_bytes == weights_bytes(model.config, weights_format) or block_type == "Q4_0"
    assert divergence(model, logits(exact)) < (INT8 if weights_format == "int8" else INT4)
    if (weights_format, block_type) == ("int8", "Q4_0"):  # four bits fit into eight
        wanted = dict(exact.decoder.named_parameters())
        assert all(torch.equal(decode(matrices(model)[name].packed), wanted[f"{name}.weight"]) for name in found)


@pytest.mark.parametrize("weights_format", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_directorys_weights_are_packed_once(
    architecture: str, weights_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    config = hf_config(model_type=model_type)
    directory = write_tiny_directory(tmp_path / "model", hf_state(architecture), config=config, num_shards=2)
    model = load(directory, weights_format)
    (copy,) = prepared_copies()
    assert (copy.source, copy.weights_format) == ("model", weights_format)
    assert sorted(path.name for path in copy.path.iterdir()) == ["model.safetensors", "packed.json", "prepared.json"]
    assert model.source == directory
    assert divergence(model, logits(load(directory, "fp32"))) < (INT8 if weights_format == "int8" else INT4)

    monkeypatch.setattr("kvist.loading.loader.write_weights", None)
    again = load(directory, weights_format)
    assert torch.equal(logits(again), logits(model))
    assert again.fingerprint() == model.fingerprint() != load(directory, "bf16").fingerprint()


def test_gguf_is_no_format_for_a_directory(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="weights_format gguf is for GGUF files, and model is none: take bf16, fp32"):
        load(write_tiny_directory(tmp_path / "model", hf_state("llama")), "gguf")


@pytest.mark.parametrize("weights_format", ["int8", "int4"])
def test_matrices_that_no_group_fits_stay_bf16(weights_format: str, tmp_path: Path) -> None:
    """Columns of 40, no multiple of 32: those of the MLP's last matrix."""
    state = hf_state("llama")
    for name in list(state):
        if ".mlp." in name:
            state[name] = state[name][:, :40] if "down" in name else state[name][:40]
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    directory = write_tiny_directory(tmp_path / "model", state, config=hf_config(intermediate_size=40))
    model = load(directory, weights_format)
    wide = [name for name, module in model.decoder.named_modules() if isinstance(module, WideLinear)]
    assert wide == [f"layers.{layer}.mlp.down_proj" for layer in range(len(wide))] != []
    assert model.bf16_matrices == tuple(f"{name}.weight" for name in wide)
    assert LLM.from_loaded(model, kv_memory="1MiB").bf16_matrices == model.bf16_matrices
    assert load(directory, "bf16").bf16_matrices == ()
    assert model.weights_bytes == weights_bytes(model.config, weights_format)
    assert divergence(model, logits(load(directory, "fp32"))) < (INT8 if weights_format == "int8" else INT4)


@pytest.mark.parametrize("weights_format", ["int8", "int4", "gguf"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_native_products_have_the_bits_of_the_twin(
    architecture: str, weights_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = hf_state(architecture)
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", architecture, state, tensor_type="Q4_1"), weights_format)
    native = plain_logits(model)
    calls = []

    def plain(self: QuantisedMatrix, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return linear.linear(x, self.packed)

    monkeypatch.setattr(QuantisedMatrix, "product", plain)
    assert torch.equal(plain_logits(model), native)
    assert len(calls) == len(matrices(model))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_values_and_logits_have_fine_rows(architecture: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture, hf_state(architecture), tensor_type="Q8_0")
    model = load(path, "int8")
    fine = {name.rpartition(".")[2] for name, module in matrices(model).items() if module.packed.fine_rows}
    plain = {name.rpartition(".")[2] for name, module in matrices(model).items() if not module.packed.fine_rows}
    assert "v_proj" in fine
    assert fine <= {"v_proj", "lm_head", "embed_tokens"}
    assert plain == {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert fine & {"lm_head", "embed_tokens"}


def test_the_table_of_vectors_is_read_row_by_row(tmp_path: Path) -> None:
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", state=hf_state("llama"), tensor_type="Q8_0"))
    table = model.decoder.embed_tokens
    assert isinstance(table, QuantisedEmbedding)
    rows = torch.tensor([0, 299, 17, 16, 15, 17])
    assert torch.equal(table(rows), decode(table.packed)[rows])
    assert table(rows[:0]).shape == (0, EMBED_DIM)


def test_a_bias_is_added(tmp_path: Path) -> None:
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", hf_state("qwen2"), tensor_type="Q8_0"))
    layer = model.decoder.get_submodule("layers.0.self_attn.q_proj")
    assert isinstance(layer, QuantisedLinear)
    assert layer.bias is not None
    x = torch.randn(3, EMBED_DIM)
    assert torch.equal(layer(x), layer.product(x) + layer.bias)
    assert layer.bias.abs().max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: dict.fromkeys(packed, "int3"), "cannot be packed as 'int3'"),
        (lambda packed: dict.fromkeys(packed, "int4"), "shapes differ"),
        (lambda packed: dict.fromkeys(packed, 4), "does not name formats"),
        (lambda packed: dict.fromkeys(packed | {"model.norm.weight": "int8"}, "int8"), "norm.weight of shape"),
        (lambda _: {}, "shapes differ"),
    ],
)
def test_a_copy_that_contradicts_itself_is_made_again_or_refused(
    change: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", state=hf_state("llama"), tensor_type="Q8_0")
    expected = logits(load(path))
    (copy,) = prepared_copies()
    packed = copy.path / "packed.json"
    whole = packed.read_text()
    text = json.dumps(change(json.loads(packed.read_text())))  # type: ignore[operator]
    packed.write_text(text)
    manifest = json.loads((copy.path / "prepared.json").read_text())
    manifest["files"]["packed.json"] = len(text)
    (copy.path / "prepared.json").write_text(json.dumps(manifest))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as no_writing, pytest.raises(ModelFileError, match=message):
        no_writing.setattr(Path, "unlink", refuse)
        load(path)
    assert torch.equal(logits(load(path)), expected)
    assert packed.read_text() == whole


@pytest.mark.parametrize("file", ["model.safetensors", "packed.json"])
def test_the_copy_of_a_directory_is_made_again_where_it_is_damaged(file: str, tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path / "model", hf_state("llama"))
    expected = logits(load(directory, "int8"))
    (copy,) = prepared_copies()
    size = (copy.path / file).stat().st_size
    (copy.path / file).write_bytes(bytes(size))  # as some file systems leave it after a power cut
    assert torch.equal(logits(load(directory, "int8")), expected)


def test_packed_matrices_start_at_cache_lines(tmp_path: Path) -> None:
    load(write_tiny_gguf(tmp_path / "tiny.gguf", state=hf_state("llama"), tensor_type="Q4_1"))
    (copy,) = prepared_copies()
    stored = load_file(copy.path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.uint8, torch.float32}
    model = load(tmp_path / "tiny.gguf")
    assert all(module.packed.data.data_ptr() % 64 == 0 for module in matrices(model).values())


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("weights_format", ["gguf", "int8", "int4"])
def test_a_model_answers_the_same_cold_and_in_chunks(weights_format: str, kv_format: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", state=hf_state("llama"), tensor_type="Q4_1", metadata={"llama.context_length": 4096}
    )
    loaded = load(path, weights_format)
    texts = []
    for max_step_tokens in (2048, 64):
        llm = LLM.from_loaded(loaded, kv_format=kv_format, kv_memory="64MiB", max_step_tokens=max_step_tokens)
        texts.append(llm.generate("ab cd" * 60, SamplingParams(max_tokens=20)).text)
    assert texts[0] == texts[1]
