"""A directory of safetensors files gives its tensors, and is not believed where it contradicts itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_files import hf_state, write_tiny_directory

from kvist.errors import KvistError, ModelFileError, UnsupportedModelError
from kvist.loading import safetensors_checkpoint
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint


def raw_file(header: Any, data: bytes = b"", header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def single(directory: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return SafetensorsCheckpoint(directory)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_all_tensors_come_back_from_one_file_and_from_shards(num_shards: int, tmp_path: Path) -> None:
    state = hf_state("llama")
    checkpoint = SafetensorsCheckpoint(write_tiny_directory(tmp_path, state, num_shards=num_shards))
    assert set(checkpoint.names()) == set(state)
    for name, expected in state.items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert torch.equal(checkpoint.read(name, torch.float32), expected)
        assert torch.equal(checkpoint.read(name, torch.bfloat16), expected.bfloat16())
        assert checkpoint.codes(name) is None


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bytes_at_once", [7 * 4, 1 << 20])
def test_every_dtype_is_converted_in_parts_as_at_once(
    stored: torch.dtype, wanted: torch.dtype, bytes_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_checkpoint, "_BYTES_AT_ONCE", bytes_at_once)
    values = torch.randn(5, 11).to(stored)
    checkpoint = single(
        tmp_path, {"a": torch.zeros(3, dtype=stored), "w": values, "empty": torch.zeros(0, 4).to(stored)}
    )
    assert torch.equal(checkpoint.read("w", wanted), values.to(wanted))
    assert checkpoint.read("empty", wanted).shape == (0, 4)


def test_a_tensor_stored_as_it_is_wanted_is_mapped(tmp_path: Path) -> None:
    checkpoint = single(tmp_path, {"w": torch.randn(8, 8)})
    assert checkpoint.read("w", torch.float32).data_ptr() == checkpoint.read("w", torch.float32).data_ptr()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_model_is_found(prefix: str, tmp_path: Path) -> None:
    checkpoint = single(
        tmp_path,
        {
            f"{prefix}embed_tokens.weight": torch.zeros(2, 2),
            f"{prefix}layers.0.mlp.up_proj.weight": torch.zeros(1),
            f"{prefix}layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
            "language_model.lm_head.weight": torch.zeros(3),
            "vision_tower.vision_model.embeddings.weight": torch.zeros(1),
            "model.vision_tower.encoder.weight": torch.zeros(1),
            "multi_modal_projector.mm_soft_emb_norm.weight": torch.zeros(1),
        },
    )
    expected = {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"}
    assert set(checkpoint.names()) == expected


def test_other_dtypes_are_refused_by_name_when_they_are_needed(tmp_path: Path) -> None:
    checkpoint = single(tmp_path, {"ids": torch.zeros(2, dtype=torch.int64), "w": torch.zeros(2)})
    assert checkpoint.read("w", torch.float32).shape == (2,)
    with pytest.raises(UnsupportedModelError, match="'ids' is stored as I64: readable are F32, F16, BF16"):
        checkpoint.read("ids", torch.float32)


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"abc", "header too small"),
        (raw_file({}, header_bytes=1 << 60), "header too large"),
        (raw_file({"w": tensor("F32", [2], 0, 8)}, bytes(7)), "not fully covered"),
        (raw_file({"w": tensor("F32", [3], 0, 8)}, bytes(8)), "invalid shape"),
        (raw_file({"w": tensor("F32", [2], 0, 8), "v": tensor("F32", [2], 4, 12)}, bytes(12)), "invalid offset"),
        (raw_file({"w": tensor("F32", [2**62, 2**62], 0, 8)}, bytes(8)), "overflow"),
        (raw_file({"w": tensor("F32", [-2], 0, 8)}, bytes(8)), "invalid value"),
        (raw_file({"w": tensor("F99", [2], 0, 8)}, bytes(8)), "unknown variant `F99`"),
        (raw_file(b"[" * 100_000), "invalid JSON"),
        (raw_file(b"{" + b'"w":' * 3), "invalid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        (b"<html>Not found</html>", "a web page"),
        (b"GGUF" + bytes(60), "it is a GGUF file"),
    ],
)
def test_a_header_that_lies_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match=reason) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(fraction: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp() / "cut"
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors"
    save_file({"w": torch.ones(40), "v": torch.ones(3, 3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * fraction)])
    with pytest.raises(ModelFileError):
        SafetensorsCheckpoint(directory)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused_but_nothing_else(
    position: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "changed"
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors"
    save_file({"w": torch.ones(4), "v": torch.ones(3, 3, dtype=torch.bfloat16)}, path, {"format": "pt"})
    changed = bytearray(path.read_bytes())
    changed[position % len(changed)] = byte
    path.write_bytes(changed)
    try:
        checkpoint = SafetensorsCheckpoint(directory)
        for name in checkpoint.names():
            assert checkpoint.read(name, torch.float32).shape == checkpoint.shape(name)
    except KvistError:
        pass


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    checkpoint = single(tmp_path, {"w": torch.ones(4096)})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelFileError, match="ended while 'w' was read"):
        checkpoint.read("w", torch.bfloat16)


# --- the index of shards ----------------------------------------------------------------------------------------------


def index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors", None, 3]
)
def test_an_index_that_leads_out_of_the_directory_is_refused(name: Any, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    index(directory, {"w": name})
    with pytest.raises(ModelFileError, match="no plain file name: fetch it again"):
        SafetensorsCheckpoint(directory)


def test_missing_shards_and_missing_tensors_are_named(tmp_path: Path) -> None:
    directory = write_tiny_directory(tmp_path, num_shards=3)
    shard = directory / "model-00002-of-00003.safetensors"
    stored = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ModelFileError, match=r"lacks 1 of 3 shards, model-00002-of-00003.safetensors: fetch them too"):
        SafetensorsCheckpoint(directory)
    shard.write_bytes(stored)
    index(directory, {"model.norm.weight": shard.name, "model.absent.weight": shard.name})
    with pytest.raises(ModelFileError, match=r"promises 'model.absent.weight' in model-00002"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_weight_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    index(tmp_path, weight_map)
    with pytest.raises(ModelFileError, match="has no weight_map"):
        SafetensorsCheckpoint(tmp_path)


def test_the_same_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds the tensor 'model.norm.weight' twice"):
        single(tmp_path, {"model.norm.weight": torch.ones(1), "language_model.model.norm.weight": torch.ones(1)})


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickled_checkpoint_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelFileError, match="can run any code when it is read, so it is never opened"):
        SafetensorsCheckpoint(tmp_path)


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        SafetensorsCheckpoint(tmp_path)
