"""The checkpoint that is converted, before any of its weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvist.config import ModelConfig, check_format
from kvist.convert.attention_weights import AttentionWeights
from kvist.errors import ModelFileError, NumericsError, OptionError, UnsupportedModelError
from kvist.loading.checkpoint import PLAIN_DTYPES
from kvist.loading.fingerprint import FilesHash
from kvist.loading.loader import refuse_quantised
from kvist.loading.prepared import prepared_copy, source_hash
from kvist.loading.progress import Progress
from kvist.loading.quantised_weights import PACKED
from kvist.loading.resolve import resolve
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.loading.untrusted_file import errors_about, read_json
from kvist.loading.weights import fitting_decoder
from kvist.loading.weights_plan import WEIGHT_DTYPES
from kvist.models.decoder import Decoder
from kvist.models.registry import decoder_config


@dataclass(frozen=True)
class Source:
    """A checkpoint in Hugging Face format.

    Attributes:
        name: what the model goes by.
        path: the directory or GGUF file that was named.
        directory: in Hugging Face format; the prepared copy of a GGUF file.
        raw_config: the fields of its `config.json`.
        config: what they say.
        checkpoint: its tensors.
        decoder: what they fit, without memory for any.
        names: the checkpoint's tensor for each of the decoder's parameters.
    """

    name: str
    path: Path
    directory: Path
    raw_config: Mapping[str, object]
    config: ModelConfig
    checkpoint: SafetensorsCheckpoint
    decoder: Decoder
    names: Mapping[str, str]

    @classmethod
    def open(cls, model: str | os.PathLike[str], weights_format: str | None, progress: Progress) -> Source:
        """Find a model and see that its files fit its configuration.

        Args:
            model: a directory in Hugging Face format, a `.gguf` file, a demo model's name or a Hub id.
            weights_format: what a GGUF file is de-quantised to, `bf16` or `fp32`; None for bf16.
            progress: told how far fetching and preparing are.

        Raises:
            OptionError: a format is given for a model that has one.
            KvistError: as `kvist.loading.load`.
        """
        if weights_format is not None:
            check_format("weights_format", weights_format, tuple(WEIGHT_DTYPES))
        source = resolve(model, progress)
        if source.is_gguf:
            directory = prepared_copy(source.path, weights_format or "bf16", progress)
        elif weights_format is None:
            directory = source.path
        else:
            raise OptionError(
                f"weights_format is {weights_format}, and {source.name} is no GGUF file: its weights stay as they are "
                "stored; leave it out"
            )
        raw_config = read_json(directory / "config.json")
        with errors_about(directory / "config.json"):
            refuse_quantised(raw_config)
            config = decoder_config(raw_config)
        if (directory / PACKED).exists():
            raise UnsupportedModelError(f"{directory} holds packed weights, which are not converted: take their source")
        checkpoint = SafetensorsCheckpoint(directory)
        decoder, names = fitting_decoder(config, checkpoint, str(directory))
        return cls(source.name, source.path, directory, raw_config, config, checkpoint, decoder, names)

    def stored_dtype(self, parameter: str) -> torch.dtype:
        """Of a parameter, in its file.

        Raises:
            UnsupportedModelError: it is none that is converted.
        """
        stored = self.checkpoint.stored(self.names[parameter])
        if stored.dtype not in PLAIN_DTYPES:
            raise UnsupportedModelError(
                f"{stored.file}: {stored.stored_name} is stored as {stored.dtype}: converted are "
                f"{', '.join(PLAIN_DTYPES)}"
            )
        return PLAIN_DTYPES[stored.dtype]

    def read(self, parameter: str) -> torch.Tensor:
        """A parameter in the dtype of its file."""
        return self.checkpoint.read(self.names[parameter], self.stored_dtype(parameter))

    def attention_parameters(self, layer: int) -> dict[str, str]:
        """The parameters that a conversion changes, by their names in a layer's attention."""
        prefix = f"layers.{layer}.self_attn."
        names = [f"{side}_proj.{kind}" for side in "qkv" for kind in ("weight", "bias")]
        return {name: prefix + name for name in (*names, "o_proj.weight") if prefix + name in self.names}

    def attention_weights(self, layer: int) -> AttentionWeights:
        """A layer's projections as they are stored.

        Raises:
            NumericsError: some are not numbers.
        """
        tensors = {name: self.read(parameter) for name, parameter in self.attention_parameters(layer).items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise NumericsError(
                    f"{self.name}: layer {layer}'s {name} holds values that are not finite numbers: nothing can be "
                    "made of them; fetch the model again"
                )
        return AttentionWeights.from_tensors(tensors, self.config.head_dim)

    def files_hash(self, progress: Progress) -> str:
        """Of weights and configuration; of a GGUF file, of the whole file. As `LoadedModel` has it."""
        known = source_hash(self.directory) if self.path.is_file() else None
        return FilesHash((self.directory / "config.json", *self.checkpoint.files), known).get(progress)

    def as_stored(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """A layer's new projections as they will be read again: rounded to their dtypes in the files, in float32."""
        parameters = self.attention_parameters(layer)
        rounded = {
            name: tensor.to(self.stored_dtype(parameters[name])).float() for name, tensor in weights.tensors().items()
        }
        return AttentionWeights.from_tensors(rounded, self.config.head_dim)

    def check_can_merge(self, num_kv_heads: int) -> None:
        """Raise `OptionError` unless the KV heads can be merged into so many."""
        own = self.config.num_kv_heads
        possible = [number for number in range(1, own) if own % number == 0]
        has = f"{self.name} has {own} KV head{'s' * (own != 1)} for {self.config.num_heads} query heads"
        if not possible:
            raise OptionError(f"kv_heads is {num_kv_heads}: {has}, and there are none to merge")
        would_do = ", ".join(map(str, possible))
        if num_kv_heads == own:
            raise OptionError(f"kv_heads is {num_kv_heads}, and {has}: there is nothing to merge; take {would_do}")
        if num_kv_heads > own:
            raise OptionError(
                f"kv_heads is {num_kv_heads}: {has}, and merging makes fewer: take {would_do} "
                "(`kvist convert expand` makes more)"
            )
        if num_kv_heads not in possible:
            raise OptionError(f"kv_heads is {num_kv_heads}: {has}, which it does not divide: take {would_do}")


def config_with_kv_heads(raw_config: Mapping[str, object], num_kv_heads: int) -> dict[str, object]:
    """The fields of a `config.json`, with another number of KV heads where the decoder's are.

    Raises:
        ModelFileError: its section for the decoder is none.
    """
    if raw_config.get("text_config") is None:
        return {**raw_config, "num_key_value_heads": num_kv_heads}
    section = raw_config["text_config"]
    if not isinstance(section, Mapping):
        raise ModelFileError("text_config is no object: fetch the model again")
    return {**raw_config, "text_config": {**section, "num_key_value_heads": num_kv_heads}}
