"""Chat templates: a model's own Jinja program that writes a conversation as the text it was trained on.

The program comes with the model, so it runs in a sandbox: it reads messages and special tokens, changes nothing, and
takes bounded time and memory. What it is given and may call is what transformers' `apply_chat_template` gives it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypedDict

import jinja2

from kvist.errors import PromptError, shown
from kvist.loading.chat_template_bounds import MAX_CHARACTERS
from kvist.loading.chat_template_sandbox import RefusalError, Sandbox


class Message(TypedDict):
    """One turn of a conversation: who speaks (`system`, `user`, `assistant`), and what."""

    role: str
    content: str


class ChatTemplate:
    """A chat template, compiled on first use.

    Args:
        source: the Jinja program.
        special_tokens: what it may write besides messages, by name (`bos_token`).
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._environment = Sandbox()
        # The account is the environment's, so one conversation is written at a time.
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text, which holds its special tokens already.

        Args:
            messages: at least one. Keys besides role and content are handed to the template too.
            add_generation_prompt: end with what opens the assistant's turn.

        Raises:
            PromptError: the messages are malformed, or the template refuses them, fails, or does not end.
        """
        variables = {
            **self._special_tokens,
            "messages": _plain(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._lock:
                self._environment.start(len(messages))
                return "".join(_bounded(self._compiled.generate(variables)))
        except RefusalError as error:
            raise PromptError(
                f"the model's chat template refuses these messages: {_one_line(error)}; change them, or write the "
                "prompt yourself with --raw or generate()"
            ) from error
        # Anything can come out of a program that someone else wrote.
        except Exception as error:
            raise PromptError(
                f"the model's chat template fails ({type(error).__name__}: {_one_line(error)}): write the prompt "
                "yourself with --raw or generate()"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.compiled(self._source)


def _plain(messages: Sequence[Message]) -> list[dict[str, object]]:
    if isinstance(messages, (str, Mapping)) or not messages:
        raise PromptError("a chat needs a list of at least one message, like [{'role': 'user', 'content': 'Hello'}]")
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"a message needs a role and a content, both text; this one is {shown(message)}")
        if not isinstance(message.get("content"), str):
            raise PromptError(f"the content of a message must be text; this one is {shown(message)}")
        plain.append({key: value for key, value in message.items() if value is not None})
    return plain


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    written = 0
    for piece in pieces:
        written += len(piece)
        if written > MAX_CHARACTERS:
            raise jinja2.exceptions.SecurityError(f"it writes more than {MAX_CHARACTERS} characters")
        yield piece


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
