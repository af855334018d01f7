"""Which file runs which `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvist.config import ModelConfig
from kvist.errors import ModelFileError, UnsupportedModelError, did_you_mean, shown
from kvist.models import gemma3, llama, mistral, qwen2, qwen3
from kvist.models.decoder import Decoder

_CONFIGS: dict[str, Callable[[Mapping[str, object]], ModelConfig]] = {
    "llama": llama.config,
    "mistral": mistral.config,
    "qwen2": qwen2.config,
    "qwen3": qwen3.config,
    "gemma3": gemma3.config,
    "gemma3_text": gemma3.config,
}


def decoder_config(raw: Mapping[str, object]) -> ModelConfig:
    """The configuration of a decoder from a Hugging Face `config.json`; refuses what it does not run by name."""
    model_type = raw.get("model_type")
    if model_type is None:
        raise ModelFileError("there is no model_type: take the directory of a language model")
    if not isinstance(model_type, str):
        raise ModelFileError(f"model_type is {shown(model_type)}: it must be a text like 'llama'")
    if model_type not in _CONFIGS:
        raise UnsupportedModelError(
            f"architecture {shown(model_type)} is not supported: {did_you_mean(model_type, list(_CONFIGS))}"
        )
    return _CONFIGS[model_type](raw)


def build_decoder(config: ModelConfig) -> Decoder:
    """A decoder with uninitialised weights; build it under `torch.device("meta")` to allocate none."""
    match config:
        case gemma3.Gemma3Config():
            return gemma3.Gemma3Decoder(config)
        case llama.LlamaConfig():
            return llama.LlamaDecoder(config)
        case _:
            raise UnsupportedModelError(f"no decoder is known for a {type(config).__name__}")
