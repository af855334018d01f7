"""Decoder layers run by the native library, where their matrices are quantised or in bf16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import torch
from torch import nn

from kvist.cache.cache_view import CacheView
from kvist.kernels import native, native_types
from kvist.models.layers import DecoderLayer, LayerParts, OffsetRMSNorm, RMSNorm
from kvist.models.matrices import QuantisedLinear, WideLinear

Rope = tuple[torch.Tensor, torch.Tensor]

# Rows times layers that one call takes: while it lasts Python acts on no interrupt. The layers of a few tokens are one
# call, since between calls the interpreter finds nothing in the caches any more.
_MOST_ROWS = 256


class LayerSteps:
    """Runs the layers of a decoder over the tokens of one step.

    A layer runs natively where all its matrices are quantised or in bf16, its norms and biases are float32, the library
    knows its activation, its pages and hidden states are on the CPU, and nothing wants gradients. Else its module runs,
    which is the native one's twin.

    Args:
        cache: of the step.
        plain: run modules alone.

    Raises:
        SequenceError: a sequence of the step was committed, rewound or released since the view was made.
    """

    def __init__(self, cache: CacheView, *, plain: bool = False) -> None:
        cache.check_current()
        self._cache = cache
        self._plain = plain
        self._records = torch.is_grad_enabled()
        self._pages = cache.native_layers()
        self._num_threads = torch.get_num_threads()
        self._made: list[tuple[torch.Tensor, Rope, native_types.HiddenRows | None]] = []

    def run(self, layers: Iterable[nn.Module], x: torch.Tensor, ropes: Iterable[Rope]) -> torch.Tensor:
        """Hidden states after all layers, from those before: `x` `[T, E]` itself, changed in place, or others.

        Args:
            layers: all of the decoder, `DecoderLayer`s.
            x: the hidden states. The caller needs them no more.
            ropes: of each layer: cosine and sine of each token's angles, as `rope_tables` gives them.
        """
        calls: list[native_types.LayerCall] = []
        most = max(1, _MOST_ROWS // max(1, len(x)))
        for index, (layer, rope) in enumerate(zip(layers, ropes, strict=True)):
            call = self._native_call(index, layer, x, rope)
            if call is None or len(calls) == most:
                self._run_native(calls)
                calls = []
            if call is not None:
                calls.append(call)
            else:
                x = layer(x, rope, self._cache, index)
        self._run_native(calls)
        return x

    def _native_call(self, index: int, layer: nn.Module, x: torch.Tensor, rope: Rope) -> native_types.LayerCall | None:
        """What a layer needs to run natively; None where its module must run."""
        assert isinstance(layer, DecoderLayer)
        wants_gradients = self._records and any(parameter.requires_grad for parameter in layer.parameters())
        if self._plain or wants_gradients or (handle := _current(layer)) is None:
            return None
        pages, rows = self._pages[index], self._rows(x, rope)
        return None if pages is None or rows is None else (handle, *pages, rows)

    def _run_native(self, calls: Sequence[native_types.LayerCall]) -> None:
        if calls:
            native.run_layers(calls, num_threads=self._num_threads)

    def norm(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        """The normed hidden states `[T, E]` after the last layer; natively where the last layer ran so."""
        known_x, _, rows = self._made[-1] if self._made else (None, None, None)
        if known_x is not x or rows is None or not _is_native_norm(norm):
            y: torch.Tensor = norm(x)
            return y
        out = torch.empty_like(x)
        rows.norm(
            native.capsule(norm.weight),
            native.capsule(out),
            offset=norm.offset,
            eps=norm.eps,
            num_threads=self._num_threads,
        )
        return out

    def _rows(self, x: torch.Tensor, rope: Rope) -> native_types.HiddenRows | None:
        """The hidden states for native layers, made once for all that turn by the same angles; None for no such."""
        for known_x, known_rope, known in self._made:
            if known_x is x and known_rope is rope:
                return known
        fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad
        rows = native.hidden_rows(x, rope) if fits else None
        self._made.append((x, rope, rows))
        return rows


class NativeLayer:
    """A decoder layer as the native library has it, and what shows that it is still the same layer.

    What is written to its weights needs no notice: the library reads the tensors themselves. But it does not see that
    a module, a tensor or a tensor's memory has become another.

    Attributes:
        handle: None where the layer's module must run.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self.handle = _handle(layer.parts())
        self._tensors = [*layer.parameters(), *layer.buffers()]
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        # While their memory is kept, no other tensor comes to lie in the same place.
        self._kept = [tensor.detach() for tensor in self._tensors]
        self._members = [
            members
            for module in layer.modules()
            for members in (module._modules, module._parameters, module._buffers)
            if members
        ]
        self._members_then = [dict(members) for members in self._members]

    def is_current(self) -> bool:
        """Whether the layer is as it was, in two microseconds: every step asks every layer."""
        try:
            # What is the same object is equal at once.
            same = self._members == self._members_then
        except RuntimeError:  # two tensors were compared, and gave no single answer
            return False
        return same and list(map(torch.Tensor.data_ptr, self._tensors)) == self._places


