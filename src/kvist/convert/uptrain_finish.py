"""The end of a training: the student's weights take the place of those in its folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from kvist.convert.converted_weights import ConvertedWeights
from kvist.convert.record import CONVERSION_FILE
from kvist.convert.source import Source
from kvist.convert.uptrain_folder import transformers_name
from kvist.errors import ModelFileError, OptionError, shown
from kvist.loading.cache_folder import move_into_place
from kvist.loading.progress import no_progress
from kvist.loading.safetensors_checkpoint import INDEX, SINGLE
from kvist.loading.untrusted_file import read_json, write_json

_PARTIAL = ".partial"
_SHARD = re.compile(r"(?P<stem>.*?)(?:-t\d+)?\.safetensors")


def trained_tensors(source: Source, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's weights by the names that its files have for them. What else lies in the files is not among them.

    Args:
        source: the files.
        state: the weights, by the names of transformers' text model.

    Raises:
        ModelFileError: the files hold a tensor of a decoder that the model does not have.
    """
    found = {}
    for name in source.checkpoint.names():
        stored, tensor = source.checkpoint.stored(name), state.get(transformers_name(name))
        if tensor is None or tuple(tensor.shape) != stored.shape:
            raise ModelFileError(
                f"{stored.file} holds {shown(stored.stored_name)} of shape {list(stored.shape)}, which the model that "
                "would be trained does not have: convert it again"
            )
        found[stored.stored_name] = tensor.detach()
    return found


def replace_weights(source: Source, state: Mapping[str, torch.Tensor]) -> None:
    """Write a model's weights in the place of its folder's, each in the dtype that it had; what else is there stays.

    What readers find is all old or all new: one file is renamed over the old one; shards get names of their own, and
    the index that leads to them is renamed.

    Args:
        source: the folder's files.
        state: as in `trained_tensors`.

    Raises:
        OptionError: they cannot be written. The old ones are still there.
    """
    directory, trained = source.directory, trained_tensors(source, state)
    stored = {tensor.stored_name: tensor for tensor in source.checkpoint.all_stored}
    aside = directory / f".trained{_PARTIAL}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        with ConvertedWeights(aside, stored, {name: tuple(tensor.shape) for name, tensor in trained.items()}) as made:
            for name, tensor in trained.items():
                made.write(name, tensor)
            made.copy_others(no_progress)
        if (aside / SINGLE).exists():
            move_into_place(aside / SINGLE, directory / SINGLE)
        else:
            _replace_shards(directory, aside, sorted({tensor.file.name for tensor in stored.values()}))
    except OSError as error:
        raise OptionError(
            f"the trained weights cannot be written in {directory}: {error.strerror or error}; free some space or "
            "permit it, then give --resume: the training itself is kept"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def record_of(directory: Path) -> tuple[dict[str, object], list[object]]:
    """What `conversion.json` says, and the list in it of the trainings before; nothing where there is no such file.

    Raises:
        ModelFileError: it is damaged.
    """
    path = directory / CONVERSION_FILE
    record = read_json(path) if path.exists() else {}
    earlier = record.get("uptraining", [])
    if not isinstance(earlier, list):
        raise ModelFileError(f"{path} is damaged, its uptraining is {shown(earlier)}: take that out, or convert again")
    return record, earlier


def add_record(directory: Path, entry: Mapping[str, object]) -> None:
    """Write down in `conversion.json` what was trained; what else stands there stays.

    Raises:
        OptionError: it cannot be written.
    """
    path = directory / CONVERSION_FILE
    record, earlier = record_of(directory)
    aside = directory / f".{CONVERSION_FILE}{_PARTIAL}"
    try:
        write_json(aside, {**record, "uptraining": [*earlier, dict(entry)]})
        move_into_place(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise OptionError(
            f"{path} cannot be written: {error.strerror or error}; free some space, then give --resume"
        ) from error


def _replace_shards(directory: Path, made: Path, files: Sequence[str]) -> None:
    index = read_json(directory / INDEX)
    generation = sum(1 for _ in directory.glob("*.safetensors"))
    names = {old: _next_name(directory, old, generation) for old in files}
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    index["weight_map"] = {name: names[file] for name, file in weight_map.items()}
    write_json(made / INDEX, index)
    for old, new in names.items():
        move_into_place(made / old, directory / new)
    move_into_place(made / INDEX, directory / INDEX)
    for old in files:
        (directory / old).unlink(missing_ok=True)


def _next_name(directory: Path, file: str, generation: int) -> str:
    """A name beside the old one: `model-00001-of-00002-t3.safetensors`."""
    matched = _SHARD.fullmatch(file)
    stem = matched["stem"] if matched else file
    while (directory / (name := f"{stem}-t{generation}.safetensors")).exists():
        generation += 1
    return name
