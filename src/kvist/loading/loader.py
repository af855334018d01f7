"""Loads a model: finds it, prepares it where that is needed, and puts its weights into a decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.config import WEIGHTS_FORMATS, ModelConfig, check_format
from kvist.errors import ModelFileError, UnsupportedModelError, shown
from kvist.loading.end_tokens import end_token_ids
from kvist.loading.prepared import prepared_copy
from kvist.loading.progress import Progress, no_progress
from kvist.loading.resolve import ModelSource, resolve
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.loading.tokenizer import Tokenizer
from kvist.loading.untrusted_file import FETCH_AGAIN, errors_about, read_json
from kvist.loading.weights import WEIGHT_DTYPES, assign_weights, fitting_decoder
from kvist.models.registry import decoder_config

if TYPE_CHECKING:
    from kvist.models.decoder import Decoder

# Beyond the model's vocabulary: a tokenizer that is larger has its next tokens there.
_TOKENS_LOOKED_AT = 256


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        decoder: in evaluation mode; its weights want no gradients and may be mapped from a file.
        source: the directory or the GGUF file that it was loaded from, not its prepared copy. A GGUF file's quantised
            blocks are reached through it: `GgufCheckpoint(GgufFile(source), config).codes(name)`.
        eos_token_ids: the tokens that end a text.
        weights_bytes: of all parameters, tied ones once.
    """

    name: str
    source: Path
    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    weights_format: str
    weights_bytes: int


def load(
    model: str | os.PathLike[str], weights_format: str = "bf16", *, progress: Progress | None = None
) -> LoadedModel:
    """Load a model.

    Args:
        model: a directory in Hugging Face format, a `.gguf` file, a demo model's name or a Hub id.
        weights_format: one of `WEIGHTS_FORMATS`.
        progress: told how far fetching and preparing are.

    Raises:
        ModelNotFoundError: nothing goes by this name.
        ModelFileError: its files are damaged or do not fit together.
        UnsupportedModelError: its architecture or a feature of it is not run.
        DownloadError: it could not be fetched.
    """
    check_format("weights_format", weights_format, WEIGHTS_FORMATS)
    progress = progress or no_progress
    source = resolve(model, progress)
    directory = prepared_copy(source.path, weights_format, progress) if source.is_gguf else source.path
    return _load_directory(directory, source, weights_format)


def _load_directory(directory: Path, source: ModelSource, weights_format: str) -> LoadedModel:
    raw = read_json(directory / "config.json")
    with errors_about(directory / "config.json"):
        _refuse_quantised(raw)
        config = decoder_config(raw)
    checkpoint = SafetensorsCheckpoint(directory)
    decoder, names = fitting_decoder(config, checkpoint, str(directory))
    tokenizer = Tokenizer.from_directory(directory)
    _check_vocabulary(directory, tokenizer, config)
    return LoadedModel(
        name=source.name,
        source=source.path.absolute(),
        decoder=decoder.eval(),
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(directory, raw, tokenizer.eos_token_id),
        weights_format=weights_format,
        weights_bytes=assign_weights(decoder, checkpoint, names, WEIGHT_DTYPES[weights_format]),
    )


def _check_vocabulary(directory: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuse a tokenizer that belongs to another model.

    Special tokens may lie beyond the model's vocabulary, as Gemma 3's placeholder for an image does in its text-only
    models; decoding leaves them out.
    """
    with errors_about(directory / "tokenizer.json"):
        beyond = tokenizer.decode(range(config.vocab_size, config.vocab_size + _TOKENS_LOOKED_AT))
    if beyond:
        raise ModelFileError(
            f"{directory}: the vocabulary does not match: the tokenizer has {tokenizer.vocab_size} tokens, the model "
            f"{config.vocab_size}; {FETCH_AGAIN}"
        )


def _refuse_quantised(raw: Mapping[str, object]) -> None:
    quantisation = raw.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModelError(
            f"the weights are quantised with {shown(method)}: weights in F32, F16 and BF16 are read, and GGUF files"
        )
