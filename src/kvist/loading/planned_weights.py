"""What the weights of a model would be kept in, and what they would take, without any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvist.config import WEIGHTS_FORMATS, ModelConfig
from kvist.errors import OptionError
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_file import GgufFile
from kvist.loading.weights import empty_decoder, fitting_decoder, weights_bytes
from kvist.loading.weights_plan import weights_plan


def format_of_gguf(gguf: GgufFile) -> str:
    """The `weights_format` that a file is loaded in by default: `gguf` where it has quantised matrices."""
    return "gguf" if any(tensor.type.quantised for tensor in gguf.tensors.values()) else "bf16"


def refuse_gguf(name: str) -> OptionError:
    """The error for a model that has no GGUF file."""
    others = ", ".join(known for known in WEIGHTS_FORMATS if known != "gguf")
    return OptionError(f"weights_format gguf is for GGUF files, and {name} is none: take {others}")


def planned_weights(name: str, path: Path, config: ModelConfig, weights_format: str | None) -> tuple[str, int]:
    """The format and the bytes of all weights.

    Args:
        name: what the model goes by.
        path: its GGUF file, or its `config.json`.
        config: what it says.
        weights_format: one of `WEIGHTS_FORMATS`; None takes the one that the model is loaded in by default.

    Raises:
        OptionError: the format is not one for such a model.
        ModelFileError: the configuration is of sizes that no machine holds, or the file does not fit it.
    """
    if path.suffix == ".json":
        if weights_format == "gguf":
            raise refuse_gguf(name)
        return weights_format or "bf16", weights_bytes(config, weights_format or "bf16")
    gguf = GgufFile(path)
    checkpoint = GgufCheckpoint(gguf, config)
    decoder, names = fitting_decoder(config, checkpoint, str(path))
    weights_format = weights_format or format_of_gguf(gguf)
    plan = weights_plan(decoder, weights_format, lambda parameter: checkpoint.block_type(names[parameter]))
    return weights_format, sum(kept.spec.num_bytes for kept in plan.values())


def weights_with_kv_heads(path: Path, config: ModelConfig, weights_format: str, num_kv_heads: int) -> int:
    """The bytes of all weights if the model had another number of KV heads; arguments and errors as above."""
    other = replace(config, num_kv_heads=num_kv_heads)
    if path.suffix == ".json":
        return weights_bytes(other, weights_format)
    checkpoint = GgufCheckpoint(GgufFile(path), config)
    _, names = fitting_decoder(config, checkpoint, str(path))
    plan = weights_plan(empty_decoder(other), weights_format, lambda name: checkpoint.block_type(names[name]))
    return sum(kept.spec.num_bytes for kept in plan.values())
