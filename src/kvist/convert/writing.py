"""Writes a converted checkpoint: its weights layer by layer, and what belongs to a model beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.converted_weights import ConvertedWeights
from kvist.convert.destination import Destination
from kvist.convert.model_files import carried_files
from kvist.convert.record import Conversion, LayerConversion
from kvist.convert.source import Source, config_with_kv_heads
from kvist.errors import ModelFileError
from kvist.loading.progress import Progress
from kvist.loading.safetensors_checkpoint import SafetensorsCheckpoint
from kvist.loading.untrusted_file import read_json, write_json
from kvist.loading.weights import fitting_decoder
from kvist.models.registry import decoder_config


def write_conversion(
    source: Source,
    destination: Destination,
    done: Conversion,
    layers: Iterator[tuple[AttentionWeights, LayerConversion | None]],
    stage: str,
    progress: Progress,
) -> Conversion:
    """Write all of a converted checkpoint aside and give it its name.

    Args:
        source: what is converted.
        destination: the directory to make.
        done: what is done, less `layers`.
        layers: for each layer its new projections, and what is to be said of them.
        stage: what `progress` is told while layers are made.
        progress: told their bytes, and then those that are copied.

    Returns:
        What was done.

    Raises:
        OptionError: the destination cannot be written, or now may not be replaced; what was there is as it was.
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
    with destination.made_aside(source.directory) as directory:
        _copy_files(source.directory, directory)
        write_json(directory / "config.json", config_with_kv_heads(source.raw_config, done.num_kv_heads))
        records = []
        advice = "store the source in a wider dtype, or merge by the method mean"
        with ConvertedWeights(directory, tensors, shapes, advice=advice) as weights:
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
    for file in carried_files(source):
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{file} cannot be read: {error.strerror or error}") from error
        (directory / file.name).write_bytes(data)


def _check(directory: Path) -> None:
    """See that what was made is a checkpoint that fits its configuration, before it gets its name."""
    config = decoder_config(read_json(directory / "config.json"))
    fitting_decoder(config, SafetensorsCheckpoint(directory), str(directory))
