"""What a model's name stands for: a directory, a file, a demo model or a model on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvist.errors import ModelFileError, ModelNotFoundError, did_you_mean
from kvist.loading.demo_models import DEMO_MODELS, DemoModel
from kvist.loading.hub import fetch_file, fetch_repository, local_file, local_repository
from kvist.loading.progress import Progress
from kvist.loading.pull import pull
from kvist.loading.untrusted_file import PICKLE_SUFFIXES, pickle_refusal

# org/name, org/name@revision, org/name/file.gguf, org/name@revision/file.gguf
_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?P<file>(?:/[\w -][\w. -]*)+\.gguf)?",
    re.ASCII,
)


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine: a directory in Hugging Face format or a GGUF file, and what to call it."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def resolve(model: str | os.PathLike[str], progress: Progress, *, fetch: bool = True) -> ModelSource:
    """Find a model by a path, a demo model's name or a Hub id, in this order.

    Args:
        model: what it is called.
        progress: told how far fetching is.
        fetch: whether to fetch what is not here. Otherwise it is not found.

    Raises:
        ModelNotFoundError: nothing goes by this name.
        ModelFileError: there is a file or directory of that name, but not of a kind that holds a model.
        DownloadError: it could not be fetched.
    """
    model = os.fspath(model)
    path = _path(model)
    if model and _exists(path):
        return ModelSource(path.resolve().name if path.is_dir() else path.stem, _local(path))
    if model in DEMO_MODELS:
        return ModelSource(model, pull(model, progress) if fetch else _pulled(DEMO_MODELS[model]))
    hub = None if model.startswith(("/", ".", "~")) else _HUB_NAME.fullmatch(model)
    if hub and hub["file"]:
        file = hub["file"].removeprefix("/")
        return ModelSource(
            Path(file).stem,
            fetch_file(hub["repo"], file, hub["revision"], progress)
            if fetch
            else _found(model, local_file(hub["repo"], file, hub["revision"])),
        )
    if hub and not hub["repo"].endswith((".gguf", *PICKLE_SUFFIXES)):
        return ModelSource(
            hub["repo"],
            fetch_repository(hub["repo"], hub["revision"], progress)
            if fetch
            else _found(model, local_repository(hub["repo"], hub["revision"])),
        )
    if "/" in model or path.suffix in (".gguf", ".safetensors", *PICKLE_SUFFIXES):
        raise ModelNotFoundError(f"there is no file or directory {model}")
    raise ModelNotFoundError(
        f"no model is called '{model}': {did_you_mean(model, DEMO_MODELS)}, or give a directory, a .gguf file or a "
        "Hugging Face id like org/name"
    )


def _pulled(model: DemoModel) -> Path:
    if not model.is_pulled:
        raise ModelNotFoundError(f"{model.name} is not here yet: fetch it with `kvist pull {model.name}`")
    return model.path


def _found(model: str, path: Path | None) -> Path:
    if path is None:
        raise ModelNotFoundError(
            f"{model} is not in the Hub's local cache: fetch it with `kvist run --model {model} hello`"
        )
    return path


def _path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~name of a user that does not exist, or ~ without a home folder
        return Path(model)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix in PICKLE_SUFFIXES:
            raise pickle_refusal(path)
        if path.suffix == ".safetensors" or path.name.endswith(".json"):
            raise ModelFileError(f"{path} is a part of a model: give the directory {path.parent} instead")
        return path
    if not path.is_dir():
        raise ModelFileError(f"{path} is neither a file nor a directory")
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = (
            f"it holds {ggufs[0].name}: give that file"
            if ggufs
            else "give a directory in Hugging Face format or a .gguf file"
        )
        raise ModelFileError(f"{path} has no config.json: {hint}")
    return path
