"""What each layer of a checkpoint sees and gives on a text, one layer in memory after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.plain_attention import AttentionRules, attention, decoder_layers
from kvist.convert.source import Source
from kvist.errors import NumericsError
from kvist.models.layers import LayerParts


@dataclass(frozen=True)
class LayerOnText:
    """A layer's attention on a text; all its numbers are finite.

    Attributes:
        index: of the layer.
        weights: float32.
        rules: what it does besides.
        inputs: `[B, L, E]`, float32.
        outputs: what it gives for them, less the output's bias, `[B, L, E]`.
    """

    index: int
    weights: AttentionWeights
    rules: AttentionRules
    inputs: torch.Tensor
    outputs: torch.Tensor

    def moment(self) -> torch.Tensor:
        """The second moment of the inputs, `[E, E]` float64; with biases that of the inputs with a one after them."""
        rows = self.weights.query.shape[2]
        total = torch.zeros(rows, rows, dtype=torch.float64)
        for x in self.inputs:
            columns = self.weights.with_ones(x).double()
            total += columns.T @ columns
        return total / (self.inputs.shape[0] * self.inputs.shape[1])


def layers_on_text(source: Source, windows: Sequence[Sequence[int]]) -> Iterator[LayerOnText]:
    """Every layer in order, each with the inputs that the layers before it give, in float32.

    In memory are one layer, and the text's hidden states three times: as they are, as the attention takes them, and
    what it gives for them. Who keeps a layer beyond the next one keeps two of these. `fit` has its own beside them.

    Args:
        source: the checkpoint.
        windows: token ids, of equal lengths.

    Raises:
        NumericsError: weights or hidden states are not numbers.
    """
    decoder = source.decoder
    with torch.no_grad():
        decoder.embed_tokens.weight = nn.Parameter(source.read("embed_tokens.weight"), requires_grad=False)
        hidden = decoder.embed(torch.tensor(windows)).float()
        decoder.embed_tokens.to("meta")
    _check_finite(source, "in its embedding", hidden)
    for index, layer in enumerate(decoder_layers(decoder)):
        weights = source.attention_weights(index).map(torch.Tensor.float)
        _take_weights(source, index, layer)
        rules = AttentionRules.of(decoder, index, hidden.shape[1])
        parts = layer.parts()
        with torch.no_grad():
            inputs, outputs = torch.empty_like(hidden), torch.empty_like(hidden)
            for window, x in enumerate(hidden):
                inputs[window] = parts.attention_input_norm(x)
                outputs[window] = attention(inputs[window], weights, rules)
        _check_finite(source, f"in the attention of layer {index}", inputs, outputs)
        yield LayerOnText(index, weights, rules, inputs, outputs)
        _advance(hidden, outputs, parts)
        del inputs, outputs
        layer.to("meta")
        _check_finite(source, f"after layer {index}", hidden)


def _check_finite(source: Source, where: str, *values: torch.Tensor) -> None:
    if not all(bool(window.isfinite().all()) for tensor in values for window in tensor):
        raise NumericsError(
            f"{source.name} gives values that are not finite numbers on this text, {where}: fetch the model again, or "
            "merge by the method mean, which needs no text"
        )


def _take_weights(source: Source, index: int, layer: nn.Module) -> None:
    """Give a layer its parameters in float32, but for the attention's projections."""
    apart = set(source.attention_parameters(index).values())
    for name, _ in list(layer.named_parameters()):
        if (parameter := f"layers.{index}.{name}") in apart:
            continue
        module_name, _, leaf = name.rpartition(".")
        values = source.read(parameter).float()
        setattr(layer.get_submodule(module_name), leaf, nn.Parameter(values, requires_grad=False))


@torch.no_grad()
def _advance(hidden: torch.Tensor, attention_outputs: torch.Tensor, parts: LayerParts) -> None:
    """Take hidden states `[B, L, E]`, in place, from before a layer to after it."""
    for x, y in zip(hidden, attention_outputs, strict=True):
        x.copy_(_after(x, y, parts))


def _after(x: torch.Tensor, attention_output: torch.Tensor, parts: LayerParts) -> torch.Tensor:
    """Hidden states `[L, E]` after a layer, from those before it and its attention's output less the bias."""
    bias = parts.attention.o_proj.bias
    y = attention_output if bias is None else attention_output + bias
    x = x + (y if parts.attention_output_norm is None else parts.attention_output_norm(y))
    y = parts.mlp(parts.mlp_input_norm(x))
    hidden: torch.Tensor = x + (y if parts.mlp_output_norm is None else parts.mlp_output_norm(y))
    return hidden
