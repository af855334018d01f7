"""Loads a model: finds it, prepares it where that is needed, and puts its weights into a decoder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvist.config import WEIGHTS_FORMATS, ModelConfig, check_format
from kvist.errors import ModelFileError, UnsupportedModelError, shown
from kvist.kernels.plain_linear import bf16_rows_keep_their_bits
from kvist.loading.end_tokens import end_token_ids
from kvist.loading.fingerprint import FilesHash, model_fingerprint
from kvist.loading.gguf_file import GgufFile
from kvist.loading.planned_weights import format_of_gguf, refuse_gguf
from kvist.loading.prepared import loaded_copy, prepared_copy, prepared_weights, source_hash
from kvist.loading.progress import Progress, no_progress
from kvist.loading.quantised_weights import read_packed, write_weights
from kvist.loading.resolve import ModelSource, resolve
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.loading.tokenizer import Tokenizer
from kvist.loading.untrusted_file import FETCH_AGAIN, errors_about, read_json
from kvist.loading.weights import assign_weights, fitting_decoder
from kvist.loading.weights_plan import WEIGHT_DTYPES, stored_plan, unfitting, weights_plan
from kvist.models.matrices import is_native
from kvist.models.registry import decoder_config

if TYPE_CHECKING:
    from kvist.kernels.key_statics import KeyStatics
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
        bf16_matrices: those that stay in bf16 because `weights_format` does not fit them: their columns are no multiple
            of 32.
        files_hash: of the files that the weights come from.
    """

    name: str
    source: Path
    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    weights_format: str
    weights_bytes: int
    bf16_matrices: tuple[str, ...]
    files_hash: FilesHash

    @property
    def why_bits_differ(self) -> str | None:
        """Why the last bits of a token's logits depend on how its context was computed; None where they do not."""
        differ = "the last bits of a token's logits depend on what is computed beside it"
        if self.weights_format == "fp32":
            return f"with fp32 weights {differ}"
        in_pytorch = any(
            weight.dim() == 2 and weight.dtype == torch.bfloat16 and not is_native(weight)
            for weight in self.decoder.parameters()
        )
        if in_pytorch and self.decoder.device.type == "cpu" and not bf16_rows_keep_their_bits():
            return f"PyTorch's products in bf16 round a row otherwise among others on this machine: {differ}"
        return None

    def key_statics(self, progress: Progress | None = None) -> tuple[KeyStatics, ...]:
        """What the quantised keys of each layer are coded with: the same bits whenever it is asked for.

        The first time the model is run over a text of 2,048 tokens, which takes seconds, or minutes where the model is
        large; what it gives is kept in the cache folder. Where that cannot be written, a `RuntimeWarning` says so.

        Args:
            progress: told how far reading the model's files and running it are.

        Raises:
            OptionError: the model's context is too short to tell.
            NumericsError: the model gives keys that are not numbers.
            ModelFileError: its files cannot be read any more.
        """
        # The native library is not needed before keys are quantised.
        from kvist.loading.key_calibration import calibrate, calibration_ids, recipe_hash
        from kvist.loading.statics_file import kept_statics

        progress = progress or no_progress
        # The tokenizer decides which tokens the text is, and is no part of the name: what is fitted to other tokens of
        # the same text serves the same weights.
        return kept_statics(
            f"{self.fingerprint(progress=progress)}-{recipe_hash()}",
            self.config.layers,
            lambda: calibrate(self.decoder, calibration_ids(self.tokenizer, self.config), progress),
            progress,
        )

    def fingerprint(self, key_statics: Sequence[KeyStatics] | None = None, *, progress: Progress | None = None) -> str:
        """A text that differs where the same tokens may have other keys and values in a cache.

        Args:
            key_statics: what the cache's keys are coded with; None where none are quantised.
            progress: told how far reading the model's files is, which happens once while they stay as they are.
        """
        return model_fingerprint(self.files_hash.get(progress or no_progress), self.weights_format, key_statics)


