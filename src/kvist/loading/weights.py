"""Puts the tensors of a checkpoint into a decoder, each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvist.config import ModelConfig
from kvist.errors import ModelFileError, shown
from kvist.loading.checkpoint import Checkpoint
from kvist.loading.untrusted_file import FETCH_AGAIN
from kvist.models.decoder import Decoder
from kvist.models.registry import build_decoder

WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_PREFIX = "model."


def fitting_decoder(config: ModelConfig, checkpoint: Checkpoint, source: str) -> tuple[Decoder, dict[str, str]]:
    """A decoder without memory for its weights, and the checkpoint's tensor for each of its parameters.

    Args:
        config: what the decoder is built from.
        checkpoint: where the tensors will come from.
        source: what to call it in messages.

    Raises:
        ModelFileError: tensors are missing, left over or of another shape than the configuration says.
    """
    num_tensors = len(checkpoint.names())
    if config.num_layers > num_tensors:  # before that many layers are built
        raise _misfit(source, f"{config.num_layers} layers, but {num_tensors} tensors")
    decoder = _empty_decoder(config)
    parameters = dict(decoder.named_parameters())
    tensors: dict[str, str] = {}
    for name in checkpoint.names():
        if (other := tensors.setdefault(name.removeprefix(_PREFIX), name)) != name:
            raise _misfit(source, f"it holds one tensor under two names, {_some((other, name))}")
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # some files repeat the embedding under this name
    if missing := parameters.keys() - tensors.keys():
        raise _misfit(source, f"it lacks {_some(missing)}")
    if unexpected := tensors.keys() - parameters.keys():
        raise _misfit(source, f"it also holds {_some(unexpected)}")
    shapes = {name: (checkpoint.shape(tensors[name]), tuple(parameters[name].shape)) for name in parameters}
    if wrong := [f"{name} {shape} for {wanted}" for name, (shape, wanted) in shapes.items() if shape != wanted]:
        raise _misfit(source, f"shapes differ: {_some(wrong)}")
    return decoder, {name: tensors[name] for name in parameters}


def assign_weights(decoder: Decoder, checkpoint: Checkpoint, names: Mapping[str, str], dtype: torch.dtype) -> int:
    """Read the tensor of every parameter in `dtype` and put it in place; returns the bytes of all."""
    num_bytes = 0
    for parameter_name, tensor_name in names.items():
        tensor = checkpoint.read(tensor_name, dtype)
        module_name, _, leaf = parameter_name.rpartition(".")
        setattr(decoder.get_submodule(module_name), leaf, nn.Parameter(tensor, requires_grad=False))
        num_bytes += tensor.nbytes
    return num_bytes


def weights_bytes(config: ModelConfig, weights_format: str) -> int:
    """The bytes of all parameters of a model, tied ones once, without any of them.

    Raises:
        ModelFileError: the configuration is of sizes that no machine holds.
    """
    # Layers are alike, with a window or without: so a configuration that claims thousands takes no longer.
    one, two = (_num_parameters(replace(config, windows=config.windows[:1] * num_layers)) for num_layers in (1, 2))
    return (one + (config.num_layers - 1) * (two - one)) * WEIGHT_DTYPES[weights_format].itemsize


def _num_parameters(config: ModelConfig) -> int:
    try:
        return sum(parameter.numel() for parameter in _empty_decoder(config).parameters())
    except RuntimeError as error:  # PyTorch cannot count the bytes of a matrix
        raise ModelFileError("the weights would be larger than any machine's memory") from error


def _empty_decoder(config: ModelConfig) -> Decoder:
    """A decoder without memory for its weights."""
    with torch.device("meta"), _NoRandomValues():
        return build_decoder(config)


class _NoRandomValues(TorchFunctionMode):
    """Layers do not draw the values that the checkpoint replaces; on the meta device the mere attempt takes a second,
    since PyTorch imports its decompositions for it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _misfit(source: str, reason: str) -> ModelFileError:
    return ModelFileError(f"{source} does not fit its configuration: {reason}; {FETCH_AGAIN}")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(name if name.isprintable() and len(name) < 120 else shown(name) for name in listed[:3]) + more
