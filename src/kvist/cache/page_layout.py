"""Where the keys and values of one layer group lie in a page. The drawing and the numbers are in csrc/page_layout.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.config import LayerConfig
from kvist.errors import OptionError
from kvist.kernels import native
from kvist.kernels.codec import StorageFormat, storage_formats
from kvist.kv_format import KVFormat

_LAYOUT = native.page_layout()

PAGE_SLOTS = _LAYOUT["slots"]
"""Tokens of a page: the token at position p lies in slot p % PAGE_SLOTS of its sequence's page p // PAGE_SLOTS."""
LANES = _LAYOUT["lanes"]
"""Lanes of a line of codes: the slots of a tile of keys, the dims of a tile of values."""
LANE_BYTES = _LAYOUT["lane_bytes"]
INT8_KEY_BIAS = _LAYOUT["int8_key_bias"]
"""What is added to the codes of int8 keys, modulo 256."""

_FORMATS = storage_formats()


def storage_format(name: str) -> StorageFormat:
    """The storage format of a name in `kv_format.KV_FORMATS`."""
    return _FORMATS[name]


@dataclass(frozen=True)
class LayerGroup:
    """The layers that keep the same tokens.

    Attributes:
        window: tokens that a query of these layers sees, itself included; None sees all.
        layers: their indices in the model, ascending.
    """

    window: int | None
    layers: tuple[int, ...]


def layer_groups(layers: Sequence[LayerConfig]) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers: full attention first, then the windows, ascending."""
    windows = sorted({layer.window for layer in layers}, key=lambda window: -1 if window is None else window)
    return tuple(
        LayerGroup(window, tuple(index for index, layer in enumerate(layers) if layer.window == window))
        for window in windows
    )


@dataclass(frozen=True)
class HeadLayout:
    """The regions of one KV head, in bytes from its start, each a multiple of 64; `num_bytes` is its size."""

    key_codes: int
    key_scales: int
    value_codes: int
    value_scales: int
    num_bytes: int


@dataclass(frozen=True)
class LayerLayout:
    """Where one layer lies in a page: its KV heads one after another from byte `offset` on."""

    offset: int
    num_kv_heads: int
    head_dim: int
    kv_format: KVFormat
    head: HeadLayout

    @property
    def num_bytes(self) -> int:
        return self.num_kv_heads * self.head.num_bytes


class PageLayout:
    """The bytes of a page of one layer group.

    Args:
        layers: the shapes of the group's layers, in the order in which they lie in the page.
        formats: how each of them is stored.

    Attributes:
        layers: where each layer lies, in the same order.
        page_bytes: of all layers; a multiple of 64.

    Raises:
        OptionError: a format cannot take the head dim of its layer.
    """

    def __init__(self, layers: Sequence[LayerConfig], formats: Sequence[KVFormat]) -> None:
        placed: list[LayerLayout] = []
        offset = 0
        for layer, kv_format in zip(layers, formats, strict=True):
            for name in (kv_format.keys, kv_format.values):
                _check_head_dim(name, layer.head_dim)
            head = HeadLayout(*native.head_layout(kv_format.keys, kv_format.values, layer.head_dim))
            placed.append(LayerLayout(offset, layer.num_kv_heads, layer.head_dim, kv_format, head))
            offset += placed[-1].num_bytes
        self.layers = tuple(placed)
        self.page_bytes = offset


def _check_head_dim(name: str, head_dim: int) -> None:
    if native.takes_head_dim(name, head_dim):
        return
    can = ", ".join(other for other in _FORMATS if native.takes_head_dim(other, head_dim))
    raise OptionError(
        f"kv_format {name} cannot take a head dim of {head_dim}: it takes multiples of "
        f"{storage_format(name).codes_per_lane} up to {_LAYOUT['most_head_dim']}; "
        + (f"{can} can take {head_dim}" if can else "no format can")
    )
