"""`to_gqa` and `expand`: a checkpoint in Hugging Face format with another number of KV heads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvist.convert.aligning import align_and_merge
from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.calibration import layers_on_text
from kvist.convert.destination import Destination
from kvist.convert.fitting import fit, missed_share
from kvist.convert.gqa_config import GqaConfig
from kvist.convert.merging import expanded, first_of_each, mean_of_each
from kvist.convert.record import Conversion, ConversionRecord, LayerConversion
from kvist.convert.source import Source
from kvist.convert.writing import write_conversion
from kvist.errors import OptionError
from kvist.evaluate.text_windows import EvaluationText, text_windows
from kvist.loading.progress import Progress, no_progress
from kvist.loading.tokenizer import Tokenizer

_Path = str | os.PathLike[str]


def to_gqa(
    source: _Path,
    destination: _Path,
    num_kv_heads: int,
    *,
    config: GqaConfig | None = None,
    text: _Path | None = None,
    weights_format: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint whose query heads share fewer KV heads.

    Besides the weights of one layer, a calibration text's hidden states lie in memory, three times in float32; for
    `fitted` four times, and matrices of the layer's width in float64, as many as docs/conversion.md says.

    Args:
        source: a directory in Hugging Face format, a `.gguf` file, a demo model's name or a Hub id.
        destination: the directory to make, in Hugging Face format.
        num_kv_heads: how many KV heads are left: a divisor of those that there are.
        config: how they are merged; by default by their mean.
        text: a file, for the methods `aligned` and `fitted` alone, which look at the layers on it.
        weights_format: what a GGUF file is de-quantised to, `bf16` or `fp32`; None for bf16. Others keep their dtype.
        force: whether the destination may take the place of a model that is there.
        progress: told how far it is.

    Raises:
        OptionError: a value cannot be honoured, or the destination cannot be written; what was there is as it was.
        PromptError: the text cannot be read or is too short.
        NumericsError: weights are not numbers.
        KvistError: the source cannot be read, as for `kvist.loading.load`.
    """
    config, progress = config or GqaConfig(), progress or no_progress
    config.check_text(text is not None)
    calibration = None if text is None else EvaluationText.read(text)
    target = Destination(destination, force=force)
    target.check(Path(source))
    opened = Source.open(source, weights_format, progress)
    target.check(opened.path, opened.directory)
    opened.check_can_merge(num_kv_heads)
    if calibration is None:
        merge = first_of_each if config.method == "first" else mean_of_each
        done = _record(opened, "gqa", num_kv_heads, progress, method=config.method)
        layers = _by_weights(opened, lambda weights: merge(weights, num_kv_heads))
        return write_conversion(opened, target, done, layers, f"merging {opened.name}", progress)
    windows = text_windows(Tokenizer.from_directory(opened.directory), opened.config, calibration.text, config)
    done = replace(
        _record(opened, "gqa", num_kv_heads, progress, method=config.method),
        calibration={
            "text": calibration.name,
            "sha256": calibration.sha256,
            "window": config.window,
            "windows": config.windows,
        },
    )
    stage = f"{'fitting' if config.method == 'fitted' else 'aligning'} {opened.name}"
    layers = _by_text(opened, windows, num_kv_heads, config.method)
    return write_conversion(opened, target, done, layers, stage, progress)


def expand(
    source: _Path,
    destination: _Path,
    *,
    weights_format: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint in which each query head has a KV head of its own: MHA, the same function in more bytes.

    Each KV head is repeated for the query heads that read it, neighbours together; merging them by their mean gives the
    source's bytes again. Arguments and errors are those of `to_gqa`.
    """
    progress = progress or no_progress
    target = Destination(destination, force=force)
    target.check(Path(source))
    opened = Source.open(source, weights_format, progress)
    target.check(opened.path, opened.directory)
    num_heads = opened.config.num_heads
    if opened.config.num_kv_heads == num_heads:
        raise OptionError(
            f"{opened.name} has a KV head for each of its {num_heads} query heads: there is nothing to expand"
        )
    done = _record(opened, "expand", num_heads, progress)
    return write_conversion(opened, target, done, _by_weights(opened, expanded), f"expanding {opened.name}", progress)


_Layers = Iterator[tuple[AttentionWeights, LayerConversion | None]]


def _record(
    source: Source, conversion: str, num_kv_heads: int, progress: Progress, *, method: str | None = None
) -> Conversion:
    """What is done, as far as it is known before."""
    return Conversion(
        conversion=conversion,
        source=source.name,
        source_hash=source.files_hash(progress),
        model_type=source.config.model_type,
        num_heads=source.config.num_heads,
        source_num_kv_heads=source.config.num_kv_heads,
        num_kv_heads=num_kv_heads,
        method=method,
        earlier=ConversionRecord.read(source.directory).fields or None,
    )


def _by_weights(source: Source, change: Callable[[AttentionWeights], AttentionWeights]) -> _Layers:
    for layer in range(source.config.num_layers):
        yield change(source.attention_weights(layer)), None


def _by_text(source: Source, windows: Sequence[Sequence[int]], num_kv_heads: int, method: str) -> _Layers:
    for layer in layers_on_text(source, windows):
        weights, moment = layer.weights.map(torch.Tensor.double), layer.moment()
        if method == "fitted":
            made, groups = fit(weights, layer.rules, moment, layer.inputs, layer.outputs, num_kv_heads)
        else:
            turn_keys = layer.rules.turns_with_rope
            aligned, groups = align_and_merge(weights, moment, num_kv_heads, turn_keys=turn_keys)
            made = aligned.map(torch.Tensor.float)
        made = source.as_stored(layer.index, made)
        record = LayerConversion(groups, missed_share(made, layer.rules, layer.inputs, layer.outputs))
        del layer, weights  # or they would lie in memory beside the next layer's
        yield made, record
