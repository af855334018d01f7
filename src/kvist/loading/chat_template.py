"""Chat templates: a model's own Jinja program that writes a conversation as the text it was trained on.

The program comes with the model, so it runs in Jinja's sandbox: it reads messages and special tokens, changes nothing,
and stops after a bounded number of steps. What it is given and may call is what transformers' `apply_chat_template`
gives it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, TypedDict

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.utils
import jinja2.visitor
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist.errors import PromptError

# Far above what a conversation that fits a context takes. A step is a turn of a loop or a call.
_MAX_STEPS = 100_000
_MAX_STEPS_PER_MESSAGE = 1_000
_MAX_CHARACTERS = 100_000_000


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
        self._environment = _Sandbox()
        # The step count is the environment's, so one conversation is written at a time.
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
                self._environment.steps_left = _MAX_STEPS + _MAX_STEPS_PER_MESSAGE * len(messages)
                return "".join(_bounded(self._compiled.generate(variables)))
        except _RefusalError as error:
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
        tree = _CountLoopTurns().visit(self._environment.parse(self._source))
        return self._environment.from_string(tree)


def _plain(messages: Sequence[Message]) -> list[dict[str, object]]:
    if isinstance(messages, (str, Mapping)) or not messages:
        raise PromptError("a chat needs a list of at least one message, like [{'role': 'user', 'content': 'Hello'}]")
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"a message needs a role and a content, both text; this one is {message!r:.100}")
        if not isinstance(message.get("content"), str):
            raise PromptError(f"the content of a {message['role']} message must be text; it is {message!r:.100}")
        plain.append({key: value for key, value in message.items() if value is not None})
    return plain


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    written = 0
    for piece in pieces:
        written += len(piece)
        if written > _MAX_CHARACTERS:
            raise jinja2.exceptions.SecurityError(f"it writes more than {_MAX_CHARACTERS} characters")
        yield piece


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


# --- the sandbox ------------------------------------------------------------------------------------------------------


class _RefusalError(jinja2.TemplateError):
    """The template itself says that it cannot write these messages."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only read over."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _CountLoopTurns(jinja2.visitor.NodeTransformer):
    """Rewrites `for x in y` to `for x in y|counted`."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without names that Python keeps for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"it stores {name!r}, and names that begin with _ are off limits")


class _Sandbox(ImmutableSandboxedEnvironment):
    # A product or a power can take for ever without a single step.
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.steps_left = 0
        self.filters["tojson"] = _to_json
        self.filters["counted"] = self._counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _new_dict
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        plain = all(isinstance(value, (int, float)) and abs(value) <= _MAX_CHARACTERS for value in (left, right))
        sized = [value for value in (left, right) if isinstance(value, (str, list, tuple))]
        repeated = [value for value in (left, right) if isinstance(value, int)]
        if operator == "*" and sized and repeated:
            plain = len(sized[0]) * repeated[0] <= _MAX_CHARACTERS
        elif operator == "**":
            plain = plain and abs(right) <= 64
        if not plain:
            raise jinja2.exceptions.SecurityError(f"it computes too large a '{operator}'")
        return super().call_binop(context, operator, left, right)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise jinja2.exceptions.SecurityError("it takes too many steps")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
