"""A request, and the sequence that grows from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvist.config import SamplingParams
from kvist.engine.sampler import Drawn, SamplingState
from kvist.engine.text import GeneratedText
from kvist.results import Completion, TextDelta, Timings, TokenLogprob


@dataclass(eq=False)
class Room:
    """A place in the KV cache and the tokens it belongs to.

    The cache's sequence `sequence_id` holds keys and values of `token_ids` from the first one on, perhaps not yet of
    all.
    `kept` rooms belong to a session and outlive the request; the others are released with it. Only the engine, under
    its lock, changes a room.
    """

    sequence_id: int
    kept: bool
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What a caller wants generated.

    Attributes:
        token_ids: the prompt; in a session all of its history too.
        params: how to draw and when to stop.
        requested_at: `time.perf_counter()` of the call.
        room: a session's room; None for a room that lives as long as the request.
    """

    token_ids: list[int]
    params: SamplingParams
    requested_at: float
    room: Room | None = None


class Sequence:
    """The tokens of one request, from prompt to end.

    It waits, is started by the scheduler, takes one token after another and ends with a completion or an error.

    Args:
        request: what is wanted.
        room: where its keys and values are kept.
        max_new_tokens: `max_tokens`, or less where the context ends before.
        end_token_ids: tokens that end the text.
        sampling: how its tokens are drawn.
        text: turns them into text.
    """

    def __init__(
        self,
        request: Request,
        *,
        room: Room,
        max_new_tokens: int,
        end_token_ids: frozenset[int],
        sampling: SamplingState,
        text: GeneratedText,
    ) -> None:
        self.room = room
        self.sampling = sampling
        self.token_ids = list(request.token_ids)
        self.prompt_tokens = len(request.token_ids)
        self.room_tokens = self.prompt_tokens + max_new_tokens
        self.cached_tokens = 0
        self.started = False
        self.error: Exception | None = None
        self.completion: Completion | None = None
        self._max_new_tokens = max_new_tokens
        self._end_token_ids = end_token_ids
        self._text = text
        self._pieces: list[str] = []  # the text that each generated token made final
        self._logprobs: list[TokenLogprob] = []
        self._requested_at = request.requested_at
        self._token_times: tuple[float, float] | None = None  # of the first and the latest token

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.prompt_tokens]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def said(self, num_tokens: int) -> tuple[list[int], str]:
        """The first `num_tokens` generated tokens, without one that ended the text, and the text they made final.

        Needs no lock for tokens that were generated before the call: what is there stays as it is.
        """
        ids = self.token_ids[self.prompt_tokens : self.prompt_tokens + num_tokens]
        if ids and ids[-1] in self._end_token_ids:
            ids.pop()
        return ids, "".join(self._pieces[:num_tokens])

    def start(self, cached_tokens: int) -> None:
        """Run from now on; the first `cached_tokens` need not be computed."""
        self.cached_tokens = cached_tokens
        self.started = True

    def take(self, drawn: Drawn) -> str | None:
        """Append a token. Return the finish reason if it is the last."""
        now = time.perf_counter()
        self._token_times = (self._token_times[0] if self._token_times else now, now)
        self.sampling.count(drawn.token_id)
        if drawn.logprob is not None:
            self._logprobs.append(drawn.logprob)
        ended = drawn.token_id in self._end_token_ids
        piece = "" if ended else self._text.push(drawn.token_id)
        last = ended or self._text.stopped or self.num_generated + 1 == self._max_new_tokens
        if last:
            piece += self._text.finish()
        self.token_ids.append(drawn.token_id)
        self._pieces.append(piece)
        if not last:
            return None
        return "stop" if ended or self._text.stopped else "length"

    def complete(self, finish_reason: str, *, kv_bytes: int, kv_bytes_per_token: int) -> None:
        """End with a completion."""
        self.completion = Completion(
            text="".join(self._pieces),
            token_ids=tuple(self.generated_ids),
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.num_generated,
            cached_tokens=self.cached_tokens,
            kv_bytes=kv_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            timings=self._timings(),
            logprobs=tuple(self._logprobs) if self.sampling.params.logprobs is not None else None,
        )

    def delta_since(self, num_tokens: int) -> TextDelta:
        """What came after the first `num_tokens` generated tokens."""
        return TextDelta("".join(self._pieces[num_tokens:]), tuple(self.generated_ids[num_tokens:]), self.completion)

    def _timings(self) -> Timings:
        if self._token_times is None:
            raise ValueError("a sequence without tokens has no timings")
        first, latest = self._token_times
        to_first, after_first = first - self._requested_at, latest - first
        return Timings(
            ttft_ms=to_first * 1e3,
            prefill_tokens_per_s=(self.prompt_tokens - self.cached_tokens) / to_first,
            decode_tokens_per_s=(self.num_generated - 1) / after_first if self.num_generated > 1 else None,
        )
