"""What is measured over one model, and with which tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from field import Contender, Field
from turns import Figure, Limits, Probe, in_turn
from worker import WorkerError

from kvist.bench.probed import Repetition
from kvist.bench.rates import request_lengths

_DECODED_TOKENS = 32
# A prompt of this many tokens, or the next context above it, is computed as a whole, besides the longest.
_PREFILL_CONTEXT = 1000
# Engines keep what they computed of a prompt, in blocks of 16 tokens and more, and find it again where another begins
# with the same. So no two prompts have the same first tokens, so many; the next begins some tokens further on.
_FIRST_TOKENS, _SHIFT_TOKENS = 16, 37

_PromptsOfTurn = Callable[[int], list[list[int]]]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        contexts: tokens before those that are decoded, ascending.
        decode, prefill, batch, requests: how often each.
        batches, batch_context: how many sequences decode together, one after another, and the tokens of each.
        num_requests: that come at once, of the lengths of `kvist bench batch --requests`.
        answer_tokens: that each of them draws.
    """

    contexts: tuple[int, ...]
    decode: Limits
    prefill: Limits
    batch: Limits
    requests: Limits
    batches: tuple[int, ...] = (8, 32)
    batch_context: int = 1000
    num_requests: int = 32
    answer_tokens: int = 64

    @property
    def max_context(self) -> int:
        """Tokens that a sequence needs room for."""
        return max(*self.contexts, self.batch_context, *request_lengths(self.num_requests)) + 128

    @property
    def prefill_contexts(self) -> list[int]:
        """Those whose prompts are computed as a whole too."""
        longer = [context for context in self.contexts if context >= _PREFILL_CONTEXT]
        return sorted({*longer[:1], self.contexts[-1]})


@dataclass(frozen=True)
class Row:
    """One figure: which contender, doing what.

    Attributes:
        label: the contender's.
        work: `decode`, `prefill`, `batch` (sequences that decode together) or `requests` (that come at once).
        context: tokens of each sequence; of all prompts for requests.
        sequences: that are computed together.
        in_parts: the prompt was computed once, from one context to the next, since as a whole it takes too long to
            repeat.
        figure: what it came to.
    """

    label: str
    work: str
    context: int
    sequences: int
    figure: Figure
    in_parts: bool = False

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        row: dict[str, Any] = asdict(self)
        figure: dict[str, Any] = row.pop("figure")
        return row | figure


class Text:
    """Real text as tokens, handed out in prompts that no engine can know the beginning of.

    Args:
        begin: the tokens that every prompt begins with.
        token_ids: the others.
    """

    def __init__(self, begin: list[int], token_ids: list[int]) -> None:
        self._begin, self._token_ids = begin, token_ids
        self._known: set[tuple[int, ...]] = set()

    def prompt(self, length: int) -> list[int]:
        """A prompt of exactly so many tokens. Raises as `prompts`."""
        return self.prompts([length])[0]

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        """Prompts of exactly so many tokens, one behind the other in the text.

        After the tokens with which all begin, the first 16 are those of no other prompt, of these or of earlier ones.

        Raises:
            ValueError: the text is too short.
        """
        wanted = [length - len(self._begin) for length in lengths]
        for first in range(0, len(self._token_ids) - sum(wanted) + 1, _SHIFT_TOKENS):
            parts, start = [], first
            for length in wanted:
                parts.append(self._token_ids[start : start + length])
                start += length
            beginnings = {tuple(part[:_FIRST_TOKENS]) for part in parts}
            if len(beginnings) == len(parts) and not beginnings & self._known:
                self._known |= beginnings
                return [self._begin + part for part in parts]
        raise ValueError(
            f"the text has {len(self._token_ids):,} tokens: too few for {sum(wanted):,} that begin as none before"
        )


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
        prompt = self._text.prompt(plan.contexts[-1])
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

            prompts = self._prompts_of_turn([context])

            def prefill(one: Contender, turn: int, prompts: _PromptsOfTurn = prompts) -> float:
                one.worker.ask("reset")
                return float(one.worker.ask("extend", token_ids=prompts(turn)[0])["seconds"])

            yield from _rows(in_turn(field, repeated, prefill, plan.prefill, probe), "prefill", context, context)
            for label in took.keys() - {one.label for one in repeated}:
                if len(parts[label]) >= number:
                    yield Row(label, "prefill", context, 1, _sum(parts[label][:number], context), in_parts=True)

    def _batch(self) -> Iterator[Row]:
        plan = self._plan

        def decode(one: Contender, turn: int) -> float:
            return float(one.worker.ask("decode_batch", num_tokens=_DECODED_TOKENS)["seconds"])

        for sequences in plan.batches:
            entered = self._enter("fill", prompts=self._text.prompts([plan.batch_context] * sequences))
            self._warm_up("decode_batch", entered)
            decoded = in_turn(self._field, entered, decode, plan.batch, self._probe)
            yield from _rows(decoded, "batch", plan.batch_context, _DECODED_TOKENS * sequences, sequences)
            self._enter("fill", prompts=[])

    def _requests(self) -> Iterator[Row]:
        """Tokens of prompts and answers together count."""
        plan, field = self._plan, self._field
        lengths = request_lengths(plan.num_requests)
        prompts = self._prompts_of_turn(lengths)

        def answer(one: Contender, turn: int) -> float:
            asked = {"prompts": prompts(turn), "num_tokens": plan.answer_tokens}
            return float(one.worker.ask("answer", **asked)["seconds"])

        entered = [one for one in field.live if one.cache.in_batches]
        answered = in_turn(field, entered, answer, plan.requests, self._probe)
        total = sum(lengths) + plan.answer_tokens * plan.num_requests
        yield from _rows(answered, "requests", sum(lengths), total, plan.num_requests)

    def _prompts_of_turn(self, lengths: list[int]) -> _PromptsOfTurn:
        """New prompts for each turn, the same for all contenders."""
        return cache(lambda turn: self._text.prompts(lengths))

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


def _rows(
    found: dict[str, list[Repetition]], work: str, context: int, num_tokens: int, sequences: int = 1
) -> Iterator[Row]:
    for label, repetitions in found.items():
        yield Row(label, work, context, sequences, Figure.of(repetitions, num_tokens))


def _sum(parts: list[Repetition], num_tokens: int) -> Figure:
    """One repetition made of parts, as steady as the least steady of them."""
    seconds = sum(part.seconds for part in parts)
    bytes_per_s = sum(part.bytes_per_s * part.seconds for part in parts) / seconds
    return Figure.of([Repetition(seconds, bytes_per_s, max(part.drift for part in parts))], num_tokens)
