"""The end of a training: the student's weights take the place of those in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from kvist.convert.record import CONVERSION_FILE
from kvist.errors import ModelFileError, OptionError, shown
from kvist.loading.cache_folder import move_into_place
from kvist.loading.checkpoint import PLAIN_DTYPES
from kvist.loading.safetensors_checkpoint import INDEX, SINGLE
from kvist.loading.safetensors_writer import TensorSpec, write_safetensors
from kvist.loading.untrusted_file import read_json, write_json

_PARTIAL = ".partial"
_SHARD = re.compile(r"(?P<stem>.*?)(?:-t\d+)?\.safetensors")


def stored_tensors(directory: Path) -> dict[str, dict[str, TensorSpec]]:
    """Shape and dtype of every tensor in a folder in Hugging Face format, by its file's name and its own.

    Raises:
        ModelFileError: a tensor is no plain floating-point one.
    """
    names = [SINGLE]
    if not (directory / SINGLE).is_file():
        weight_map = read_json(directory / INDEX)["weight_map"]
        assert isinstance(weight_map, dict)
        names = sorted(set(weight_map.values()))
    return {name: _header(directory / name) for name in names}


def replace_weights(directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a model's weights in the place of its folder's, each in the dtype that it had.

    What readers find is all old or all new: one file is renamed over the old one; shards get names of their own, and
    the index that leads to them is renamed.

    Args:
        directory: in Hugging Face format.
        state: the weights by their names in the files.

    Raises:
        ModelFileError: the files hold a tensor that the model does not have.
        OptionError: they cannot be written. The old ones are still there.
    """
    stored = stored_tensors(directory)
    for specs in stored.values():
        for name, spec in specs.items():
            if name not in state or tuple(state[name].shape) != spec.shape:
                raise ModelFileError(f"{directory} holds {shown(name)}, which the trained model does not have")
    made: list[Path] = []
    try:
        for file, specs in stored.items():
            aside = directory / f".{file}{_PARTIAL}"
            made.append(aside)
            _write_file(aside, specs, state)
        if list(stored) == [SINGLE]:
            move_into_place(made[0], directory / SINGLE)
        else:
            _replace_shards(directory, dict(zip(stored, made, strict=True)))
    except OSError as error:
        raise OptionError(
            f"the trained weights cannot be written in {directory}: {error.strerror or error}; free some space or "
            "permit it, then give --resume: the training itself is kept"
        ) from error
    finally:
        for aside in made:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


def add_record(directory: Path, entry: Mapping[str, object]) -> None:
    """Write down in `conversion.json` what was trained; what else stands there stays.

    Raises:
        OptionError: it cannot be written.
    """
    path = directory / CONVERSION_FILE
    record = read_json(path) if path.exists() else {}
    earlier = record.get("uptraining", [])
    record["uptraining"] = [*(earlier if isinstance(earlier, list) else []), dict(entry)]
    aside = directory / f".{CONVERSION_FILE}{_PARTIAL}"
    try:
        write_json(aside, record)
        move_into_place(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise OptionError(
            f"{path} cannot be written: {error.strerror or error}; free some space, then give --resume"
        ) from error


def _replace_shards(directory: Path, made: Mapping[str, Path]) -> None:
    index = read_json(directory / INDEX)
    generation = sum(1 for _ in directory.glob("*.safetensors"))
    names = {old: _next_name(directory, old, generation) for old in made}
    for old, aside in made.items():
        move_into_place(aside, directory / names[old])
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    index["weight_map"] = {name: names[file] for name, file in weight_map.items()}
    aside = directory / f".{INDEX}{_PARTIAL}"
    try:
        write_json(aside, index)
        move_into_place(aside, directory / INDEX)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    for old in made:
        (directory / old).unlink(missing_ok=True)


def _next_name(directory: Path, file: str, generation: int) -> str:
    """A name beside the old one: `model-00001-of-00002-t3.safetensors`."""
    matched = _SHARD.fullmatch(file)
    stem = matched["stem"] if matched else file
    while (directory / (name := f"{stem}-t{generation}.safetensors")).exists():
        generation += 1
    return name


def _write_file(path: Path, specs: Mapping[str, TensorSpec], state: Mapping[str, torch.Tensor]) -> None:
    def parts(name: str) -> Iterator[torch.Tensor]:
        return _parts(state[name], specs[name])

    write_safetensors(path, specs, parts, lambda written: None)


def _parts(tensor: torch.Tensor, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """A tensor in its dtype, some rows at a time."""
    if tensor.dim() < 2:
        yield tensor.detach().to(spec.dtype)
        return
    rows = max(1, (8 << 20) // max(1, tensor.shape[1:].numel()))
    for part in torch.split(tensor.detach(), rows):
        yield part.to(spec.dtype)


def _header(file: Path) -> dict[str, TensorSpec]:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    specs = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = PLAIN_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelFileError(f"{file}: {shown(name)} is stored as {entry['dtype']}, which is not trained")
        specs[name] = TensorSpec(tuple(entry["shape"]), dtype)
    return specs
