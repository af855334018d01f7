"""The end of a training: the student's weights take the place of those in its folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from kvist.convert.converted_weights import ConvertedWeights, as_stored
from kvist.convert.model_files import WEIGHTS_ASIDE
from kvist.convert.source import Source
from kvist.convert.uptrain_folder import transformers_name
from kvist.errors import ModelFileError, OptionError, shown
from kvist.loading.cache_folder import move_into_place
from kvist.loading.progress import no_progress
from kvist.loading.safetensors_checkpoint import INDEX, SINGLE
from kvist.loading.untrusted_file import read_json, write_json

_BEGIN_ANEW = "begin anew with --restart and a lower rate"
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
        NumericsError: a dtype does not hold the numbers. The same.
    """
    directory, trained = source.directory, trained_tensors(source, state)
    stored = {tensor.stored_name: tensor for tensor in source.checkpoint.all_stored}
    aside = directory / WEIGHTS_ASIDE
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        with ConvertedWeights(aside, stored, shapes, advice=_BEGIN_ANEW) as made:
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


def check_storable(source: Source, state: Mapping[str, torch.Tensor], advice: str) -> None:
    """See that a model's weights can be written in the place of its folder's, in their dtypes.

    Raises:
        NumericsError: a dtype does not hold their numbers. The message ends in `advice`.
    """
    dtypes = {tensor.stored_name: tensor.dtype for tensor in source.checkpoint.all_stored}
    for name, tensor in trained_tensors(source, state).items():
        as_stored(name, tensor, dtypes[name], advice)


def _replace_shards(directory: Path, made: Path, files: Sequence[str]) -> None:
    index = read_json(directory / INDEX)
    there = [path.name for path in directory.glob("*.safetensors")]
    names = {old: _next_name(directory, old, len(there)) for old in files}
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    index["weight_map"] = {name: names[file] for name, file in weight_map.items()}
    write_json(made / INDEX, index)
    for old, new in names.items():
        move_into_place(made / old, directory / new)
    move_into_place(made / INDEX, directory / INDEX)
    # Also those that an end before this one had no time to remove, or not even to name in the index.
    stems = {_stem(file) for file in files}
    for old in there:
        if _stem(old) in stems:
            (directory / old).unlink(missing_ok=True)


def _next_name(directory: Path, file: str, generation: int) -> str:
    """A name beside the old one: `model-00001-of-00002-t3.safetensors`."""
    while (directory / (name := f"{_stem(file)}-t{generation}.safetensors")).exists():
        generation += 1
    return name


def _stem(file: str) -> str:
    """What a shard is called whatever has been trained."""
    matched = _SHARD.fullmatch(file)
    return matched["stem"] if matched else file
