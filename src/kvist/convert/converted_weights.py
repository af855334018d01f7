"""The weight files of a conversion: those of the source, with other shapes for some tensors.

The files are laid out at once and filled in any order, since a layer may lie in several shards, and no more than one
should lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

import torch

from kvist.convert.destination import require_room
from kvist.errors import ModelFileError, NumericsError, shown
from kvist.loading.checkpoint import PLAIN_DTYPES
from kvist.loading.progress import Progress
from kvist.loading.safetensors_checkpoint import INDEX, SINGLE, StoredTensor
from kvist.loading.safetensors_writer import file_start, in_order
from kvist.loading.untrusted_file import write_json

_BYTES_AT_ONCE = 8 << 20


class ConvertedWeights:
    """Files under the names that they have in the source, with an index where the source has one.

    Args:
        directory: where to make them.
        tensors: the source's, by their stored names.
        shapes: of those that are converted; the others are copied.
        advice: what to do about numbers that a dtype does not hold: how messages end.

    Attributes:
        converted_bytes: of the tensors that are converted.

    Raises:
        OSError: there is no room.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, StoredTensor],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        advice: str,
    ) -> None:
        self._directory = directory
        self._tensors = tensors
        self._shapes = shapes
        self._advice = advice
        self._sizes = {
            name: tensor.num_bytes * math.prod(shapes[name]) // math.prod(tensor.shape)
            if name in shapes
            else tensor.num_bytes
            for name, tensor in tensors.items()
        }
        self.converted_bytes = sum(self._sizes[name] for name in shapes)
        self._places: dict[str, tuple[IO[bytes], int]] = {}
        self._files = ExitStack()
        require_room(directory, sum(self._sizes.values()))

    def __enter__(self) -> ConvertedWeights:
        with ExitStack() as files:
            file_names = sorted({tensor.file.name for tensor in self._tensors.values()})
            for file_name in file_names:
                self._lay_out(file_name, files.enter_context((self._directory / file_name).open("wb")))
            if file_names != [SINGLE]:
                index: dict[str, object] = {"metadata": {"total_size": sum(self._sizes.values())}}
                index["weight_map"] = {name: tensor.file.name for name, tensor in sorted(self._tensors.items())}
                write_json(self._directory / INDEX, index)
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Put a converted tensor in its place, in the dtype that the source's has; returns its bytes.

        Raises:
            NumericsError: the dtype does not hold its numbers.
        """
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name} is of shape {tuple(tensor.shape)}, not {self._shapes[name]}")
        rounded = as_stored(name, tensor, self._tensors[name].dtype, self._advice)
        data = rounded.contiguous().view(-1).view(torch.uint8).numpy()
        file, place = self._places[name]
        file.seek(place)
        return file.write(data.data)

    def copy_others(self, progress: Progress) -> None:
        """Copy every tensor that is not converted, byte by byte."""
        others = [tensor for name, tensor in self._tensors.items() if name not in self._shapes]
        done, total = 0, sum(tensor.num_bytes for tensor in others)
        for tensor in others:
            file, place = self._places[tensor.stored_name]
            file.seek(place)
            for data in stored_parts(tensor):
                done += file.write(data)
                progress("copying the other weights", done, total)

    def _lay_out(self, file_name: str, file: IO[bytes]) -> None:
        own = sorted(
            (tensor for tensor in self._tensors.values() if tensor.file.name == file_name), key=lambda own: own.offset
        )
        order = in_order({tensor.stored_name: self._sizes[tensor.stored_name] for tensor in own})
        start = file_start({
            name: (self._tensors[name].dtype, self._shapes.get(name, self._tensors[name].shape), self._sizes[name])
            for name in order
        })  # fmt: skip
        file.write(start)
        place = len(start)
        for name in order:
            self._places[name] = file, place
            place += self._sizes[name]
        file.truncate(place)


def as_stored(name: str, tensor: torch.Tensor, dtype: str, advice: str) -> torch.Tensor:
    """A tensor in the dtype of its file.

    Raises:
        NumericsError: the dtype does not hold its numbers.
    """
    rounded = tensor.to(PLAIN_DTYPES[dtype])
    if not rounded.isfinite().all():
        largest = torch.finfo(rounded.dtype).max
        raise NumericsError(f"{name} has numbers that {dtype} does not hold, whose largest is {largest:.3g}: {advice}")
    return rounded


def stored_parts(tensor: StoredTensor) -> Iterator[bytes]:
    """The bytes of a tensor, some at a time.

    Raises:
        ModelFileError: they cannot be read.
    """
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            for first in range(0, tensor.num_bytes, _BYTES_AT_ONCE):
                count = min(_BYTES_AT_ONCE, tensor.num_bytes - first)
                data = file.read(count)
                if len(data) < count:
                    raise ModelFileError(
                        f"{tensor.file} ended while {shown(tensor.stored_name)} was read: did it change?"
                    )
                yield data
    except OSError as error:
        raise ModelFileError(f"{tensor.file} cannot be read: {error.strerror or error}") from error
