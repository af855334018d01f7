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
from kvist.kernels.weight_codec import QuantisedWeight
from kvist.loading.checkpoint import Checkpoint
from kvist.loading.untrusted_file import FETCH_AGAIN
from kvist.loading.weights_plan import KeptWeight, takes, weights_plan
from kvist.models.decoder import Decoder
from kvist.models.matrices import has_fine_rows, quantised_module, wide_module
from kvist.models.native_layer import use_native_layers
from kvist.models.registry import build_decoder

_PREFIX = "model."


def fitting_decoder(
    config: ModelConfig, checkpoint: Checkpoint, source: str, packed: Mapping[str, str] | None = None
) -> tuple[Decoder, dict[str, str]]:
    """A decoder without memory for its weights, and the checkpoint's tensor for each of its parameters.

    Args:
        config: what the decoder is built from.
        checkpoint: where the tensors will come from.
        source: what to call it in messages.
        packed: the format of each of the checkpoint's tensors that is a packed matrix.

    Raises:
        ModelFileError: tensors are missing, left over or of another shape than the configuration says.
    """
    num_tensors = len(checkpoint.names())
    if config.num_layers > num_tensors:  # before that many layers are built
        raise _misfit(source, f"{config.num_layers} layers, but {num_tensors} tensors")
    decoder = empty_decoder(config)
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
    shapes = {}
    for name, parameter in parameters.items():
        shape, storage = tuple(parameter.shape), (packed or {}).get(tensors[name])
        if storage is not None and not takes(storage, shape):
            raise _misfit(source, f"{name} of shape {shape} cannot be packed as {shown(storage)}")
        stored = shape if storage is None else KeptWeight(shape, storage).spec.shape
        shapes[name] = (checkpoint.shape(tensors[name]), stored)
    if wrong := [f"{name} {shape} for {wanted}" for name, (shape, wanted) in shapes.items() if shape != wanted]:
        raise _misfit(source, f"shapes differ: {_some(wrong)}")
    return decoder, {name: tensors[name] for name in parameters}


def assign_weights(
    decoder: Decoder, checkpoint: Checkpoint, names: Mapping[str, str], plan: Mapping[str, KeptWeight]
) -> int:
    """Read every parameter as the plan keeps it and put it in place; returns the bytes of all."""
    tensors = {name: checkpoint.read(tensor_name, plan[name].spec.dtype) for name, tensor_name in names.items()}
    for name, tensor in tensors.items():
        if plan[name].packed is None:
            module_name, _, leaf = name.rpartition(".")
            setattr(decoder.get_submodule(module_name), leaf, nn.Parameter(tensor, requires_grad=False))
    # Other modules for matrices that are packed, or have fewer digits than the hidden states; biases are in place now.
    for name, tensor in tensors.items():
        kept, module_name = plan[name], name.rpartition(".")[0]
        if kept.packed is not None:
            num_rows, num_columns = kept.shape
            weight = QuantisedWeight(kept.storage, num_rows, num_columns, tensor, has_fine_rows(module_name))
            decoder.set_submodule(module_name, quantised_module(decoder.get_submodule(module_name), weight))
        elif kept.storage == "bf16":
            with _NoRandomValues():
                wide = wide_module(decoder.get_submodule(module_name))
            decoder.set_submodule(module_name, wide)
    use_native_layers(decoder)
    return sum(tensor.nbytes for tensor in tensors.values())


def weights_bytes(config: ModelConfig, weights_format: str) -> int:
    """The bytes of all weights of a model, tied ones once, without any of them.

    Raises:
        ModelFileError: the configuration is of sizes that no machine holds.
    """
    # Layers are alike, with a window or without: so a configuration that claims thousands takes no longer.
    one, two = (
        _planned_bytes(replace(config, windows=config.windows[:1] * num_layers), weights_format)
        for num_layers in (1, 2)
    )
    return one + (config.num_layers - 1) * (two - one)


def _planned_bytes(config: ModelConfig, weights_format: str) -> int:
    try:
        return sum(kept.spec.num_bytes for kept in weights_plan(empty_decoder(config), weights_format).values())
    except RuntimeError as error:  # PyTorch cannot count the bytes of a matrix
        raise ModelFileError("the weights would be larger than any machine's memory") from error


def empty_decoder(config: ModelConfig) -> Decoder:
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
