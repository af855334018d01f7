"""What a conversion did: the file `conversion.json` beside the weights that it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from kvist.loading.untrusted_file import read_json, write_json

CONVERSION_FILE = "conversion.json"


@dataclass(frozen=True)
class LayerConversion:
    """What became of a layer's heads.

    Attributes:
        groups: the source's KV heads that became each of the new ones.
        missed: the share of the square of its attention's output that it misses on the calibration text.
    """

    groups: tuple[tuple[int, ...], ...]
    missed: float


@dataclass(frozen=True)
class Conversion:
    """What was done.

    Attributes:
        conversion: `gqa` or `expand`.
        source: what the source goes by.
        source_hash: of its weights and configuration; of a GGUF file, of the whole file.
        model_type, num_heads: of both.
        source_num_kv_heads, num_kv_heads: before and after.
        method: how heads were merged; None for `expand`.
        calibration: the text, and how much of it; None where no method looked at one.
        layers: what became of each, where a method looked at them.
        earlier: what the source's own `conversion.json` says, where it has one.
    """

    conversion: str
    source: str
    source_hash: str
    model_type: str
    num_heads: int
    source_num_kv_heads: int
    num_kv_heads: int
    method: str | None = None
    calibration: Mapping[str, object] | None = None
    layers: tuple[LayerConversion, ...] = ()
    earlier: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """The same as plain values, with Kvist's version; what there is none of is left out."""
        fields = {"kvist": version("kvist"), **_without_none(asdict(self))}
        fields["layers"] = [_without_none(asdict(layer)) for layer in self.layers]
        return fields if self.layers else {name: value for name, value in fields.items() if name != "layers"}

    def write(self, directory: Path) -> None:
        write_json(directory / CONVERSION_FILE, self.as_json())


def earlier_conversion(directory: Path) -> Mapping[str, object] | None:
    """What a checkpoint's own `conversion.json` says; None where it has none.

    Raises:
        ModelFileError: it is damaged.
    """
    path = directory / CONVERSION_FILE
    return read_json(path) if path.is_file() else None


def _without_none(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
