"""The statics of a model's quantised keys, from one run over a text.

The text is `calibration_text.txt`: the beginning of Shakespeare's Coriolanus, in the public domain. A tokenizer of 4
characters a token needs half of it, so that those with longer tokens find a whole window in it too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvist.attention import StepAttention, inverse_frequencies
from kvist.cache.kv_cache import KVCache, Span
from kvist.config import ModelConfig
from kvist.errors import ModelFileError, NumericsError, OptionError
from kvist.kernels import native
from kvist.kernels.key_statics import KeyStatics, key_moments, key_statics
from kvist.kv_format import LayerFormats
from kvist.loading.progress import Progress
from kvist.loading.tokenizer import Tokenizer
from kvist.loading.untrusted_file import FETCH_AGAIN
from kvist.loading.weights_plan import WEIGHT_DTYPES
from kvist.models.decoder import Decoder
from kvist.models.step_inputs import StepInputs

# Raise it whenever the same model and text would give other values.
_RECIPE_VERSION = 3

_WINDOW_TOKENS = 2048
# A page's worth: fewer say too little about a model's keys.
_LEAST_TOKENS = 64
# Statics fit texts up to this position; those of a window of 2,048 alone did harm beyond it.
_MOST_HORIZON = 8192
# So that the scores of a head over 2,048 keys, 1 MB, stay in a core's cache.
_QUERIES_AT_ONCE = 128


def recipe_hash() -> str:
    """The hash of the text and of what is made of it, 16 hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(f"{_RECIPE_VERSION}\n{_text()}".encode())


def calibration_ids(tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """The token ids of the text's beginning, as many as a model takes, 2,048 at most.

    Raises:
        OptionError: the model takes too few.
        ModelFileError: the tokenizer gives ids that the model does not have.
    """
    token_ids = tokenizer.encode(_text())[: min(_WINDOW_TOKENS, config.max_context)]
    if len(token_ids) < _LEAST_TOKENS:
        raise OptionError(
            f"quantised keys need statics from {_LEAST_TOKENS} tokens of text at least, and this model takes "
            f"{len(token_ids)}: choose bf16 or fp32 for the keys"
        )
    if max(token_ids) >= config.vocab_size:
        raise ModelFileError(
            f"the tokenizer gives token {max(token_ids)} for plain text, and the model has {config.vocab_size} tokens: "
            f"{FETCH_AGAIN}"
        )
    return token_ids


def calibrate(decoder: Decoder, token_ids: list[int], progress: Progress) -> tuple[KeyStatics, ...]:
    """The statics of every layer, from one run over a text in the weights' dtype.

    Besides the weights this takes the memory of one step over all of the text, and float64 copies of one layer's
    queries and keys.

    Args:
        decoder: the model.
        token_ids: of the text, as it begins.
        progress: told the bytes of the keys that have been looked at.

    Raises:
        NumericsError: the model gives queries or keys that are not numbers.
    """
    config, num_tokens = decoder.config, len(token_ids)
    cache = _cache(decoder, num_tokens)
    sequence_id = cache.open()
    cache.reserve(sequence_id, num_tokens)
    view = cache.view([Span(sequence_id, num_tokens)])
    inputs = StepInputs(
        token_ids=torch.tensor(token_ids, device=decoder.device),
        positions=view.positions(),
        logit_rows=torch.empty(0, dtype=torch.int64, device=decoder.device),
        cache=view,
    )
    found: dict[int, KeyStatics] = {}
    done, total = (
        0,
        decoder.dtype.itemsize * num_tokens * sum(x.num_kv_heads * x.head_dim for x in config.layers),
    )

    def look(attention: StepAttention, q: torch.Tensor, k: torch.Tensor, layer: int) -> None:
        nonlocal done
        frequencies = inverse_frequencies(decoder.rope_of(layer), attention.head_dim, q.device)
        found[layer] = _layer_statics(attention, q, k, layer, frequencies, min(_MOST_HORIZON, config.max_context))
        done += k.nbytes
        progress("fitting the quantised keys to the model", done, total)

    progress("fitting the quantised keys to the model", done, total)
    handles = [
        module.register_forward_pre_hook(_observer(view, look))
        for module in decoder.modules()
        if isinstance(module, StepAttention)
    ]
    try:
        with torch.no_grad():
            decoder.hidden_states(inputs, plain_layers=True)  # the native ones call no hook
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found[layer] for layer in range(config.num_layers))


def feedback_dims(head_dim: int) -> int:
    """The dims of a block of the feedback: an int4 group, or one where int4 does not take such heads."""
    return native.group_dims("int4", head_dim) if native.takes_head_dim("int4", head_dim) else 1


def received_attention(q: torch.Tensor, k: torch.Tensor, *, scale: float, window: int | None) -> torch.Tensor:
    """The attention `[K, T]` that each key of a text receives, summed over its queries and the heads of a group.

    Args:
        q: `[T, H, D]`, all queries of the text.
        k: `[T, K, D]`, its keys.
        scale: multiplies the scores.
        window: tokens that a query sees, itself included; None sees all.
    """
    num_tokens, num_kv_heads, _ = k.shape
    queries, keys = (q.float() * scale).transpose(0, 1), k.float().permute(1, 2, 0)
    received = torch.zeros(num_kv_heads, num_tokens, dtype=torch.float64, device=k.device)
    for start in range(0, num_tokens, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, num_tokens)
        first = 0 if window is None else max(0, start - window + 1)
        query = torch.arange(start, stop, device=q.device).unsqueeze(1)
        key = torch.arange(first, stop, device=q.device)
        unseen = key > query if window is None else (key > query) | (key <= query - window)
        mask = torch.zeros(unseen.shape, device=q.device).masked_fill_(unseen, float("-inf"))
        for head in range(len(queries)):
            kv_head = head * num_kv_heads // len(queries)
            scores = torch.addmm(mask, queries[head, start:stop], keys[kv_head, :, first:stop])
            received[kv_head, first:stop] += scores.softmax(dim=-1).sum(0)
    return received


def _text() -> str:
    return Path(__file__).with_name("calibration_text.txt").read_text(encoding="utf-8")


def _cache(decoder: Decoder, num_tokens: int) -> KVCache:
    """A cache for so many tokens in the dtype of the hidden states."""
    formats = LayerFormats.parse(next(name for name, dtype in WEIGHT_DTYPES.items() if dtype == decoder.dtype))
    return KVCache.for_run(decoder.config.layers, formats, num_tokens, decoder.device, max_step_tokens=num_tokens)


def _observer(
    view: object, look: Callable[[StepAttention, torch.Tensor, torch.Tensor, int], None]
) -> Callable[[StepAttention, tuple[Any, ...]], None]:
    """A hook that shows the queries and keys of a step over `view` before attention takes them."""

    def hook(attention: StepAttention, arguments: tuple[Any, ...]) -> None:
        x, rope, cache, layer = arguments
        if cache is view:  # another thread may run steps of its own
            q, k, _ = attention.project(x, rope)
            look(attention, q, k, layer)

    return hook


def _layer_statics(
    attention: StepAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    layer: int,
    frequencies: torch.Tensor,
    horizon: int,
) -> KeyStatics:
    received = received_attention(q, k, scale=attention.scale, window=attention.window)
    if not all(x.isfinite().all() for x in (q, k, received)):
        raise NumericsError(
            f"the model's keys or queries in layer {layer} are not numbers (NaN or infinite) or have products that are "
            "not: try weights_format='fp32', or fetch its files again"
        )
    moments = key_moments(q, k, received, frequencies)
    return key_statics(moments, frequencies, feedback_dims(attention.head_dim), horizon=horizon)
