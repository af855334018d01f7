"""A GGUF checkpoint gives back the tensors that the file was made from, under their Hugging Face names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tiny_files import VOCABULARY, hf_state, hyperparameters, write_gguf, write_tiny_gguf

from kvist.errors import ModelFileError
from kvist.loading.gguf_blocks import READABLE_TYPES, dequantise
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_config import hf_config
from kvist.loading.gguf_file import GgufFile
from kvist.loading.weights import assign_weights, fitting_decoder
from kvist.loading.weights_plan import weights_plan
from kvist.models.registry import decoder_config

WRITABLE_TYPES = [name for name in READABLE_TYPES if not name.endswith("_K")]  # gguf cannot quantise to the others


def checkpoint(path: Path) -> GgufCheckpoint:
    gguf = GgufFile(path)
    return GgufCheckpoint(gguf, decoder_config(hf_config(gguf)))


@pytest.mark.parametrize(
    ("architecture", "tied", "biased"),
    [
        ("llama", True, False), ("llama", False, True), ("qwen2", True, False), ("qwen3", False, False),
        ("gemma3", True, False),
    ],
)  # fmt: skip
def test_every_architecture_gives_back_its_weights(architecture: str, tied: bool, biased: bool, tmp_path: Path) -> None:
    state = hf_state(architecture, tied=tied, biased=biased)
    found = checkpoint(write_tiny_gguf(tmp_path / "model.gguf", architecture, state))
    assert set(found.names()) == set(state)
    for name, expected in state.items():
        assert found.shape(name) == tuple(expected.shape)
        torch.testing.assert_close(found.read(name, torch.float32), expected, rtol=0, atol=1e-6)
        assert (found.read(name, torch.bfloat16).float() - expected).abs().max() < 0.02


@pytest.mark.parametrize("tensor_type", WRITABLE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_type_gives_the_decoded_values(tensor_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = hf_state("llama")
    path = write_tiny_gguf(tmp_path / "model.gguf", "llama", state, tensor_type=tensor_type)
    gguf = GgufFile(path)
    found = checkpoint(path)
    for stored, name in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_down", "model.layers.1.mlp.down_proj")):
        expected = torch.from_numpy(dequantise(gguf.blocks(gguf.tensors[f"{stored}.weight"]), tensor_type)).to(dtype)
        assert torch.equal(found.read(f"{name}.weight", dtype), expected)
        assert torch.equal(torch.cat(list(found.parts(f"{name}.weight", dtype))), expected.flatten())
    for name in ("model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        assert (found.read(name, torch.float32) - state[name]).abs().max() < 0.3


@pytest.mark.parametrize("tensor_type", ["Q4_K", "Q5_K", "Q6_K"])
def test_the_rows_of_k_quants_are_put_in_order_too(tensor_type: str, tmp_path: Path) -> None:
    """A query projection of 128 rows whose blocks are random: each row decodes to itself, at its place."""
    path = tmp_path / "model.gguf"
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor_type]]
    blocks = np.random.default_rng(0).integers(0, 64, (128, block_bytes), dtype=np.uint8)
    # The scales of the three formats lie in these two places; small numbers keep them finite.
    blocks[:, :4] = blocks[:, -2:] = 1
    metadata = hyperparameters("llama") | {"llama.embedding_length": 256} | VOCABULARY
    embeddings = torch.zeros(300, 256).numpy()
    tensors = {"token_embd.weight": (embeddings, "F32"), "blk.0.attn_q.weight": (blocks, tensor_type)}
    write_gguf(path, "llama", metadata | {"llama.block_count": 1}, tensors)
    found = checkpoint(path)
    values = torch.from_numpy(dequantise(blocks, tensor_type))
    # Row 2i + h of a head in the file is row i of the half h.
    heads = values.view(4, 16, 2, 256).transpose(1, 2).reshape(128, 256)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found.read(name, torch.float32), heads)
    codes = found.codes(name)
    assert codes is not None
    assert (codes.ggml_type, codes.shape) == (tensor_type, (128, 256))
    assert torch.equal(torch.from_numpy(dequantise(codes.blocks.numpy(), tensor_type)), heads)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_codes_decode_to_what_read_gives(architecture: str, tmp_path: Path) -> None:
    found = checkpoint(write_tiny_gguf(tmp_path / "model.gguf", architecture, tensor_type="Q4_1"))
    for name in found.names():
        codes = found.codes(name)
        if len(found.shape(name)) == 1:
            assert codes is None
            continue
        assert codes is not None
        assert codes.ggml_type == "Q4_1"
        assert codes.shape == found.shape(name)
        decoded = torch.from_numpy(dequantise(codes.blocks.numpy(), codes.ggml_type))
        assert torch.equal(decoded, found.read(name, torch.float32))


def test_a_tensor_stored_as_it_is_wanted_is_mapped_and_not_copied(tmp_path: Path) -> None:
    found = checkpoint(write_tiny_gguf(tmp_path / "model.gguf", "qwen3", tensor_type="BF16"))
    name = "model.embed_tokens.weight"
    assert found.read(name, torch.bfloat16).data_ptr() == found.read(name, torch.bfloat16).data_ptr()
    assert found.read(name, torch.float32).data_ptr() != found.read(name, torch.float32).data_ptr()


def test_a_decoder_takes_every_tensor_and_misses_none(tmp_path: Path) -> None:
    for architecture in ("llama", "qwen2", "qwen3", "gemma3"):
        path = write_tiny_gguf(tmp_path / f"{architecture}.gguf", architecture, tensor_type="Q8_0")
        gguf = GgufFile(path)
        config = decoder_config(hf_config(gguf))
        found = GgufCheckpoint(gguf, config)
        decoder, names = fitting_decoder(config, found, path.name)
        assert set(names.values()) == set(found.names())
        num_bytes = assign_weights(decoder, found, names, weights_plan(decoder, "bf16"))
        assert num_bytes == sum(x.numel() * (2 if x.dim() == 2 else 4) for x in decoder.parameters())
        assert not any(parameter.is_meta for parameter in decoder.parameters())


def test_rows_that_hold_no_whole_heads_are_refused(tmp_path: Path) -> None:
    gguf = GgufFile(write_tiny_gguf(tmp_path / "model.gguf"))
    config = decoder_config(hf_config(gguf) | {"num_attention_heads": 6, "num_key_value_heads": 3})
    with pytest.raises(ModelFileError, match=r"k_proj.weight of shape \(64, 64\) does not hold 3 heads"):
        GgufCheckpoint(gguf, config).read("model.layers.0.self_attn.k_proj.weight", torch.float32)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    extra = {"model.norm.weight": np.ones(64, np.float32)}
    with pytest.raises(ModelFileError, match=r"'output_norm.weight' and 'model.norm.weight': .* fetch it again"):
        checkpoint(write_tiny_gguf(tmp_path / "model.gguf", extra_tensors=extra))


def test_a_tensor_without_counterpart_keeps_its_name_and_is_reported(tmp_path: Path) -> None:
    extra = {"blk.0.odd.weight": np.zeros((2, 32), np.float32), "rope_freqs.weight": np.ones(16, np.float32)}
    path = write_tiny_gguf(tmp_path / "model.gguf", extra_tensors=extra)
    gguf = GgufFile(path)
    config = decoder_config(hf_config(gguf))
    found = GgufCheckpoint(gguf, config)
    assert "rope_freqs.weight" not in found.names()
    with pytest.raises(ModelFileError, match=r"not fit its configuration: it also holds blk.0.odd.weight"):
        fitting_decoder(config, found, path.name)
