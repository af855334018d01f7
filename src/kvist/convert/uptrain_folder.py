"""The folders of teacher and student: looked at before anything is loaded, and what their tensors are called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvist.config import ModelConfig
from kvist.convert.source import Source
from kvist.errors import ModelNotFoundError
from kvist.loading.progress import Progress, no_progress
from kvist.loading.resolve import resolve
from kvist.loading.tokenizer import Tokenizer

_PREFIX, _OUTPUT = "model.", "lm_head."


@dataclass(frozen=True)
class ModelFolder:
    """A model's files in Hugging Face format, which fit their configuration.

    Attributes:
        source: the files.
        tokenizer: of the model.
    """

    source: Source
    tokenizer: Tokenizer

    @classmethod
    def find(cls, model: str, progress: Progress) -> ModelFolder:
        """The folder of a model by path, name or Hub id; a GGUF file is de-quantised.

        Raises:
            KvistError: it is not there, damaged, lacks weights, or is of a family that is not run.
        """
        is_gguf = resolve(model, progress).is_gguf
        source = Source.open(model, "fp32" if is_gguf else None, progress)
        return cls(source, Tokenizer.from_directory(source.directory))

    @classmethod
    def student(cls, path: Path) -> ModelFolder:
        """The folder of a model that is to be trained in place.

        Raises:
            ModelNotFoundError: there is none.
        """
        if not path.is_dir():
            raise ModelNotFoundError(
                f"there is no folder {path}: make one with `kvist convert gqa SRC {path} --kv-heads N` first"
            )
        return cls.find(str(path.absolute()), no_progress)

    @property
    def path(self) -> Path:
        """The folder; the prepared copy of a GGUF file."""
        return self.source.directory

    @property
    def name(self) -> str:
        """What the model goes by."""
        return self.source.name

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.source.config


def is_trained(name: str, train: str) -> bool:
    """Whether a training changes a parameter, by its name in transformers; `train` as in `UptrainConfig`."""
    return train == "all" or ".self_attn." in name


def transformers_name(tensor: str) -> str:
    """What transformers' text model calls a tensor of a checkpoint, which may lack its prefix."""
    name = tensor.removeprefix(_PREFIX)
    return name if name.startswith(_OUTPUT) else _PREFIX + name
