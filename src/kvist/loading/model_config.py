"""The `config.json` of a model that is here, without its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvist.errors import ModelFileError
from kvist.loading.gguf_config import hf_config
from kvist.loading.gguf_file import GgufFile
from kvist.loading.progress import no_progress
from kvist.loading.resolve import resolve
from kvist.loading.untrusted_file import read_json, require_gguf


def model_config(model: str | os.PathLike[str]) -> tuple[str, Path, Mapping[str, object]]:
    """The configuration of a model on this machine. Nothing is fetched, prepared or loaded.

    Args:
        model: a directory in Hugging Face format, a `.gguf` file, a demo model's name or a Hub id.

    Returns:
        What the model goes by, the file that was read, and its fields as a `config.json` has them.

    Raises:
        ModelNotFoundError: nothing on this machine goes by this name.
        ModelFileError, UnsupportedModelError: the file is damaged, or a GGUF file of an architecture that is not known.
    """
    source = resolve(model, no_progress, fetch=False)
    if source.is_gguf:
        require_gguf(source.path)
        return source.name, source.path, hf_config(GgufFile(source.path))
    path = source.path / "config.json"
    return source.name, path, read_json(path)


def config_file(path: str | os.PathLike[str]) -> tuple[str, Path, Mapping[str, object]]:
    """The same of a `config.json` alone. It goes by the folder that it lies in, as a model does.

    Raises:
        ModelFileError: there is no such file, or it holds no JSON object.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        what = "is a directory" if file.is_dir() else "is not there"
        raise ModelFileError(f"{file} {what}: give the file config.json of a model")
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), file, read_json(file)
