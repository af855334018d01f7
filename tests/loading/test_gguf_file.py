"""A GGUF file's header is read as its writer meant it, and never believed."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_files import write_gguf, write_tiny_gguf

from kvist.errors import KvistError, ModelFileError, UnsupportedModelError
from kvist.loading.gguf_file import GgufFile


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def tensor_info(name: str, dims: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(KvistError) as caught:
        GgufFile(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small, whole file with every kind of header entry."""
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    metadata = {"a.flag": True, "a.count": 7, "a.scale": 0.5, "a.name": "åäö", "a.words": ["x", "", "漢字"]}
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    write_gguf(path, "llama", {**metadata, "a.numbers": [1, -2, 3]}, {"one": (values, "F32"), "two": (values, "Q8_0")})
    # Without the padding after the last tensor, so that every byte counts.
    last = GgufFile(path).tensors["two"]
    return path.read_bytes()[: last.offset + last.num_rows * last.row_bytes]


def test_every_kind_of_metadata_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    numbers = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "héllo",
    }  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"key.{kind}", value)
    writer.add_array("key.strings", ["a", "", "日本"])
    writer.add_array("key.ints", [1, 2, -3])
    writer.add_array("key.floats", [0.5, -0.25])
    writer.add_array("key.bools", [True, False, True])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(path).metadata
    assert {kind: metadata[f"key.{kind}"] for kind in numbers} == numbers
    assert metadata["key.strings"] == ["a", "", "日本"]
    for name, expected in (("ints", [1, 2, -3]), ("floats", [0.5, -0.25]), ("bools", [True, False, True])):
        array = metadata[f"key.{name}"]
        assert isinstance(array, np.ndarray)
        assert array.tolist() == expected


def test_tensors_are_where_the_packages_own_reader_finds_them(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", "gemma3", tensor_type="Q5_0")
    ours = GgufFile(path)
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert ours.tensors.keys() == theirs.keys()
    for name, tensor in ours.tensors.items():
        expected = theirs[name]
        assert tensor.type.name == expected.tensor_type.name
        assert tensor.shape == tuple(int(dim) for dim in reversed(expected.shape))
        assert ours.blocks(tensor).tobytes() == expected.data.tobytes()


def test_version_2_is_read_and_other_versions_are_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[:4] + struct.pack("<I", 2) + whole[8:])
    assert GgufFile(path).metadata["a.name"] == "åäö"
    for version in (0, 1, 4):
        message = refusal(path, whole[:4] + struct.pack("<I", version) + whole[8:])
        assert f"GGUF version {version}: versions 2 and 3 are read" in message


def test_big_endian_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04" + bytes(60), "a ZIP archive"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"\x80\x02}q\x00", "a Python pickle"),
        (struct.pack("<Q", 500) + b'{"a":1}', "a safetensors file"),
        (b"tjgg\x03\0\0\0", "from before GGUF"),
        (b"\x01\x02\x03\x04\x05", "starts with the bytes 01 02 03 04"),
    ],
)
def test_another_kind_of_file_is_called_what_it_is(start: bytes, kind: str, tmp_path: Path) -> None:
    message = refusal(tmp_path / "model.gguf", start)
    assert "is not a GGUF file" in message
    assert kind in message


def test_a_missing_file_is_an_error_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "absent.gguf")


