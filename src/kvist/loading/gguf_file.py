"""A GGUF file: mapped, and its header checked against the file's size before anything in it is believed.

    +-------+---------+--------------+-----------+-----------------------+-----------------------------+-----+------+
    | GGUF  | version | tensor count | key count | key, type, value; ... | name, dims, type, offset; ..| pad | data |
    +-------+---------+--------------+-----------+-----------------------+-----------------------------+-----+------+
      4       4         8              8

All numbers are little-endian; dims are listed innermost first; offsets count from the start of the data.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt

from kvist.errors import KvistError, ModelFileError, UnsupportedModelError, shown
from kvist.loading.gguf_blocks import BlockType, block_type
from kvist.loading.untrusted_file import FETCH_AGAIN, require_gguf

_U32, _U64 = Struct("<I"), Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: _U32, 5: Struct("<i"), 6: Struct("<f"),
    7: Struct("<?"), 10: _U64, 11: Struct("<q"), 12: Struct("<d"),
}  # fmt: skip
_ARRAY_DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL = 7
_MOST_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is row-major, columns last; `offset` counts from the start of the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_values * self.type.block_bytes


class GgufFile:
    """A mapped GGUF file of version 2 or 3.

    Attributes:
        metadata: values by key, as Python numbers, bools, strings, lists of strings and numpy arrays.
        tensors: the tensors by their name in the file.

    Raises:
        ModelFileError: missing, of another kind, truncated or contradictory.
        UnsupportedModelError: sound, but big-endian, split or with tensors of a type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map(path)
        reader = _HeaderReader(path, self._map)
        try:
            num_tensors, num_keys = reader.preamble()
            self.metadata = reader.metadata(num_keys)
            self.tensors = reader.tensors(num_tensors, self.metadata)
        except UnicodeDecodeError as error:
            raise reader.damaged("a string in its header is not UTF-8") from error

    def blocks(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, `[rows, bytes per row]`, mapped."""
        size = tensor.num_rows * tensor.row_bytes
        flat = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=tensor.offset)
        return flat.reshape(tensor.num_rows, tensor.row_bytes)


def _map(path: Path) -> mmap.mmap:
    require_gguf(path)
    try:
        with path.open("rb") as file:
            # Copy-on-write, so that tensors over it count as writable; nothing ever writes.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error


class _HeaderReader:
    """Walks through the header; `position` never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 4

    def preamble(self) -> tuple[int, int]:
        """The numbers of tensors and of keys, once the version is known to be readable."""
        version = self.number(_U32, "the version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{self.path} is a big-endian GGUF file: only little-endian ones are read")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version}: versions 2 and 3 are read; convert it with a current llama.cpp"
            )
        return self.number(_U64, "the tensor count"), self.number(_U64, "the key count")

    def metadata(self, num_keys: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for index in range(num_keys):
            key = self.string(f"key {index + 1} of {num_keys}")
            if key in values:
                raise self.damaged(f"it has the key {shown(key)} twice")
            values[key] = self.value(self.number(_U32, f"the type of {shown(key)}"), shown(key))
        parts = values.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise UnsupportedModelError(
                f"{self.path} is one of {parts} parts of a model: join them with `llama-gguf-split --merge`"
            )
        return values

    def tensors(self, num_tensors: int, metadata: dict[str, object]) -> dict[str, GgufTensor]:
        found: dict[str, GgufTensor] = {}
        for index in range(num_tensors):
            tensor = self.tensor(f"tensor {index + 1} of {num_tensors}")
            if tensor.name in found:
                raise self.damaged(f"it has the tensor {shown(tensor.name)} twice")
            found[tensor.name] = tensor
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {shown(alignment)}, no power of two")
        data_start = -(-self.position // alignment) * alignment
        placed = {name: self.placed(tensor, data_start, alignment) for name, tensor in found.items()}
        self.check_apart(placed.values())
        return placed

    def check_apart(self, tensors: Iterable[GgufTensor]) -> None:
        """Refuse tensors that share bytes: what is made of a file could be any number of times its size."""
        for before, after in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
            if before.offset + before.num_rows * before.row_bytes > after.offset:
                raise self.damaged(f"the tensors {shown(before.name)} and {shown(after.name)} overlap")

    def tensor(self, what: str) -> GgufTensor:
        """The next tensor, its offset still counted from the start of the data."""
        name = self.string(f"the name of {what}")
        num_dims = self.number(_U32, f"the dims of {shown(name)}")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self.damaged(f"tensor {shown(name)} has {num_dims} dims, at most 4 are possible")
        shape = tuple(self.number(_U64, f"the dims of {shown(name)}") for _ in range(num_dims))[::-1]
        try:
            kind = block_type(self.number(_U32, f"the type of {shown(name)}"))
        except KvistError as error:
            raise type(error)(f"{self.path}: tensor {shown(name)}: {error}") from None
        if 0 in shape or shape[-1] % kind.block_values:
            raise self.damaged(f"tensor {shown(name)} of type {kind.name} has the shape {shape}")
        return GgufTensor(name, kind, shape, self.number(_U64, f"the offset of {shown(name)}"))

    def placed(self, tensor: GgufTensor, data_start: int, alignment: int) -> GgufTensor:
        """The tensor with its offset counted from the start of the file, once it is known to lie within it."""
        if tensor.offset % alignment:
            raise self.damaged(f"tensor {shown(tensor.name)} is not aligned to {alignment} bytes")
        offset = data_start + tensor.offset
        missing = offset + tensor.num_rows * tensor.row_bytes - self.size
        if missing > 0:
            raise self.truncated(f"tensor {shown(tensor.name)}", missing)
        return GgufTensor(tensor.name, tensor.type, tensor.shape, offset)

    # --- values ---

    def number(self, kind: Struct, what: str) -> int:
        value: int = kind.unpack_from(self.data, self.advance(kind.size, what))[0]
        return value

    def string(self, what: str) -> str:
        length = self.number(_U64, what)
        start = self.advance(length, what)
        return self.data[start : start + length].decode()

    def value(self, kind: int, what: str) -> object:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise self.damaged(f"{what} has the unknown value type {kind}")
        element, length = self.number(_U32, what), self.number(_U64, what)
        if element == _STRING:
            return self.strings(length, what)
        if element == _ARRAY:
            raise ModelFileError(f"{self.path}: {what} is an array of arrays, which no model needs")
        if element not in _ARRAY_DTYPES:
            raise self.damaged(f"{what} has the unknown element type {element}")
        dtype = np.dtype(_ARRAY_DTYPES[element])
        start = self.advance(length * dtype.itemsize, what)
        # A copy, so that no metadata keeps the mapping alive.
        array = np.frombuffer(self.data, dtype, count=length, offset=start).copy() if length else np.empty(0, dtype)
        return array != 0 if element == _BOOL else array

    def strings(self, count: int, what: str) -> list[str]:
        # A vocabulary has hundreds of thousands of them: one loop without calls per string.
        data, size, position, unpack = self.data, self.size, self.position, _U64.unpack_from
        if count > (size - position) // 8:
            raise self.truncated(what, count * 8 - (size - position))
        strings = []
        for _ in range(count):
            if position + 8 > size:
                raise self.truncated(what, position + 8 - size)
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > size:
                raise self.truncated(what, position - size)
            strings.append(data[start:position].decode())
        self.position = position
        return strings

    def advance(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.truncated(what, num_bytes - (self.size - start))
        self.position = start + num_bytes
        return start

    def damaged(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is damaged: {reason}; {FETCH_AGAIN}")

    def truncated(self, what: str, missing: int) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is truncated or damaged: it ends after {self.size} bytes, {missing} bytes before the end of "
            f"{what}; {FETCH_AGAIN}"
        )
