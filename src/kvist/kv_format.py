"""How keys and values are stored, as users name it and as the cache takes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvist.errors import OptionError, did_you_mean, shown

KV_FORMATS = ("bf16", "fp32", "int8", "int4")
"""What one side, keys or values, can be stored in."""

QUANTISED_FORMATS = ("int8", "int4")
"""Those of them that store codes and what a code is worth, rather than the numbers."""

# What other tools call a format, or one that is near to it here.
_NAMES_ELSEWHERE = {
    "auto": "bf16", "bfloat16": "bf16", "f16": "bf16", "fp16": "bf16", "float16": "bf16", "half": "bf16",
    "f32": "fp32", "float32": "fp32",
    "q8_0": "int8", "fp8": "int8", "fp8_e4m3": "int8", "fp8_e5m2": "int8",
    "q4_0": "int4", "q4_1": "int4",
}  # fmt: skip

_SIDES = {"k": "keys", "v": "values"}


@dataclass(frozen=True)
class KVFormat:
    """How the keys and values of a layer are stored, each in one of `KV_FORMATS`. `str()` gives the shortest text.

    Args:
        keys: the format of the keys.
        values: the format of the values.
    """

    keys: str
    values: str

    def __post_init__(self) -> None:
        for name in (self.keys, self.values):
            if name not in KV_FORMATS:
                near = _NAMES_ELSEWHERE.get(str(name).lower(), str(name))
                raise OptionError(f"unknown kv_format '{name}': {did_you_mean(near, KV_FORMATS)}")

    @classmethod
    def parse(cls, text: str) -> KVFormat:
        """The format that a user names: `int8` for both sides, or one for each, `k=int8,v=int4`.

        Raises:
            OptionError: a name or side is unknown, a side is missing or named twice.
        """
        if "=" not in text:
            name = text.strip()
            return cls(name, name)
        if ";" in text:
            raise OptionError(f"kv_format '{text}': a comma separates the sides, not ';'; write it like k=int8,v=int4")
        formats: dict[str, str] = {}
        for part in text.split(","):
            letter, _, name = (word.strip() for word in part.partition("="))
            if letter not in _SIDES:
                raise OptionError(
                    f"kv_format '{text}': '{part.strip()}' is neither k=FORMAT nor v=FORMAT; "
                    "write it like k=int8,v=int4"
                )
            if letter in formats:
                raise OptionError(f"kv_format '{text}' gives a format for the {_SIDES[letter]} twice: keep one")
            formats[letter] = name
        for letter, side in _SIDES.items():
            if letter not in formats:
                raise OptionError(f"kv_format '{text}' gives no format for the {side}: add {letter}=FORMAT")
        return cls(formats["k"], formats["v"])

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"k={self.keys},v={self.values}"

    @property
    def quantised_keys(self) -> bool:
        """Whether keys are coded with statics of the model."""
        return self.keys in QUANTISED_FORMATS


@dataclass(frozen=True)
class LayerFormats:
    """How the keys and values of a model's layers are stored: one format, and others for single layers.

    Args:
        default: of all layers but the exceptions.
        exceptions: the formats of single layers, by their indices, ascending.
    """

    default: KVFormat
    exceptions: tuple[tuple[int, KVFormat], ...] = ()

    @classmethod
    def parse(cls, text: str) -> LayerFormats:
        """The formats that a user names: `int4`, or with exceptions by layer, `int4/0-1,29:int8/2:k=int8,v=int4`.

        Raises:
            OptionError: a format is unknown, layers are not numbers, or a layer is named twice.
        """
        if not isinstance(text, str):
            raise OptionError(f"kv_format is {shown(text)}: it must be a text like 'int8'")
        default, *parts = text.split("/")
        exceptions: dict[int, KVFormat] = {}
        for part in parts:
            layers, colon, name = part.partition(":")
            if not colon:
                raise OptionError(f"kv_format '{text}': '{part}' is not LAYERS:FORMAT; write it like int4/0-1,29:int8")
            kv_format = KVFormat.parse(name)
            for layer in _layers(text, layers):
                if layer in exceptions:
                    raise OptionError(f"kv_format '{text}' gives a format for layer {layer} twice: keep one")
                exceptions[layer] = kv_format
        return cls(KVFormat.parse(default), tuple(sorted(exceptions.items())))

    def of(self, num_layers: int) -> tuple[KVFormat, ...]:
        """The format of each of a model's layers.

        Raises:
            OptionError: an exception is made for a layer that the model does not have.
        """
        formats = [self.default] * num_layers
        for layer, kv_format in self.exceptions:
            if layer >= num_layers:
                raise OptionError(
                    f"kv_format '{self._text(self.exceptions)}' names layer {layer}: the model has {num_layers} "
                    f"layers, 0 to {num_layers - 1}"
                )
            formats[layer] = kv_format
        return tuple(formats)

    @property
    def quantised_keys(self) -> bool:
        """Whether any layer's keys are coded with statics of the model."""
        return self.default.quantised_keys or any(kv_format.quantised_keys for _, kv_format in self.exceptions)

    def __str__(self) -> str:
        return self._text((layer, kv_format) for layer, kv_format in self.exceptions if kv_format != self.default)

    def _text(self, exceptions: Iterable[tuple[int, KVFormat]]) -> str:
        by_format: dict[KVFormat, list[int]] = {}
        for layer, kv_format in exceptions:
            by_format.setdefault(kv_format, []).append(layer)
        return "/".join([str(self.default), *(f"{_ranges(layers)}:{name}" for name, layers in by_format.items())])


def check_distinct(formats: Iterable[LayerFormats]) -> tuple[LayerFormats, ...]:
    """The formats, each of which must be there once.

    Raises:
        OptionError: one is there twice, perhaps in other words.
    """
    by_name: dict[str, LayerFormats] = {}
    for kv_format in formats:
        if by_name.setdefault(str(kv_format), kv_format) is not kv_format:
            raise OptionError(f"kv_format {kv_format} is there twice: keep one")
    return tuple(by_name.values())


# A model of more layers than any: so that a slip does not write out millions of numbers.
_MOST_LAYERS = 10_000


def _layers(text: str, layers: str) -> list[int]:
    numbers: list[int] = []
    for part in layers.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part, re.ASCII)
        if match is None:
            raise OptionError(f"kv_format '{text}': '{part}' is no layer: write it like int4/0-1,29:int8")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if not first <= last < _MOST_LAYERS:
            raise OptionError(f"kv_format '{text}': '{part}' is no run of layers: write it like int4/0-1,29:int8")
        numbers += range(first, last + 1)
    return numbers


def _ranges(layers: list[int]) -> str:
    """`[0, 1, 2, 29]` as `0-2,29`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
