"""`kvist chat`: a conversation whose history stays in the cache."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from kvist.cli import options
from kvist.cli.output import Report, print_error, print_note, print_statistics, written
from kvist.cli.reading import checked, is_typed, piped_lines, typed_lines
from kvist.config import SamplingParams
from kvist.errors import (
    CacheFullError,
    ContextFullError,
    KvistError,
    OptionError,
    PromptError,
    did_you_mean,
)

if TYPE_CHECKING:
    from kvist.llm import LLM
    from kvist.results import Completion

COMMANDS = {
    "/help": "list these commands",
    "/stats": "what the last answer took, and how full the context is",
    "/reset": "forget the conversation",
    "/quit": "leave (so does Ctrl-D)",
}


def chat(
    model: options.ModelOption = options.DEFAULT_MODEL,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = SamplingParams.max_tokens,
    temperature: options.TemperatureOption = SamplingParams.temperature,
    top_p: options.TopPOption = SamplingParams.top_p,
    top_k: options.TopKOption = SamplingParams.top_k,
    min_p: options.MinPOption = SamplingParams.min_p,
    repetition_penalty: options.RepetitionPenaltyOption = SamplingParams.repetition_penalty,
    stop: options.StopOption = None,
    seed: options.SeedOption = None,
    weights_format: options.WeightsFormatOption = None,
    kv_format: options.KVFormatOption = options.DEFAULT_FORMAT,
    kv_memory: options.KVMemoryOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Talk with a model.

    The conversation so far stays in the cache and is not computed again.

    Ctrl-C stops an answer and keeps the conversation. /help lists the commands. Where standard input is no terminal,
    each of its lines is a turn.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(map(checked, stop or ())),
        seed=seed,
    )
    system = None if system is None else checked(system)
    typed = is_typed()
    llm = options.open_llm(
        model, weights_format=weights_format, kv_format=kv_format, kv_memory=kv_memory, threads=threads
    )
    with closing(llm):
        if not llm.tokenizer.has_chat_template:
            raise PromptError(f"{llm.model_name} has no chat template, so it cannot chat: try kvist run --raw")
        with closing(Conversation(llm, params, system)) as conversation:
            if typed:
                print_note(f"{llm.model_name} listens; /help lists the commands, Ctrl-D leaves")
                _talk(conversation)
            else:
                _run_script(conversation)


class Conversation:
    """A session, and what a line typed into it does."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._session = llm.session(system=system)
        self._last: Completion | None = None

    def close(self) -> None:
        self._session.close()

    def take(self, line: str) -> bool:
        """Answer a line or obey its command; False when the line asks to leave."""
        text = line.strip()
        word = text.lower()
        if word == "/quit":
            return False
        if word == "/help":
            for name, meaning in COMMANDS.items():
                print(f"{name:<8}{meaning}", file=sys.stderr)
        elif word == "/stats":
            self._print_statistics()
        elif word == "/reset":
            self._session.reset()
            self._last = None
            print_note("the conversation is forgotten")
        elif text.startswith("/") and text.split()[0].count("/") == 1:  # more of them make a path
            raise OptionError(f"unknown command '{text}': {did_you_mean(word, COMMANDS)}")
        elif text:
            with self._reset_advised():
                self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        self._last = None
        with (
            suppress(KeyboardInterrupt),
            _first_interrupt_asks() as stop_asked,
            self._session.stream_chat(text, self._params) as stream,
            closing(written(stream)) as deltas,
        ):
            for delta in deltas:
                self._last = delta.completion
                if stop_asked.is_set():
                    break

    @contextmanager
    def _reset_advised(self) -> Iterator[None]:
        """Where the conversation so far is what leaves too little room, name the command that forgets it."""
        length = self._session.length
        try:
            yield
        except ContextFullError:
            if not length:
                raise
            raise ContextFullError(
                f"the conversation of {length:,} tokens leaves {self._llm.max_context - length:,} of the context of "
                f"{self._llm.max_context:,}, too little for the new text: shorten it, or forget the conversation with "
                "/reset"
            ) from None
        except CacheFullError as error:
            if not length:
                raise
            raise CacheFullError(f"{error}, or forget the conversation with /reset") from None

    def _print_statistics(self) -> None:
        context = {"context": f"{self._session.length:,} of {self._llm.max_context:,} tokens"}
        if self._last is None:
            print_note("there is no finished answer to tell of")
            print_statistics(context)
        else:
            print_statistics(Report.of(self._llm, self._last).statistics() | context)


def _talk(conversation: Conversation) -> None:
    """Lines of a person: a mistake is told, and the chat goes on."""
    for line in typed_lines("> "):
        try:
            if not conversation.take(line):
                return
        except KvistError as error:
            print_error(str(error))


def _run_script(conversation: Conversation) -> None:
    """Lines of a pipe or file: the first mistake ends it, since what follows would rest on it."""
    for line in piped_lines():
        if not conversation.take(line):
            return


@contextmanager
def _first_interrupt_asks() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C only sets the event, so that the text ends with a whole token; the next interrupts."""
    asked = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        if asked.is_set():
            signal.default_int_handler(signum, frame)
        asked.set()

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
