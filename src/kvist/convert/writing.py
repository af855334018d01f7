"""Writes a converted checkpoint: its weights layer by layer, and what belongs to a model beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.converted_weights import ConvertedWeights
from kvist.convert.destination import made_aside
from kvist.convert.record import CONVERSION_FILE, Conversion, LayerConversion
from kvist.convert.source import Source, config_with_kv_heads
from kvist.errors import ModelFileError
from kvist.loading.progress import Progress
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.loading.untrusted_file import read_json, write_json
from kvist.loading.weights import fitting_decoder
from kvist.models.registry import decoder_config

# What belongs to a model beside its weights: configurations, tokenizers, templates, licences. Copied as they are.
_KEPT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".md", ".tiktoken")
_KEPT_NAMES = ("LICENSE", "LICENCE", "NOTICE")
_NOT_KEPT = ("config.json", "prepared.json", "adapter_config.json", CONVERSION_FILE)
_INDEX_SUFFIX = ".index.json"  # of weights in one format or another, which are not copied


def write_conversion(
    source: Source,
    target: Path,
    done: Conversion,
    layers: Iterator[tuple[AttentionWeights, LayerConversion | None]],
    stage: str,
    progress: Progress,
) -> Conversion:
    """Write all of a converted checkpoint aside and give it its name.

    Args:
        source: what is converted.
        target: the directory to make.
        done: what is done, less `layers`.
        layers: for each layer its new projections, and what is to be said of them.
        stage: what `progress` is told while layers are made.
        progress: told their bytes, and then those that are copied.

    Returns:
        What was done.

    Raises:
        OptionError: the target cannot be written; what was there is as it was.
        ModelFileError: a file of the source cannot be read; the same.
        NumericsError: new weights are beyond what the source's dtype holds; the same.
    """
    tensors = {tensor.stored_name: tensor for tensor in source.checkpoint.all_stored}
    stored_names = {parameter: source.checkpoint.stored(name).stored_name for parameter, name in source.names.items()}
    shapes = {}
    for layer in range(source.config.num_layers):
        for name, parameter in source.attention_parameters(layer).items():
            stored = tensors[stored_names[parameter]]
            rows = stored.shape[0]
            if name.startswith(("k_proj", "v_proj")):
                rows = done.num_kv_heads * source.config.head_dim
            shapes[stored.stored_name] = (rows, *stored.shape[1:])
    with made_aside(target) as directory:
        _copy_files(source.directory, directory)
        write_json(directory / "config.json", config_with_kv_heads(source.raw_config, done.num_kv_heads))
        records = []
        with ConvertedWeights(directory, tensors, shapes) as weights:
            written = 0
            progress(stage, 0, weights.converted_bytes)
            for layer, (made, record) in enumerate(layers):
                parameters = source.attention_parameters(layer)
                for name, tensor in made.tensors().items():
                    written += weights.write(stored_names[parameters[name]], tensor)
                progress(stage, written, weights.converted_bytes)
                records += [] if record is None else [record]
            weights.copy_others(progress)
        done = replace(done, layers=tuple(records))
        done.write(directory)
        _check(directory)
    return done


def _copy_files(source: Path, directory: Path) -> None:
    for file in sorted(source.iterdir()):
        if not _is_kept(file):
            continue
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error.strerror or error}") from error
        (directory / file.name).write_bytes(data)


def _is_kept(file: Path) -> bool:
    name = file.name
    if name in _NOT_KEPT or name.startswith(".") or name.endswith(_INDEX_SUFFIX):
        return False
    return (file.suffix in _KEPT_SUFFIXES or name.startswith(_KEPT_NAMES)) and file.is_file()


def _check(directory: Path) -> None:
    """See that what was made is a checkpoint that fits its configuration, before it gets its name."""
    config = decoder_config(read_json(directory / "config.json"))
    fitting_decoder(config, SafetensorsCheckpoint(directory), str(directory))