def load(
    model: str | os.PathLike[str], weights_format: str | None = None, *, progress: Progress | None = None
) -> LoadedModel:
    """Load a model.

    Args:
        model: a directory in Hugging Face format, a `.gguf` file, a demo model's name or a Hub id.
        weights_format: one of `WEIGHTS_FORMATS`; by default what a GGUF file holds, `gguf` where that is quantised, and
            `bf16` for all others. Weights are brought into it once and kept in the cache folder.
        progress: told how far fetching and preparing are.

    Raises:
        OptionError: the format is unknown, or is not one for such a model.
        ModelNotFoundError: nothing goes by this name.
        ModelFileError: its files are damaged or do not fit together.
        UnsupportedModelError: its architecture or a feature of it is not run.
        DownloadError: it could not be fetched.
    """
    if weights_format is not None:
        check_format("weights_format", weights_format, WEIGHTS_FORMATS)
    progress = progress or no_progress
    source = resolve(model, progress)
    if source.is_gguf:
        weights_format = weights_format or format_of_gguf(GgufFile(source.path))
        return loaded_copy(
            partial(prepared_copy, source.path, weights_format, progress),
            partial(_load_directory, source=source, weights_format=weights_format, progress=progress),
        )
    if weights_format == "gguf":
        raise refuse_gguf(source.name)
    return _load_directory(source.path, source, weights_format or "bf16", progress)


@dataclass(frozen=True)
class _Weights:
    """A directory's weights, and a decoder that they fit and that has none yet."""

    checkpoint: SafetensorsCheckpoint
    packed: dict[str, str]
    decoder: Decoder
    names: dict[str, str]

    @classmethod
    def of(cls, directory: Path, config: ModelConfig) -> _Weights:
        checkpoint, packed = SafetensorsCheckpoint(directory), read_packed(directory)
        return cls(checkpoint, packed, *fitting_decoder(config, checkpoint, str(directory), packed))

    def assign(self, weights_format: str) -> tuple[int, tuple[str, ...]]:
        """Give the decoder its weights; returns their bytes, and the matrices that the format does not fit."""
        if weights_format in WEIGHT_DTYPES:
            plan = weights_plan(self.decoder, weights_format)
            return assign_weights(self.decoder, self.checkpoint, self.names, plan), ()
        plan = stored_plan(self.decoder, self.names, self.packed)
        return assign_weights(self.decoder, self.checkpoint, self.names, plan), unfitting(plan)


def _load_directory(directory: Path, source: ModelSource, weights_format: str, progress: Progress) -> LoadedModel:
    raw = read_json(directory / "config.json")
    with errors_about(directory / "config.json"):
        refuse_quantised(raw)
        config = decoder_config(raw)
    weights = _Weights.of(directory, config)
    tokenizer = Tokenizer.from_directory(directory)
    _check_vocabulary(directory, tokenizer, config)
    files_hash = FilesHash(
        (directory / "config.json", *weights.checkpoint.files), source_hash(directory) if source.is_gguf else None
    )
    if weights_format not in WEIGHT_DTYPES and not source.is_gguf:
        weights = loaded_copy(
            partial(_quantised_copy, weights, source, files_hash.get(progress), weights_format, progress),
            partial(_Weights.of, config=config),
        )
    weights_bytes, bf16_matrices = weights.assign(weights_format)
    return LoadedModel(
        name=source.name,
        source=source.path.absolute(),
        weights_bytes=weights_bytes,
        bf16_matrices=bf16_matrices,
        decoder=weights.decoder.eval(),
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(directory, raw, tokenizer.eos_token_id),
        weights_format=weights_format,
        files_hash=files_hash,
    )


def _quantised_copy(
    weights: _Weights, source: ModelSource, files_hash: str, weights_format: str, progress: Progress
) -> Path:
    """The directory with the quantised weights of one in Hugging Face format."""

    def make(directory: Path) -> None:
        plan = weights_plan(weights.decoder, weights_format)
        write_weights(directory, weights.checkpoint, weights.names, plan, f"preparing {source.name}", progress)

    return prepared_weights(source.name, files_hash, weights_format, make, progress)


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


def refuse_quantised(raw: Mapping[str, object]) -> None:
    """Raise `UnsupportedModelError` for the `config.json` of weights that another library has quantised."""
    quantisation = raw.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModelError(
            f"the weights are quantised with {shown(method)}: weights in F32, F16 and BF16 are read, and GGUF files"
        )
