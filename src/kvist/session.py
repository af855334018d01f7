"""A sequence that a user keeps: it is appended to, and its history is not computed again."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from kvist.config import SamplingParams, checked_params
from kvist.engine import DeltaStream, Engine, Request, Room, Sequence
from kvist.engine.one_user import OneUser
from kvist.engine.prompt import Prompt, prompt_ids
from kvist.engine.text import text_after
from kvist.engine.uninterrupted import uninterrupted
from kvist.errors import ContextFullError, PromptError, StateError
from kvist.results import Completion

if TYPE_CHECKING:
    from kvist.loading.chat_template import Message
    from kvist.loading.tokenizer import Tokenizer


@dataclass(frozen=True)
class _History:
    """What a session has seen and said.

    Attributes:
        token_ids: what the next turn continues. The cache may hold fewer of them, or others after a common beginning.
        text: what they were made from; None once token ids were appended.
        is_exact: whether `token_ids` read as `text`. Where a stop string cut a token they only begin it.
        is_chat: whether a chat template wrote the text, with its special tokens in it.
    """

    token_ids: list[int]
    text: str | None
    is_exact: bool
    is_chat: bool


class Session:
    """A conversation, or a text to go on with, whose keys and values stay in the cache.

    A turn computes only what is new; `Completion.cached_tokens` says how much was there. A turn that fails leaves the
    session as it was. One that is interrupted, or whose stream is closed or dropped, keeps what was generated and
    handed out up to then; a new call ends an open stream in the same way. It is a context manager.

    Args:
        engine: what runs it.
        tokenizer: the model's.
        system: a system message that every conversation begins with.

    Attributes:
        messages: the conversation so far. It may be edited: the next turn computes what no longer matches.
    """

    _history: _History
    _room: Room

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._system = system
        self._one_user = OneUser("another thread is using this session: it takes one turn at a time")
        self._stream: weakref.ref[DeltaStream] | None = None
        self._begin_anew()

    @property
    def length(self) -> int:
        """Tokens of the history."""
        return len(self._history.token_ids)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Append a text or token ids as they are, and generate what follows.

        An empty text goes on where the session is. After a chat, the text is part of the assistant's last message.

        Raises:
            PromptError: nothing to go on from, or (`ContextFullError`) too long for what the history leaves of the
                context.
            StateError: the session or its LLM is closed, or another thread is using the session.
            CacheFullError: the history, the prompt and what may be generated do not fit into the cache.
            OptionError, NumericsError: as `LLM.generate`.
        """
        with self._alone():
            return _completion(self._append(prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> DeltaStream:
        """As `generate`, handing out the text while it comes."""
        with self._alone():
            return self._append(prompt, params)

    def chat(self, text: str, params: SamplingParams | None = None) -> Completion:
        """Say something to the model and get its answer; both are added to `messages`.

        Raises what `generate` raises, and `PromptError` where the model has no chat template or the session holds
        text that did not come from a chat.
        """
        with self._alone():
            return _completion(self._say(text, params))

    def stream_chat(self, text: str, params: SamplingParams | None = None) -> DeltaStream:
        """As `chat`, handing out the answer while it comes."""
        with self._alone():
            return self._say(text, params)

    def reset(self) -> None:
        """Forget everything but the system message, and give the memory back."""
        with self._alone():
            self._end_stream()
            self._release_room()
            self._begin_anew()

    def close(self) -> None:
        """Give the memory back. The session cannot be used after it."""
        with self._alone(closing=True):
            self._end_stream()
            self._release_room()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- a turn -------------------------------------------------------------------------------------------------------

    def _say(self, text: str, params: SamplingParams | None) -> DeltaStream:
        requested_at = time.perf_counter()
        self._end_stream()
        if not text:
            raise PromptError("the message is empty: give some text")
        if self._history.token_ids and not self._history.is_chat:
            raise PromptError("this session holds text that no chat template can place: reset() it before chatting")
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        rendered = self._tokenizer.render_chat(messages)
        token_ids = self._continued(rendered, is_chat=True)

        def end(sequence: Sequence, num_tokens: int) -> None:
            if num_tokens:
                said_ids, said = sequence.said(num_tokens)
                self._history = self._history_after(sequence.prompt_ids, said_ids, rendered, said, is_chat=True)
                self.messages[:] = [*messages, {"role": "assistant", "content": said}]

        return self._start(token_ids, params, requested_at, end)

    def _append(self, prompt: Prompt, params: SamplingParams | None) -> DeltaStream:
        requested_at = time.perf_counter()
        self._end_stream()
        history, decode, encode = self._history, self._tokenizer.decode, self._tokenizer.encode
        if isinstance(prompt, str) and history.text is not None:
            text = history.text + prompt
            token_ids = self._continued(text, is_chat=history.is_chat)
        else:
            text = None
            token_ids = history.token_ids + prompt_ids(prompt, encode, add_special_tokens=not history.token_ids)

        def end(sequence: Sequence, num_tokens: int) -> None:
            if num_tokens:
                said_ids, said = sequence.said(num_tokens)
                self._history = self._history_after(sequence.prompt_ids, said_ids, text, said, is_chat=history.is_chat)
                if history.is_chat and self.messages:
                    # Not decode(prompt): its owner may have changed it since.
                    appended = prompt if isinstance(prompt, str) else decode(token_ids[len(history.token_ids) :])
                    self.messages[-1]["content"] += appended + said

        return self._start(token_ids, params, requested_at, end)

    def _start(
        self,
        token_ids: list[int],
        params: SamplingParams | None,
        requested_at: float,
        end: Callable[[Sequence, int], None],
    ) -> DeltaStream:
        max_context, length = self._engine.config.max_context, self.length
        if length and len(token_ids) >= max_context:
            raise ContextFullError(
                f"with the new text the session has {len(token_ids):,} tokens, and its history of {length:,} leaves "
                f"{max(0, max_context - length):,} of the context of {max_context:,}: shorten the text, or reset() "
                "the session"
            )
        request = Request(token_ids, checked_params(params), requested_at, self._room)
        with uninterrupted():  # so that nothing is submitted that no stream gives up
            stream = DeltaStream(self._engine, self._engine.submit([request])[0], end)
            self._stream = weakref.ref(stream)  # weak: a stream that its reader drops must end
        return stream

    def _continued(self, text: str, *, is_chat: bool) -> list[int]:
        """The tokens of a text: those of the history and of what follows it, where the text begins with the history."""
        history, encode = self._history, self._tokenizer.encode
        if history.token_ids and history.is_exact and history.text is not None and text.startswith(history.text):
            rest = text[len(history.text) :]
            rest_ids = encode(rest, add_special_tokens=False) if rest else []
            decode = partial(self._tokenizer.decode, skip_special_tokens=False)
            # Some tokenizers put a space before whatever they encode.
            if text_after(decode, history.token_ids, rest_ids) == rest:
                return history.token_ids + rest_ids
        return encode(text, add_special_tokens=not is_chat) if text else []

    def _history_after(
        self, prompt_ids: list[int], said_ids: list[int], prompt_text: str | None, said: str, *, is_chat: bool
    ) -> _History:
        """The history with what was handed out; of its tokens those that are in its text as a whole."""
        kept_ids = list(said_ids)
        while kept_ids and not said.startswith(text_after(self._tokenizer.decode, prompt_ids, kept_ids)):
            kept_ids.pop()
        return _History(
            token_ids=prompt_ids + kept_ids,
            text=None if prompt_text is None else prompt_text + said,
            is_exact=text_after(self._tokenizer.decode, prompt_ids, kept_ids) == said,
            is_chat=is_chat,
        )

    # --- its life -----------------------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self._history = _History([], "", is_exact=True, is_chat=False)
        self.messages[:] = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._room = self._engine.open_room()
        # A session that is dropped without close() gives its memory back too.
        self._release_room = weakref.finalize(self, self._engine.close_room, self._room)
        self._release_room.atexit = False

    def _end_stream(self) -> None:
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            stream.close(because="a later call on its session has ended this stream")

    @contextmanager
    def _alone(self, *, closing: bool = False) -> Iterator[None]:
        with self._one_user:
            if not closing and not self._release_room.alive:
                raise StateError("this session is closed: open another with LLM.session()")
            yield


def _completion(stream: DeltaStream) -> Completion:
    *_, last = stream
    if last.completion is None:
        raise ValueError("a stream ended without its completion")
    return last.completion
