"""What the cache of a model must hold, from the `config.json` of any decoder, also of one that Kvist does not run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvist.config import LayerConfig, ModelConfig
from kvist.errors import ModelFileError, UnsupportedModelError, shown
from kvist.models.config_fields import ConfigFields
from kvist.models.registry import decoder_config

# Where multimodal models keep the fields of their decoder.
_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")

# What the same number is called in configurations of different families.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads", "num_attention_groups")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_EMBED_DIM = ("hidden_size", "n_embd", "n_embed", "d_model")
_MAX_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")

# Fields which mean, where they are set, that the cache is not keys and values of each layer alike.
_STATE = "layers that keep a state of fixed size instead of keys and values"
_OTHER_CACHES = {
    "kv_lora_rank": "multi-head latent attention (MLA), which keeps one compressed vector for all heads",
    "compress_rates": "attention over compressed tokens",
    "compress_ratios": "attention over compressed tokens",
    "is_encoder_decoder": "an encoder beside the decoder, with a cache of its own",
    "attention_chunk_size": "attention in chunks",
    "attention_types": "attention that is local in some layers",
    "num_kv_shared_layers": "layers that share keys and values",
    "kv_source_layers": "layers that share keys and values",
    "use_cla": "layers that share keys and values",
    "global_head_dim": "head dims that differ between layers",
    "swa_head_dim": "head dims that differ between layers",
    "num_global_key_value_heads": "KV heads that differ between layers",
    "swa_num_key_value_heads": "KV heads that differ between layers",
    "block_configs": "layers that differ from each other",
    "per_layer_config": "layers that differ from each other",
    "attn_layer_period": _STATE,
    "attn_layer_indices": _STATE,
    "layers_block_type": _STATE,
    "block_types": _STATE,
    "hybrid_override_pattern": _STATE,
    "full_attn_idxs": _STATE,
    "conv_L_cache": _STATE,
    "state_size": _STATE,
    "mamba_d_state": _STATE,
    "ssm_state_size": _STATE,
    "linear_num_key_heads": _STATE,
    "linear_attn_config": _STATE,
}

# Families whose files give a window, but not which layers have it.
_WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2")
_WINDOW_PATTERNS = {"gemma2": 2}


@dataclass(frozen=True)
class CacheShape:
    """What the cache must hold, and what is known of the model around it.

    Attributes:
        model_type: the model's family, as its configuration names it.
        num_heads: query heads of a layer.
        layers: the shape of each layer's cache.
        max_context: the most tokens of a sequence; None where the file does not say.
        config: the whole configuration; None where Kvist does not run the model.
        notes: what a person should know of how it was read, a sentence each.
    """

    model_type: str
    num_heads: int
    layers: tuple[LayerConfig, ...]
    max_context: int | None
    config: ModelConfig | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].num_kv_heads

    def with_kv_heads(self, num_kv_heads: int) -> CacheShape:
        """The same model with another number of KV heads."""
        return replace(self, layers=tuple(replace(layer, num_kv_heads=num_kv_heads) for layer in self.layers))

    def head_variants(self) -> tuple[int, ...]:
        """Numbers of KV heads that the query heads could share, descending: from one each (MHA) to one for all (MQA).

        The model's own is among them, and a number between it and either end where there is one.
        """
        own, most = self.num_kv_heads, self.num_heads
        numbers = _divisors(most)
        between = (*_halfway(own, most, numbers), *_halfway(1, own, numbers))
        return tuple(sorted({1, own, most, *between}, reverse=True))


def attention_kind(num_heads: int, num_kv_heads: int) -> str:
    """MHA, GQA or MQA; one head of each is MHA."""
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def cache_shape(raw: Mapping[str, object]) -> CacheShape:
    """The shape of a model's cache from a Hugging Face `config.json`.

    What Kvist does not run is read by the fields that most families share, and `notes` say so.

    Raises:
        ModelFileError: a field is missing, or has a value that cannot be.
        UnsupportedModelError: the cache is not one of keys and values per head: it is not planned.
    """
    try:
        config = decoder_config(raw)
    except (ModelFileError, UnsupportedModelError) as error:
        if isinstance(error, ModelFileError) and raw.get("model_type") is not None:
            raise
        return _common_shape(raw, f"Kvist does not run this model, it only plans its cache: {error}")
    return CacheShape(config.model_type, config.num_heads, config.layers, config.max_context, config)


def _common_shape(raw: Mapping[str, object], note: str) -> CacheShape:
    fields = _decoder_fields(ConfigFields(raw))
    kinds = fields.raw.get("layer_types")
    dense = isinstance(kinds, list) and set(map(str, kinds)) == {"attention"}  # of a hybrid family, without a state
    if isinstance(kinds, list) and dense:
        fields = ConfigFields({**fields.raw, "layer_types": ["full_attention"] * len(kinds)})
    for name, meaning in _OTHER_CACHES.items():
        if fields.raw.get(name) and not (dense and meaning is _STATE):
            raise _other_cache(name, fields.raw[name], meaning)
    kinds = fields.raw.get("attn_type_list")  # MiniMax: 1 is softmax attention
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, kinds)) == {"1"}):
        raise _other_cache("attn_type_list", kinds, _STATE)
    model_type = fields.raw.get("model_type")
    num_layers = _integer(fields, _NUM_LAYERS, most=10_000)
    num_heads = _integer(fields, _NUM_HEADS)
    num_kv_heads = _kv_heads(fields, num_heads)
    head_dim = _optional_integer(fields, _HEAD_DIM) or max(1, _integer(fields, _EMBED_DIM) // num_heads)
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: it must divide them")
    if (value_dim := fields.optional_integer("v_head_dim")) not in (None, head_dim):
        raise UnsupportedModelError(f"v_head_dim is {value_dim}, the head dim {head_dim}: such a cache is not planned")
    windows, unknown = _windows(fields, str(model_type), num_layers)
    return CacheShape(
        model_type=str(model_type or "unknown"),
        num_heads=num_heads,
        layers=tuple(LayerConfig(num_kv_heads, head_dim, window) for window in windows),
        max_context=_optional_integer(fields, _MAX_CONTEXT),
        notes=(note, *_encoder(fields), *unknown),
    )


def _encoder(fields: ConfigFields) -> tuple[str, ...]:
    """What is to be said of a model that fills gaps in whole texts, as BERT does."""
    named = fields.raw.get("architectures")
    for name in named if isinstance(named, list) else ():
        if str(name).endswith("ForMaskedLM"):
            return (f"architectures names {shown(name)}, an encoder: it takes a text at once and keeps no cache",)
    return ()


def _other_cache(name: str, value: object, meaning: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} is {shown(value)}, which means {meaning}: such a cache is not planned")


def _decoder_fields(fields: ConfigFields) -> ConfigFields:
    """Those of the decoder in a multimodal model, which may be several sections down."""
    for name in _SECTIONS:
        section = fields.section(name)
        if section is not None:
            return _decoder_fields(ConfigFields(section))
    # MPT and DBRX have a section for attention.
    attention = fields.raw.get("attn_config")
    return ConfigFields({**attention, **fields.raw}) if isinstance(attention, Mapping) else fields


def _kv_heads(fields: ConfigFields, num_heads: int) -> int:
    # Falcon's later design gives the number, and still says multi_query.
    if fields.flag("multi_query", False) and not fields.flag("new_decoder_architecture", False):
        return 1
    if fields.raw.get("attn_type") == "multiquery_attention":  # MPT
        return 1
    return _optional_integer(fields, _NUM_KV_HEADS) or num_heads


def _windows(fields: ConfigFields, model_type: str, num_layers: int) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """A window for each layer, and what is to be said about it."""
    window = _optional_integer(fields, ("sliding_window",), least=0) or None  # some files have 0 for none
    if fields.raw.get("layer_types") is not None:
        return fields.layer_windows(num_layers, window, []), ()
    if window is None or not fields.flag("use_sliding_window", True):
        return (None,) * num_layers, ()
    pattern = fields.raw.get("sliding_window_pattern", _WINDOW_PATTERNS.get(model_type))
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1:
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers)), ()
    if model_type in _WINDOW_IN_EVERY_LAYER:
        return (window,) * num_layers, ()
    return (None,) * num_layers, (
        f"sliding_window is {window:,}, but nothing says which layers have it: all are planned without, at the most",
    )


def _optional_integer(fields: ConfigFields, names: tuple[str, ...], **bounds: int) -> int | None:
    """The number under the first of the names that is there."""
    for name in names:
        if fields.raw.get(name) is not None:
            return fields.integer(name, **bounds)
    return None


def _integer(fields: ConfigFields, names: tuple[str, ...], **bounds: int) -> int:
    value = _optional_integer(fields, names, **bounds)
    if value is None:
        raise ModelFileError(f"there is no {names[0]}: a cache cannot be planned without it")
    return value


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in small)]


def _halfway(low: int, high: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """Of the numbers between two the one that lies best between them, by ratio; none where there is none."""
    middle = low * high
    inside = [number for number in numbers if low < number < high]
    nearest = min(
        inside,
        key=lambda number: (max(number * number, middle) / min(number * number, middle), -number),
        default=None,
    )
    return () if nearest is None else (nearest,)
