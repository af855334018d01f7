"""A directory in Hugging Face format as a checkpoint: one safetensors file, or shards and their index."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvist.errors import ModelFileError, UnsupportedModelError, shown
from kvist.loading.checkpoint import PLAIN_DTYPES, StoredCodes
from kvist.loading.untrusted_file import FETCH_AGAIN, PICKLE_SUFFIXES, describe_start, pickle_refusal, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[\w-][\w.+ -]{0,200}")

# How multimodal checkpoints name the language model in them, older and newer ones.
_TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))

# What a text decoder has no use for: other modalities, and tables that are computed.
_IGNORED_PREFIXES = (
    "vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.",
)  # fmt: skip
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

_PACKED_DTYPE = "U8"

# Bytes converted at once, so that the stored form of a tensor never lies in memory beside the converted one.
_BYTES_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its name there, and where its bytes lie, counted from the start of the file."""

    file: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsCheckpoint:
    """The language model's tensors in a directory, under the names of a text-only checkpoint.

    Tensors that are stored in the wanted dtype are mapped; others are converted in parts.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, Any] = {}
        self._entries: dict[str, StoredTensor] = {}
        self._stored: list[StoredTensor] = []
        for file, names in self._listing().items():
            stored = _entries(file, self._open(file))
            for stored_name in stored if names is None else names:
                if stored_name not in stored:
                    raise ModelFileError(
                        f"{directory / INDEX} promises {shown(stored_name)} in {file.name}, which does not hold it: "
                        f"{FETCH_AGAIN}"
                    )
                self._add(stored[stored_name])

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that tensors are read from, in the order of their names."""
        return tuple(sorted(self._files))

    @property
    def all_stored(self) -> tuple[StoredTensor, ...]:
        """Every tensor of the files, those of other modalities too."""
        return tuple(self._stored)

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor lies."""
        return self._entries[name]

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        entry = self._entries[name]
        stored = self._stored_dtype(entry, dtype)
        if stored == dtype:
            mapped: torch.Tensor = self._files[entry.file].get_tensor(entry.stored_name)
            return mapped
        return _converted(entry, stored, dtype)

    def rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        entry = self._entries[name]
        self._stored_dtype(entry, torch.float32)
        rows: torch.Tensor = self._files[entry.file].get_slice(entry.stored_name)[first:stop]
        return rows.float()

    def block_type(self, name: str) -> str | None:
        """None: these files hold plain numbers."""
        return None

    def codes(self, name: str) -> StoredCodes | None:
        """None: these files hold plain numbers."""
        return None

    def _stored_dtype(self, entry: StoredTensor, wanted: torch.dtype) -> torch.dtype:
        """Packed bytes are read as such alone, and plain numbers never as bytes."""
        dtypes = {_PACKED_DTYPE: torch.uint8} if wanted == torch.uint8 else PLAIN_DTYPES
        stored = dtypes.get(entry.dtype)
        if stored is None:
            raise UnsupportedModelError(
                f"{entry.file}: {shown(entry.stored_name)} is stored as {entry.dtype}: readable are {', '.join(dtypes)}"
            )
        return stored

    def _listing(self) -> dict[Path, list[str] | None]:
        """The files to read and the tensors to take from each; None for all."""
        if (self._directory / SINGLE).is_file():
            return {self._directory / SINGLE: None}
        if not (self._directory / INDEX).is_file():
            raise self._nothing_to_read()
        weight_map = read_json(self._directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{self._directory / INDEX} has no weight_map: {FETCH_AGAIN}")
        listing: dict[Path, list[str] | None] = {}
        for name, file_name in weight_map.items():
            # A name with a path in it could lead out of the directory.
            if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
                raise ModelFileError(
                    f"{self._directory / INDEX} names {shown(file_name)}, no plain file name: {FETCH_AGAIN}"
                )
            if Path(file_name).suffix in PICKLE_SUFFIXES:
                raise pickle_refusal(self._directory / file_name)
            names = listing.setdefault(self._directory / file_name, [])
            assert names is not None
            names.append(name)
        missing = [file.name for file in listing if not file.is_file()]
        if missing:
            raise ModelFileError(
                f"{self._directory} lacks {len(missing)} of {len(listing)} shards, {', '.join(missing[:3])}: "
                "fetch them too"
            )
        return listing

    def _nothing_to_read(self) -> ModelFileError:
        for file in sorted(self._directory.iterdir()):
            if file.suffix in PICKLE_SUFFIXES and file.is_file():
                return pickle_refusal(file)
        return ModelFileError(f"{self._directory} has neither {SINGLE} nor {INDEX}: fetch the weights too")

    def _open(self, file: Path) -> Any:
        """The mapped file; its library checks the header against the file's size, and that no two tensors overlap."""
        try:
            handle = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ModelFileError(
                f"{file} is damaged or no safetensors file ({_reason(error)}; {describe_start(file)}): {FETCH_AGAIN}"
            ) from error
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error.strerror or error}") from error
        self._files[file] = handle
        return handle

    def _add(self, entry: StoredTensor) -> None:
        self._stored.append(entry)
        name = entry.stored_name
        for prefix, replacement in _TEXT_PREFIXES:
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        if name.startswith(_IGNORED_PREFIXES) or name.endswith(_IGNORED_SUFFIXES):
            return
        if name in self._entries:
            raise ModelFileError(f"{self._directory} holds the tensor {shown(name)} twice: {FETCH_AGAIN}")
        self._entries[name] = entry


def _entries(file: Path, handle: Any) -> dict[str, StoredTensor]:
    """The tensors of a file whose header the library has checked."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    start = 8 + header_bytes
    return {
        name: StoredTensor(
            file,
            name,
            header[name]["dtype"],
            tuple(header[name]["shape"]),
            start + header[name]["data_offsets"][0],
            header[name]["data_offsets"][1] - header[name]["data_offsets"][0],
        )
        for name in handle.keys()  # noqa: SIM118
    }


def _converted(entry: StoredTensor, stored: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """A tensor read and converted in parts through one small buffer."""
    out = torch.empty(entry.shape, dtype=dtype)
    flat = out.view(-1)
    count = math.prod(entry.shape)
    # Mapped, not taken from the heap, where a freed one leaves a hole that the next tensor begins to fill.
    memory = mmap(-1, max(1, min(count, _BYTES_AT_ONCE // stored.itemsize)) * stored.itemsize)
    buffer, view = torch.frombuffer(memory, dtype=stored), memoryview(memory)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        for first in range(0, count, max(1, len(buffer))):
            length = min(len(buffer), count - first)
            _read_fully(file, view[: length * stored.itemsize], entry)
            flat[first : first + length] = buffer[:length]
    return out


def _read_fully(file: Any, view: memoryview, entry: StoredTensor) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise ModelFileError(f"{entry.file} ended while {shown(entry.stored_name)} was read: did it change?")
        view = view[count:]


def _reason(error: SafetensorError) -> str:
    return str(error).removeprefix("Error while deserializing header: ").split(", expected one of")[0][:120]