@settings(max_examples=300, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
@example(fraction=0.0)
def test_a_file_cut_anywhere_is_refused_with_what_is_missing(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, fraction: float
) -> None:
    length = int(len(whole) * fraction)
    message = refusal(tmp_path_factory.getbasetemp() / "cut.gguf", whole[:length])
    if length >= 4:
        assert f"it ends after {length} bytes" in message


@settings(max_examples=500, deadline=None)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused_but_nothing_else(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    changed = bytearray(whole)
    changed[position % len(whole)] = byte
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(changed)
    try:
        gguf = GgufFile(path)
    except KvistError:
        return
    for tensor in gguf.tensors.values():
        assert gguf.blocks(tensor).shape == (tensor.num_rows, tensor.row_bytes)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (text("k") + struct.pack("<IQ", 8, 2**63), "before the end of 'k'"),
        (text("k") + struct.pack("<IIQ", 9, 8, 2**61), "before the end of 'k'"),
        (text("k") + struct.pack("<IIQ", 9, 12, 2**62), "before the end of 'k'"),
        (text("k") + struct.pack("<IIQ", 9, 9, 1), "an array of arrays"),
        (text("k") + struct.pack("<IIQ", 9, 77, 1), "unknown element type 77"),
        (text("k") + struct.pack("<I", 77), "unknown value type 77"),
        (struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<IB", 0, 1), "not UTF-8"),
        (2 * (text("k") + struct.pack("<IB", 0, 1)), "the key 'k' twice"),
        (text("general.alignment") + struct.pack("<II", 4, 12), "no power of two"),
        (text("general.alignment") + struct.pack("<II", 4, 0), "no power of two"),
        (text("split.count") + struct.pack("<IH", 2, 3), "one of 3 parts"),
    ],
)
def test_a_lying_metadata_entry_is_refused(entry: bytes, reason: str, tmp_path: Path) -> None:
    num_keys = 2 if reason.endswith("twice") else 1
    assert reason in refusal(tmp_path / "model.gguf", header(0, num_keys) + entry + bytes(64))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (tensor_info("w", (32,) * 5), "5 dims, at most 4"),
        (text("w") + struct.pack("<I", 0), "0 dims"),
        (tensor_info("w", (0, 4)), "has the shape (4, 0)"),
        (tensor_info("w", (2**62, 2**62)), "before the end of tensor 'w'"),
        (tensor_info("w", (33,), type_id=8), "of type Q8_0 has the shape (33,)"),
        (tensor_info("w", (32,), type_id=11), "tensor type Q3_K is not supported"),
        (tensor_info("w", (32,), type_id=4_000), "tensor type 4000 is unknown"),
        (tensor_info("w", (32,), offset=7), "not aligned to 32 bytes"),
        (tensor_info("w", (32,), offset=2**63), "before the end of tensor 'w'"),
        (2 * tensor_info("w", (1,)), "the tensor 'w' twice"),
    ],
)
def test_a_lying_tensor_entry_is_refused(entry: bytes, reason: str, tmp_path: Path) -> None:
    num_tensors = 2 if reason.endswith("twice") else 1
    message = refusal(tmp_path / "model.gguf", header(num_tensors, 0) + entry + bytes(256))
    assert reason in message
    if "tensor type" in reason:
        assert "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K" in message


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Else a small file could name its bytes again and again, and be prepared into more than the disk holds."""
    path = tmp_path / "model.gguf"
    same = tensor_info("a", (32,)) + tensor_info("b", (32,))
    assert "the tensors 'a' and 'b' overlap; fetch it again" in refusal(path, header(2, 0) + same + bytes(512))
    half = tensor_info("b", (32,), offset=64) + tensor_info("a", (32,))
    assert "the tensors 'a' and 'b' overlap" in refusal(path, header(2, 0) + half + bytes(512))
    apart = tensor_info("b", (32,), offset=128) + tensor_info("a", (32,))
    path.write_bytes(header(2, 0) + apart + bytes(512))
    assert GgufFile(path).tensors.keys() == {"a", "b"}


@pytest.mark.parametrize(("num_tensors", "num_keys"), [(2**63, 0), (0, 2**63), (2**64 - 1, 2**64 - 1)])
def test_counts_beyond_the_file_are_refused_at_once(num_tensors: int, num_keys: int, tmp_path: Path) -> None:
    assert "damaged" in refusal(tmp_path / "model.gguf", header(num_tensors, num_keys) + bytes(16))
