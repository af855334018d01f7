"""Reads a Hugging Face `config.json`, which is untrusted: every field is checked for its kind and range."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypedDict

from kvist.config import LinearRopeScaling, Llama3RopeScaling, RopeConfig
from kvist.errors import ModelFileError, UnsupportedModelError, shown

# Above every model that exists, low enough that a lying file cannot make us build lists or modules without end.
_MOST = 2**31
_MOST_LAYERS = 10_000


class ConfigFields:
    """Typed access to the fields of a configuration; errors name the field, what it holds and what it must
    be; whoever knows the file puts its name before.
    """

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number in a range; without a default the field must be there."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelFileError(f"{name} is {shown(value)}: it must be a whole number between {least} and {most}")
        return value

    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", most=_MOST_LAYERS)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; without a default the field must be there."""
        value = self._value(name, default)
        # A whole number may be beyond every float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ModelFileError(f"{name} is {shown(value)}: it must be a positive number")
        return float(value)

    def optional_integer(self, name: str) -> int | None:
        return None if self.raw.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        return None if self.raw.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{name} is {shown(value)}: it must be true or false")
        return value

    def section(self, name: str) -> Mapping[str, object] | None:
        """A nested object; None where it is absent or null."""
        value = self.raw.get(name)
        if value is None or isinstance(value, Mapping):
            return value
        raise ModelFileError(f"{name} is {shown(value)}: it must be an object")

    def require(self, name: str, supported: str, default: str) -> None:
        """Refuse a feature by name unless the field holds the one value that is supported."""
        value = self._value(name, default)
        if value != supported:
            raise UnsupportedModelError(f"{name} is {shown(value)}: only {supported!r} is supported")

    def rope(self, section: Mapping[str, object] | None, theta: float) -> RopeConfig:
        """The rope of a `rope_parameters` or `rope_scaling` section; `theta` is the base where that names none."""
        if section is None:
            return RopeConfig(theta)
        fields = ConfigFields(section)
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError("partial_rotary_factor is not 1: partial rope is not supported")
        theta = fields.number("rope_theta", theta)
        kind = section.get("rope_type", section.get("type")) or "default"
        match kind:
            case "default":
                return RopeConfig(theta)
            case "linear":
                return RopeConfig(theta, LinearRopeScaling(fields.number("factor")))
            case "llama3":
                original = fields.integer(
                    "original_max_position_embeddings", self.integer("max_position_embeddings", 2048)
                )
                low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
                if low >= high:
                    raise ModelFileError("low_freq_factor of the rope must be below high_freq_factor")
                return RopeConfig(theta, Llama3RopeScaling(fields.number("factor"), low, high, original))
            case _:
                raise UnsupportedModelError(
                    f"rope type {shown(kind)} is not supported: Kvist runs 'default', 'linear' and 'llama3'"
                )

    def one_rope(self) -> RopeConfig:
        """The rope of a model whose layers share it, in the fields of transformers 5 or of older ones."""
        self.number("partial_rotary_factor", 1.0)
        section = self.section("rope_parameters") or self.section("rope_scaling")
        if self.raw.get("partial_rotary_factor") is not None:
            section = {"partial_rotary_factor": self.raw["partial_rotary_factor"], **(section or {})}
        return self.rope(section, self.number("rope_theta", 10_000.0))

    def layer_windows(self, num_layers: int, window: int | None, default_types: list[str]) -> tuple[int | None, ...]:
        """A window per layer from `layer_types`, or from `default_types` where the file has none."""
        types = self.raw.get("layer_types")
        types = default_types if types is None else types
        if not isinstance(types, list) or len(types) != num_layers:
            raise ModelFileError(f"layer_types must list {num_layers} layers")
        known = {"full_attention": None, "sliding_attention": window}
        for kind in types:
            if not isinstance(kind, str) or kind not in known:
                raise UnsupportedModelError(f"layer type {shown(kind)} is not supported: known: {', '.join(known)}")
        if window is None and "sliding_attention" in types:
            raise ModelFileError("layer_types has sliding_attention layers, but sliding_window is missing")
        return tuple(known[kind] for kind in types)

    def _value(self, name: str, default: object) -> object:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"there is no {name}: fetch the model again")
        return value


class ShapeFields(TypedDict):
    """The sizes that every family names alike, as arguments of `ModelConfig`."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def shape_fields(fields: ConfigFields, *, head_dim: int | None = None) -> ShapeFields:
    """The sizes from a `config.json`; `head_dim` is the family's default, else it follows from the model dim."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    embed_dim = fields.integer("hidden_size")
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: it must divide them")
    head_dim = fields.integer("head_dim", head_dim or max(1, embed_dim // num_heads))
    if head_dim % 2:
        raise ModelFileError(f"head_dim is {head_dim}: rope needs an even one")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "embed_dim": embed_dim,
        "mlp_dim": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
