"""Writes a GGUF file as a directory in Hugging Face format."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from kvist.loading.end_tokens import gguf_generation_config
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_config import hf_config
from kvist.loading.gguf_file import GgufFile
from kvist.loading.gguf_tokenizer import write_tokenizer
from kvist.loading.progress import Progress
from kvist.loading.safetensors_writer import write_safetensors
from kvist.loading.untrusted_file import errors_about, write_json
from kvist.loading.weights import WEIGHT_DTYPES, fitting_decoder
from kvist.models.registry import decoder_config


def convert_gguf(gguf_path: Path, weights_format: str, directory: Path, progress: Progress) -> None:
    """Write configuration, tokenizer and weights into an empty directory.

    A model that cannot be run is refused before anything large is written. Memory stays at a few MB besides the
    mapped file.

    Raises:
        ModelFileError: the file is damaged or contradicts itself.
        UnsupportedModelError: it holds a model that is not run.
        OSError: the directory cannot take it.
    """
    gguf = GgufFile(gguf_path)
    raw_config = hf_config(gguf)
    with errors_about(gguf_path):
        config = decoder_config(raw_config)
    checkpoint = GgufCheckpoint(gguf, config)
    _, names = fitting_decoder(config, checkpoint, str(gguf_path))
    shapes = {name: checkpoint.shape(name) for name in names.values()}
    dtype = WEIGHT_DTYPES[weights_format]
    total, done = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize, 0
    if (free := shutil.disk_usage(directory).free) < total:
        raise OSError(f"it needs {total / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(f"preparing {gguf_path.name}", done, total)

    written(0)
    write_json(directory / "config.json", raw_config | {"dtype": str(dtype).removeprefix("torch.")})
    write_json(directory / "generation_config.json", gguf_generation_config(gguf.metadata))
    with errors_about(gguf_path):
        write_tokenizer(gguf.metadata, directory)
    write_safetensors(
        directory / "model.safetensors", shapes, dtype, lambda name: checkpoint.parts(name, dtype), written
    )
