"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """How long a request took.

    Attributes:
        ttft_ms: from the call to the first token, tokenizing and waiting included.
        prefill_tokens_per_s: prompt tokens that were computed (those in the cache were not), over the time to the
            first token.
        decode_tokens_per_s: tokens after the first, over the time after the first; None for a single token.
    """

    ttft_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model thought a token, before bias, penalties and temperature.

    Attributes:
        token_id: the token that was drawn.
        logprob: natural logarithm of its probability.
        top: the most likely tokens and their logprobs, as many as `SamplingParams.logprobs` asks for, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        text: what was generated, without stop strings and special tokens. It continues the prompt: where a word
            follows, it begins with the space between.
        token_ids: every token that was drawn, the end token and those of a stop string included.
        finish_reason: `stop` (an end token or a stop string) or `length` (`max_tokens`, or the context is full).
        prompt_tokens: tokens of the prompt; in a session its whole history counts.
        completion_tokens: `len(token_ids)`.
        cached_tokens: prompt tokens whose keys and values were in the cache already.
        kv_bytes: the memory of the sequence's pages at the end. A page has room for 64 tokens; windows have dropped
            those that no token sees any more.
        kv_bytes_per_token: keys and values of one token over all layers.
        timings: see `Timings`.
        logprobs: one entry per token of `token_ids`; None unless `SamplingParams.logprobs` asks for it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_bytes: int
    kv_bytes_per_token: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class TextDelta:
    """What a stream gives piece by piece: all texts joined are `Completion.text`, all tokens `Completion.token_ids`.

    Attributes:
        text: the new text. Empty while a character is incomplete or a stop string may have begun.
        token_ids: the new tokens.
        completion: the whole, in the last piece only.
    """

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None
