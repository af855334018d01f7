"""The Hugging Face configuration that a GGUF file's metadata amounts to."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvist.errors import ModelFileError, UnsupportedModelError, did_you_mean, shown
from kvist.loading.gguf_blocks import dequantise
from kvist.loading.gguf_file import GgufFile
from kvist.loading.untrusted_file import FETCH_AGAIN

# `general.architecture` and the `model_type` and class that run it. Mistral models come as `llama`.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}

# Llama 3.1 (8) and 3.2 (32): the factor; all share the other three numbers.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192

# Gemma 3 27B alone scales its queries by the model dim per head instead of the head dim; nothing in the file says so,
# and llama.cpp tells it by its number of layers too.
_GEMMA3_27B_LAYERS = 62


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.path = gguf.path
        self.metadata = gguf.metadata
        self.architecture = architecture

    def get(self, key: str) -> object:
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, value, "a finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._uniform(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def wrong(self, key: str, value: object, expected: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: {self.architecture}.{key} is {shown(value)}: it must be {expected}; {FETCH_AGAIN}"
        )

    def _uniform(self, key: str, default: object) -> object:
        """The value; of an array with one number per layer the number that all share."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                raise UnsupportedModelError(f"{self.path}: {self.architecture}.{key} differs from layer to layer")
            value = value[0].item()
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.path} has no {self.architecture}.{key}: {FETCH_AGAIN}")
        return value


def hf_config(gguf: GgufFile) -> dict[str, object]:
    """The `config.json` that transformers would have written for this model.

    Raises:
        UnsupportedModelError: an architecture or a feature that no supported `model_type` expresses.
        ModelFileError: keys that are missing or contradict each other.
    """
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{gguf.path} has no general.architecture: is it a language model?")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.path}: architecture {shown(architecture)} is not supported: "
            f"{did_you_mean(architecture[:40], _ARCHITECTURES)}"
        )
    keys = _Keys(gguf, architecture)
    if keys.integer("expert_count", 0):
        raise UnsupportedModelError(f"{gguf.path} is a mixture of experts, which is not supported: only dense models")
    model_type, class_name = _ARCHITECTURES[architecture]
    config: dict[str, object] = {"architectures": [class_name], "model_type": model_type, **_shape(gguf, keys)}
    config["rope_theta"] = keys.number("rope.freq_base", 1e6 if architecture == "gemma3" else 1e4)
    config["rope_scaling"] = _rope_scaling(gguf, keys)
    if architecture == "gemma3":
        config |= _gemma3(keys)
    else:
        config |= _llama_like(gguf, keys)
    return config


def _shape(gguf: GgufFile, keys: _Keys) -> dict[str, object]:
    embeddings = gguf.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ModelFileError(f"{gguf.path} has no matrix token_embd.weight: is it a whole language model?")
    vocab_size = embeddings.shape[0]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise ModelFileError(
            f"{gguf.path}: the vocabulary does not match: {len(tokens)} tokens, but {vocab_size} rows of token_embd; "
            f"{FETCH_AGAIN}"
        )
    num_layers = keys.integer("block_count")
    if num_layers > len(gguf.tensors):
        raise ModelFileError(
            f"{gguf.path} is damaged: {num_layers} layers, but {len(gguf.tensors)} tensors; {FETCH_AGAIN}"
        )
    num_heads, embed_dim = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not num_heads:
        raise keys.wrong("attention.head_count", num_heads, "positive")
    head_dim = keys.integer("attention.key_length", embed_dim // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.integer(key, head_dim)) != head_dim:
            raise UnsupportedModelError(f"{gguf.path}: {keys.architecture}.{key} is {other}, the head dim {head_dim}")
    return {
        "vocab_size": vocab_size,
        "hidden_size": embed_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


def _llama_like(gguf: GgufFile, keys: _Keys) -> dict[str, object]:
    has_bias = "blk.0.attn_q.bias" in gguf.tensors
    config: dict[str, object] = {"hidden_act": "silu"}
    if keys.architecture == "qwen2":
        return config | {"use_sliding_window": False}
    config["attention_bias"] = has_bias
    if keys.architecture == "qwen3":
        return config | {"use_sliding_window": False}
    config["mlp_bias"] = "blk.0.ffn_down.bias" in gguf.tensors
    if window := keys.integer("attention.sliding_window", 0):
        if has_bias:
            raise UnsupportedModelError(f"{gguf.path}: a sliding window together with biases is not supported")
        # Llama itself has no windows; the Mistral models that are written as `llama` have.
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _gemma3(keys: _Keys) -> dict[str, object]:
    num_layers, head_dim = keys.integer("block_count"), keys.integer("attention.key_length", 256)
    config: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1e4),
        "query_pre_attn_scalar": head_dim,
        "head_dim": head_dim,
    }
    if num_layers == _GEMMA3_27B_LAYERS:
        config["query_pre_attn_scalar"] = keys.integer("embedding_length") // keys.integer("attention.head_count")
    if cap := keys.number("final_logit_softcapping", 0.0):
        config["final_logit_softcapping"] = cap
    window = keys.integer("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and len(pattern) == num_layers:
        local = [bool(is_local) for is_local in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", 6)
        local = [bool(period and (layer + 1) % period) for layer in range(num_layers)]
    config["layer_types"] = ["sliding_attention" if window and is_local else "full_attention" for is_local in local]
    if window:
        config["sliding_window"] = window
    return config


def _rope_scaling(gguf: GgufFile, keys: _Keys) -> dict[str, object] | None:
    """What stretches the rope. Kinds that no decoder runs are kept by name, for the decoder to refuse."""
    if any(name.endswith(("rope_factors_long.weight", "rope_factors_short.weight")) for name in gguf.tensors):
        return {"rope_type": "longrope"}
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.text("rope.scaling.type", "linear")
    scaling = None
    if kind not in ("none", "linear"):
        scaling = {"rope_type": kind, "factor": factor}
    elif kind == "linear" and factor not in (0.0, 1.0):
        scaling = {"rope_type": "linear", "factor": factor}
    if "rope_freqs.weight" not in gguf.tensors:
        return scaling
    if scaling is not None:
        raise UnsupportedModelError(f"{gguf.path} has both rope_freqs.weight and rope scaling {shown(kind)}")
    return _llama3_scaling(gguf, keys)


def _llama3_scaling(gguf: GgufFile, keys: _Keys) -> dict[str, object] | None:
    """The Llama 3 parameters whose factors the file stores; it stores the result only."""
    tensor = gguf.tensors["rope_freqs.weight"]
    stored = dequantise(gguf.blocks(tensor), tensor.type.name).ravel()
    if np.all(stored == 1.0):
        return None
    theta = keys.number("rope.freq_base", 1e4)
    for factor in _LLAMA3_FACTORS:
        expected = _llama3_factors(theta, 2 * len(stored), factor)
        if np.allclose(stored, expected, rtol=1e-5, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_ORIGINAL,
            }
    raise UnsupportedModelError(
        f"{gguf.path}: rope_freqs.weight holds a frequency scaling that is neither Llama 3.1's nor Llama 3.2's"
    )


def _llama3_factors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    """What llama.cpp divides each frequency by, `[head_dim / 2]`."""
    wavelengths = 2 * math.pi * np.power(theta, np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors
