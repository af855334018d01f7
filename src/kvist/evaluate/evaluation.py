"""Formats of the cache against an exact one: the same text through each, window after window.

    window   token ids -> hidden states [N, E]     a pass per format, each over pages of that format, and one over fp32
             hidden states -> logits [rows, V]     of all passes, a block of rows at a time: the vocabulary is large
             logits -> Predictions                 each pass beside the reference

Attention reads every token through the format, its own included, as it does when text is generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvist.cache.kv_cache import KVCache, Span
from kvist.cache.plan import CachePlan
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import CacheFullError
from kvist.evaluate.divergence import Predictions, ReferenceBlock, block_rows, mean, percentile, perplexity
from kvist.evaluate.eval_config import EvalConfig
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import KVFormat, LayerFormats
from kvist.memory import available_bytes, distinct_sizes
from kvist.models.decoder import Decoder
from kvist.models.step_inputs import StepInputs

EXACT = LayerFormats(KVFormat("fp32", "fp32"))
"""The cache of the reference."""

POSITION_RUN = 1024
"""Positions of a window whose mean divergence is given by itself."""

_REFERENCE, _PYTORCH = "reference", ", PyTorch"


@dataclass(frozen=True)
class FormatRow:
    """What one format came to, over all windows so far.

    Attributes:
        kv_format: its name; followed by `, PyTorch` where the kernels' twins computed.
        kv_bytes_per_token: of keys and values over all layers.
        kl_mean, kl_p99: mean and 99th percentile of KL(reference || format), nats per token.
        top1_agreement: the share of positions at which the likeliest token is the reference's.
        perplexity: of the text.
        kl_mean_of_windows: for each window: what the mean of them is worth.
        kl_mean_of_positions: the same for each run of `POSITION_RUN` positions in a window, over all windows, with the
            run's first position.
        seconds: that its passes and comparisons took.
    """

    kv_format: str
    kv_bytes_per_token: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    perplexity: float
    kl_mean_of_windows: tuple[float, ...]
    kl_mean_of_positions: tuple[tuple[int, float], ...]
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """What all formats came to.

    Attributes:
        windows: that are through.
        positions: that were scored in them.
        reference_perplexity: of the text, with fp32 cache, weights and compute.
        reference_seconds: that the reference took.
        rows: one per format, in the order asked for.
    """

    windows: int
    positions: int
    reference_perplexity: float
    reference_seconds: float
    rows: tuple[FormatRow, ...]


def evaluate(
    reference: Decoder,
    tested: Decoder,
    windows: Sequence[Sequence[int]],
    config: EvalConfig,
    *,
    key_statics: Sequence[KeyStatics] | None = None,
    max_step_tokens: int = CacheConfig.max_step_tokens,
    started: Callable[[int, str], None] = lambda window, name: None,
) -> Iterator[Evaluation]:
    """Score a text with each format and yield what is known after each window.

    Every position that has a next token in its window is scored, or as many of them as `config.every` says.

    Args:
        reference: the model in float32; it runs with an fp32 cache.
        tested: the same model in what the formats are tested with, on the same device.
        windows: token ids, as `text_windows` gives them.
        config: what is evaluated.
        key_statics: of each layer of `tested`; needed where a format quantises keys.
        max_step_tokens: the most tokens computed in one step.
        started: told the window, from 0, and the format whose pass over it begins; `reference` for the reference.

    Raises:
        OptionError: the model's layers cannot take a format.
        CacheFullError: the machine lacks the memory for the cache of a window.
        NumericsError: logits are not finite.
    """
    device = reference.device
    rows = torch.arange(0, config.window - 1, config.every, device=device)
    caches = {
        f"{kv_format}{path}": _cache(
            tested, kv_format, config.window, max_step_tokens, key_statics, native=path != _PYTORCH
        )
        for kv_format in config.formats
        for path in ("", *([_PYTORCH] if config.pytorch else []))
    }
    exact = _cache(reference, EXACT, config.window, max_step_tokens)
    found: dict[str, list[Predictions]] = {name: [] for name in caches}
    surprisal: list[torch.Tensor] = []
    seconds = dict.fromkeys((_REFERENCE, *caches), 0.0)

    for index, window in enumerate(windows):
        token_ids = torch.tensor(window, device=device)
        hidden: dict[str, torch.Tensor] = {}
        for name, cache in ((_REFERENCE, exact), *caches.items()):
            started(index, name)
            began_s = time.perf_counter()
            decoder, plain = reference if cache is exact else tested, name.endswith(_PYTORCH)
            hidden[name] = _hidden_states(decoder, cache, token_ids, plain_layers=plain)[rows]
            seconds[name] += time.perf_counter() - began_s
        exact_surprisal, predictions = _compared(reference, tested, hidden, token_ids[rows + 1], seconds)
        surprisal.append(exact_surprisal)
        for name, of_format in predictions.items():
            found[name].append(of_format)
        yield Evaluation(
            windows=index + 1,
            positions=(index + 1) * len(rows),
            reference_perplexity=perplexity(torch.cat(surprisal)),
            reference_seconds=seconds[_REFERENCE],
            rows=tuple(
                _row(name, cache.bytes_per_token, found[name], rows, seconds[name]) for name, cache in caches.items()
            ),
        )


def check_window(layers: Sequence[LayerConfig], kv_format: LayerFormats, num_tokens: int, max_step_tokens: int) -> None:
    """Raise where there can be no cache of a window of so many tokens.

    Raises:
        OptionError: the layers cannot take the format.
        CacheFullError: the machine lacks the memory.
    """
    needed, available = CachePlan(layers, kv_format, 0, max_step_tokens).bytes_for(num_tokens), available_bytes()
    if needed > available:
        takes, free = distinct_sizes(needed, available)
        raise CacheFullError(
            f"a window of {num_tokens:,} tokens takes {takes} in {kv_format}, and {free} are free: take a shorter "
            "window"
        )


def _cache(
    decoder: Decoder,
    kv_format: LayerFormats,
    num_tokens: int,
    max_step_tokens: int,
    statics: Sequence[KeyStatics] | None = None,
    *,
    native: bool = True,
) -> KVCache:
    """A cache for a window of the text."""
    layers = decoder.config.layers
    check_window(layers, kv_format, num_tokens, max_step_tokens)
    return KVCache.for_run(
        layers,
        kv_format,
        num_tokens,
        decoder.device,
        max_step_tokens=max_step_tokens,
        key_statics=statics,
        native=native,
    )


@torch.inference_mode()
def _hidden_states(
    decoder: Decoder, cache: KVCache, token_ids: torch.Tensor, *, plain_layers: bool = False
) -> torch.Tensor:
    """`[T, E]` of a text, computed in a sequence of its own, step after step."""
    sequence_id = cache.open()
    try:
        if not cache.reserve(sequence_id, len(token_ids)):
            raise RuntimeError("the cache was measured for this window and does not take it")
        steps = []
        for first in range(0, len(token_ids), cache.config.max_step_tokens):
            step = token_ids[first : first + cache.config.max_step_tokens]
            view = cache.view([Span(sequence_id, len(step))])
            no_rows = step.new_empty(0)
            inputs = StepInputs(step, view.positions(), no_rows, view)
            steps.append(decoder.hidden_states(inputs, plain_layers=plain_layers))
            cache.commit(view)
        return torch.cat(steps)
    finally:
        cache.release(sequence_id)


@torch.inference_mode()
def _compared(
    reference: Decoder,
    tested: Decoder,
    hidden: dict[str, torch.Tensor],
    targets: torch.Tensor,
    seconds: dict[str, float],
) -> tuple[torch.Tensor, dict[str, Predictions]]:
    """The reference's surprisal `[N]`, and what each format predicts, from hidden states `[N, E]` of each pass.

    The time of each is added to `seconds`.
    """
    surprisal: list[torch.Tensor] = []
    parts: dict[str, list[Predictions]] = {name: [] for name in hidden if name != _REFERENCE}
    num_rows = block_rows(reference.config.vocab_size)
    for first in range(0, len(targets), num_rows):
        block = slice(first, first + num_rows)
        began_s = time.perf_counter()
        exact = ReferenceBlock(reference.logits(hidden[_REFERENCE][block]), targets[block])
        surprisal.append(exact.surprisal)
        seconds[_REFERENCE] += time.perf_counter() - began_s
        for name, of_format in parts.items():
            began_s = time.perf_counter()
            of_format.append(exact.compare(tested.logits(hidden[name][block])))
            seconds[name] += time.perf_counter() - began_s
    return torch.cat(surprisal), {name: Predictions.joined(of_format) for name, of_format in parts.items()}


def _row(
    name: str, bytes_per_token: int, of_windows: Sequence[Predictions], positions: torch.Tensor, seconds: float
) -> FormatRow:
    whole = Predictions.joined(of_windows)
    runs = positions.repeat(len(of_windows)) // POSITION_RUN * POSITION_RUN
    return FormatRow(
        kv_format=name,
        kv_bytes_per_token=bytes_per_token,
        kl_mean=mean(whole.kl),
        kl_p99=percentile(whole.kl, 0.99),
        top1_agreement=mean(whole.agrees),
        perplexity=perplexity(whole.surprisal),
        kl_mean_of_windows=tuple(mean(window.kl) for window in of_windows),
        kl_mean_of_positions=tuple((run, mean(whole.kl[runs == run])) for run in sorted(set(runs.tolist()))),
        seconds=seconds,
    )
