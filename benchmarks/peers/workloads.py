"""What is measured over one model, and with which tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from field import Contender, Field
from turns import Figure, Limits, Probe, in_turn
from worker import WorkerError

from kvist.bench.probed import Repetition

_DECODED_TOKENS = 32
# A prompt of this many tokens, or the next context above it, is computed as a whole, besides the longest.
_PREFILL_CONTEXT = 1000
# Prompts of one round begin so many tokens after those of the one before, so that no engine knows them already.
_SHIFT_TOKENS = 37
_REQUESTS_START = 7


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        contexts: tokens before those that are decoded, ascending.
        decode, prefill, batch, requests: how often each; no requests where that is None.
        batch_sequences, batch_context: sequences that decode together, and the tokens of each.
        num_requests: that come at once.
        request_tokens: of the shortest and the longest prompt among them.
        answer_tokens: that each of them draws.
    """

    contexts: tuple[int, ...]
    decode: Limits
    prefill: Limits
    batch: Limits
    requests: Limits
    batch_sequences: int = 8
    batch_context: int = 1000
    num_requests: int = 32
    request_tokens: tuple[int, int] = (200, 1500)
    answer_tokens: int = 64

    @property
    def max_context(self) -> int:
        """Tokens that a sequence needs room for."""
        return max(*self.contexts, self.batch_context, self.request_tokens[1]) + 128

    @property
    def prefill_contexts(self) -> list[int]:
        """Those whose prompts are computed as a whole too."""
        longer = [context for context in self.contexts if context >= _PREFILL_CONTEXT]
        return sorted({*longer[:1], self.contexts[-1]})

    @property
    def request_lengths(self) -> list[int]:
        """Of the prompts that come at once: evenly spread, in an order that is no order."""
        shortest, longest = self.request_tokens
        steps = max(1, self.num_requests - 1)
        lengths = [shortest + (longest - shortest) * index // steps for index in range(self.num_requests)]
        random.Random(0).shuffle(lengths)
        return lengths


@dataclass(frozen=True)
class Row:
    """One figure: which contender, doing what.

    Attributes:
        label: the contender's.
        work: `decode`, `prefill`, `batch` (sequences that decode together) or `requests` (that come at once).
        context: tokens of each sequence; of all prompts for requests.
        in_parts: the prompt was computed once, from one context to the next, since as a whole it takes too long to
            repeat.
        figure: what it came to.
    """

    label: str
    work: str
    context: int
    figure: Figure
    in_parts: bool = False

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {"label": self.label, "work": self.work, "context": self.context, "in_parts": self.in_parts} | asdict(
            self.figure
        )


class Text:
    """Real text as tokens.

    Args:
        begin: the tokens that every prompt begins with.
        token_ids: the others.
    """

    def __init__(self, begin: list[int], token_ids: list[int]) -> None:
        self._begin, self._token_ids = begin, token_ids

    def prompt(self, length: int, start: int) -> list[int]:
        """A prompt of exactly so many tokens."""
        stop = start + length - len(self._begin)
        if stop > len(self._token_ids):
            raise ValueError(f"the text has {len(self._token_ids):,} tokens, and {stop:,} are asked for")
        return self._begin + self._token_ids[start:stop]

    def prompts(self, lengths: list[int], start: int) -> list[list[int]]:
        """Prompts that have nothing in common but how all begin."""
        found = []
        for length in lengths:
            found.append(self.prompt(length, start))
            start += length
        return found


class Workloads:
    """The measurements over one model.

    Args:
        field: who takes part.
        text: what the prompts are.
        plan: how much.
        bandwidth: gives the read bandwidth of the moment, bytes per second.

    Attributes:
        drawn: by label and context, the tokens that a contender drew after it.
    """

    def __init__(self, field: Field, text: Text, plan: Plan, bandwidth: Callable[[], float]) -> None:
        self._field, self._text, self._plan = field, text, plan
        self._probe = Probe(bandwidth)
        self.drawn: dict[str, dict[int, list[int]]] = {}

    def rows(self) -> Iterator[Row]:
        """Measure everything, figure by figure."""
        yield from self._contexts()
        yield from self._batch()
        yield from self._requests()

    def _contexts(self) -> Iterator[Row]:
        """Prompts grow from context to context, since peers take minutes to compute the longest anew."""
        plan, field, probe = self._plan, self._field, self._probe
        prompt = self._text.prompt(plan.contexts[-1], 0)
        parts: dict[str, list[Repetition]] = {one.label: [] for one in field.live}
        done = 0
        for context in plan.contexts:
            part = prompt[done:context]

            def extend(one: Contender, turn: int, part: list[int] = part) -> float:
                return float(one.worker.ask("extend", token_ids=part)["seconds"])

            for label, found in in_turn(field, list(field.live), extend, Limits(1, 0.0), probe).items():
                parts[label] += found[:1]
            done = context
            self._warm_up("decode")

            def decode(one: Contender, turn: int, context: int = context) -> float:
                answer = one.worker.ask("decode", num_tokens=_DECODED_TOKENS)
                self.drawn.setdefault(one.label, {}).setdefault(context, answer["token_ids"])
                return float(answer["seconds"])

            decoded = in_turn(field, list(field.live), decode, plan.decode, probe)
            yield from _rows(decoded, "decode", context, _DECODED_TOKENS)
        for context in plan.prefill_contexts:
            number = plan.contexts.index(context) + 1
            took = {label: sum(part.seconds for part in found[:number]) for label, found in parts.items()}
            repeated = [one for one in field.live if took[one.label] <= plan.prefill.seconds]

            def prefill(one: Contender, turn: int, context: int = context) -> float:
                one.worker.ask("reset")
                fresh = self._text.prompt(context, (turn + 1) * _SHIFT_TOKENS)
                return float(one.worker.ask("extend", token_ids=fresh)["seconds"])

            yield from _rows(in_turn(field, repeated, prefill, plan.prefill, probe), "prefill", context, context)
            for label in took.keys() - {one.label for one in repeated}:
                if len(parts[label]) >= number:
                    yield Row(label, "prefill", context, _sum(parts[label][:number], context), in_parts=True)

    def _batch(self) -> Iterator[Row]:
        plan, field = self._plan, self._field
        prompts = self._text.prompts([plan.batch_context] * plan.batch_sequences, 0)
        entered = self._enter("fill", prompts=prompts)
        self._warm_up("decode_batch", entered)

        def decode(one: Contender, turn: int) -> float:
            return float(one.worker.ask("decode_batch", num_tokens=_DECODED_TOKENS)["seconds"])

        decoded = in_turn(field, entered, decode, plan.batch, self._probe)
        yield from _rows(decoded, "batch", plan.batch_context, _DECODED_TOKENS * plan.batch_sequences)
        self._enter("fill", prompts=[])

    def _requests(self) -> Iterator[Row]:
        """Tokens of prompts and answers together count."""
        plan, field = self._plan, self._field
        lengths = plan.request_lengths

        def answer(one: Contender, turn: int) -> float:
            prompts = self._text.prompts(lengths, _REQUESTS_START + turn * _SHIFT_TOKENS)
            return float(one.worker.ask("answer", prompts=prompts, num_tokens=plan.answer_tokens)["seconds"])

        entered = [one for one in field.live if one.cache.in_batches]
        answered = in_turn(field, entered, answer, plan.requests, self._probe)
        total = sum(lengths) + plan.answer_tokens * plan.num_requests
        yield from _rows(answered, "requests", sum(lengths), total)

    def _enter(self, command: str, **arguments: Any) -> list[Contender]:
        """Ask those that take part in batches for something that is not measured; those that did it."""
        entered = []
        for one in [one for one in self._field.live if one.cache.in_batches]:
            try:
                one.worker.ask(command, **arguments)
            except WorkerError as error:
                self._field.drop(one, str(error))
            else:
                entered.append(one)
        return entered

    def _warm_up(self, command: str, contenders: list[Contender] | None = None) -> None:
        for one in list(self._field.live) if contenders is None else contenders:
            try:
                one.worker.ask(command, num_tokens=4)
            except WorkerError as error:
                self._field.drop(one, str(error))


def _rows(found: dict[str, list[Repetition]], work: str, context: int, num_tokens: int) -> Iterator[Row]:
    for label, repetitions in found.items():
        yield Row(label, work, context, Figure.of(repetitions, num_tokens))


def _sum(parts: list[Repetition], num_tokens: int) -> Figure:
    """One repetition made of parts, as steady as the least steady of them."""
    seconds = sum(part.seconds for part in parts)
    bytes_per_s = sum(part.bytes_per_s * part.seconds for part in parts) / seconds
    return Figure.of([Repetition(seconds, bytes_per_s, max(part.drift for part in parts))], num_tokens)