def use_native_layers(decoder: nn.Module) -> None:
    """Make the native layers of a decoder now, so that its first step need not.

    Later changes of weights are noticed. Those of what modules know besides are not (`eps`, `scale`, `window`,
    `activation`): call this again.
    """
    for module in decoder.modules():
        if isinstance(module, DecoderLayer):
            module.native = NativeLayer(module)


def _current(layer: DecoderLayer) -> native_types.DecoderLayer | None:
    made = layer.native
    if made is None or not made.is_current():
        layer.native = made = NativeLayer(layer)
    return made.handle


def _handle(parts: LayerParts) -> native_types.DecoderLayer | None:
    """The layer for the native library; None where the library computes none such."""
    attention, mlp = parts.attention, parts.mlp
    modules: tuple[nn.Module, ...] = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    modules += (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    matrices = [
        (handle, module.bias)
        for module in modules
        if isinstance(module, QuantisedLinear | WideLinear) and (handle := module.native) is not None
    ]
    norms = (
        parts.attention_input_norm, attention.q_norm, attention.k_norm, parts.attention_output_norm,
        parts.mlp_input_norm, parts.mlp_output_norm,
    )  # fmt: skip
    there = [norm for norm in norms if norm is not None]
    kinds = {(norm.eps, norm.offset) for norm in there if _is_native_norm(norm)}
    fits = (
        len(matrices) == len(modules)
        and all(bias is None or _is_plain(bias) for _, bias in matrices)
        and all(map(_is_native_norm, there))
        and len(kinds) == 1
        and native.can_run_layers(head_dim=attention.head_dim, activation=mlp.activation)
    )
    if not fits:
        return None
    q, k, v, o, gate, up, down = matrices
    eps, offset = kinds.pop()
    weights = native.LayerWeights(
        q=q,
        k=k,
        v=v,
        o=o,
        gate=gate,
        up=up,
        down=down,
        attention_input_norm=parts.attention_input_norm.weight,
        q_norm=_weight(attention.q_norm),
        k_norm=_weight(attention.k_norm),
        attention_output_norm=_weight(parts.attention_output_norm),
        mlp_input_norm=parts.mlp_input_norm.weight,
        mlp_output_norm=_weight(parts.mlp_output_norm),
        norm_offset=offset,
    )
    return native.decoder_layer(
        weights,
        eps=eps,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.window,
        activation=mlp.activation,
    )


def _weight(norm: nn.Module | None) -> torch.Tensor | None:
    assert norm is None or isinstance(norm, RMSNorm)
    return None if norm is None else norm.weight


def _is_native_norm(norm: nn.Module) -> TypeGuard[RMSNorm]:
    """Whether the native library computes this norm. It does not know what else a class of another's may do."""
    return isinstance(norm, RMSNorm) and type(norm) in (RMSNorm, OffsetRMSNorm) and _is_plain(norm.weight)


def _is_plain(vector: torch.Tensor) -> bool:
    return vector.device.type == "cpu" and vector.dtype == torch.float32 and vector.is_contiguous()
