"""Writes a GGUF file as a directory in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch

from kvist.loading.end_tokens import gguf_generation_config
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_config import hf_config
from kvist.loading.gguf_file import GgufFile
from kvist.loading.gguf_tokenizer import write_tokenizer
from kvist.loading.progress import Progress
from kvist.loading.quantised_weights import require_room, write_weights
from kvist.loading.untrusted_file import errors_about, write_json
from kvist.loading.weights import fitting_decoder
from kvist.loading.weights_plan import WEIGHT_DTYPES, weights_plan
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
    decoder, names = fitting_decoder(config, checkpoint, str(gguf_path))
    plan = weights_plan(decoder, weights_format, lambda name: checkpoint.block_type(names[name]))
    require_room(directory, plan)
    dtype = WEIGHT_DTYPES.get(weights_format, torch.float32)
    write_json(directory / "config.json", raw_config | {"dtype": str(dtype).removeprefix("torch.")})
    write_json(directory / "generation_config.json", gguf_generation_config(gguf.metadata))
    with errors_about(gguf_path):
        write_tokenizer(gguf.metadata, directory)
    write_weights(directory, checkpoint, names, plan, f"preparing {gguf_path.name}", progress)
