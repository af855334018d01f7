"""Where chat templates run: Jinja's sandbox, with bounds on the time and the memory that a template can take.

A template is a program that came with a model, so nothing in it is believed. Three rules bound it:

- **Steps** are counted: every turn of a loop and every call is one.
- **Characters** are paid for: whatever a template makes or writes counts by its size, so what it holds at any moment is
  never more than all that it may make.
- **Growth** is foreseen: what can make much of little in one step (`'a' * n`, `center`, `replace`, `format`, ...) is
  measured before it runs. Methods and filters that are neither known to stay small nor measured are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.utils
import jinja2.visitor
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist.errors import shown
from kvist.loading.chat_template_bounds import (
    ENTRY,
    LINEAR_FILTERS,
    LINEAR_METHODS,
    MAX_CHARACTERS,
    MAX_EXPONENT,
    check_format,
    check_growth,
    check_size,
    joinable,
    measure,
    size_of,
)

# Far above what a conversation that fits a context takes.
_MAX_CHARACTERS_MADE = 10 * MAX_CHARACTERS
_MAX_STEPS = 100_000
_MAX_STEPS_PER_MESSAGE = 1_000
_MAX_PATTERN = 1_000

_COMPARING_TESTS = frozenset((
    "in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge", ">=",
))  # fmt: skip


class RefusalError(jinja2.TemplateError):
    """The template itself says that it cannot write these messages."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's language as transformers' `apply_chat_template` offers it, bounded."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        self.start(0)
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests
        tests.update({name: self._paid_test(tests[name]) for name in _COMPARING_TESTS})
        # They take the context so that Jinja does not compute them once, when it compiles.
        self.filters["_counted"] = jinja2.pass_context(lambda _, values: self._counted(values))
        self.filters["_paid"] = jinja2.pass_context(lambda _, value: self.paid(value))
        self.filters["_spent"] = jinja2.pass_context(lambda _, characters: self._spent(characters))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _new_dict
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def start(self, num_messages: int) -> None:
        """Grant what one conversation may take."""
        self._steps_left = _MAX_STEPS + _MAX_STEPS_PER_MESSAGE * num_messages
        self._characters_left = _MAX_CHARACTERS_MADE

    def compiled(self, source: str) -> jinja2.Template:
        """The template with its bounds written into it."""
        return self.from_string(_Bounded().visit(self.parse(source)))

    def paid(self, value: Any) -> Any:
        """The value, once it is known to be small enough and has been paid for."""
        size, num_entries = measure(value)
        check_size(size)
        # The texts in a list were paid for when they were made.
        self._spend(size if isinstance(value, (str, bytes)) else num_entries * ENTRY)
        return value

    # --- what templates do, as Jinja calls it ---

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        subject = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps `format`
        if isinstance(subject, (str, bytes, int, float, Collection)):
            name = getattr(obj, "__name__", "?")
            self.paid(subject)
            if name == "join" and args:
                args = (joinable(args[0], subject), *args[1:])
            elif name in ("format", "format_map"):
                check_format(subject, "{", (args, kwargs))
            else:
                check_growth(name, subject, [*args, *kwargs.values()], LINEAR_METHODS)
        return self.paid(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes)) and operator == "%":
            check_format(left, "%", right)
        elif operator in ("*", "**"):
            plain = all(isinstance(value, (int, float)) and abs(value) <= MAX_CHARACTERS for value in (left, right))
            sized = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
            repeated = [value for value in (left, right) if isinstance(value, int)]
            if operator == "*" and sized and repeated:
                plain = size_of(sized[0]) * repeated[0] <= MAX_CHARACTERS
            elif operator == "**":
                plain = plain and abs(right) <= MAX_EXPONENT
            if not plain:
                raise SecurityError(f"it computes too large a '{operator}'")
        return self.paid(super().call_binop(context, operator, left, right))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # where Jinja hands itself over

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            before, subject, others = args[:first], args[first], args[first + 1 :]
            if name == "replace":
                others += tuple(kwargs.pop(key) for key in ("old", "new") if key in kwargs)
            arguments = [*others, *kwargs.values()]
            self.paid(subject)
            if name == "join":
                separator, attribute = _join_arguments(*others, **kwargs)
                if attribute is not None:
                    subject = map(make_attrgetter(self, attribute), subject)
                subject, others, kwargs = joinable(subject, separator), (separator,), {}
            elif name == "format":
                check_format(str(subject), "%", arguments)
            else:
                check_growth(name, subject, arguments, LINEAR_FILTERS)
            return self.paid(function(*before, subject, *others, **kwargs))

        return bounded

    def _paid_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any) -> Any:
            for value in args:
                self.paid(value)
            return function(*args)

        return bounded

    # --- the account ---

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise SecurityError("it takes too many steps")

    def _spent(self, characters: int) -> str:
        self._spend(characters)
        return ""

    def _spend(self, characters: int) -> None:
        self._characters_left -= characters
        if self._characters_left < 0:
            raise SecurityError(f"it makes more than {_MAX_CHARACTERS_MADE} characters on its way")


class _Bounded(jinja2.visitor.NodeTransformer):
    """Rewrites a template so that it counts its turns and pays for what no method of the environment sees."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 (Jinja's names)
        self.generic_visit(node)
        node.iter = _through("_counted", node.iter)
        return node

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Output:  # noqa: N802
        self.generic_visit(node)
        plain = sum(len(child.data) for child in node.nodes if isinstance(child, jinja2.nodes.TemplateData))
        nodes = [
            child if isinstance(child, jinja2.nodes.TemplateData) else _through("_paid", child) for child in node.nodes
        ]
        if plain:
            nodes.insert(0, _through("_spent", jinja2.nodes.Const(plain, lineno=node.lineno)))
        node.nodes = nodes
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_through("_paid", child) for child in node.nodes]
        return _through("_paid", node)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        node.expr = _through("_paid", node.expr)
        for operand in node.ops:
            operand.expr = _through("_paid", operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _through("_paid", node) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _through("_paid", node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _through("_paid", node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _through("_paid", node) if node.ctx == "load" else node


def _join_arguments(d: Any = "", attribute: Any = None) -> tuple[Any, Any]:
    return d, attribute


def _through(name: str, node: jinja2.nodes.Node) -> jinja2.nodes.Expr:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# --- what transformers adds to the language ---------------------------------------------------------------------------


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only read over."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, without names that Python keeps for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its content is not measured where it is written


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"it stores {shown(name)}, and names that begin with _ are off limits")


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
    raise RefusalError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN:
        raise SecurityError(f"it writes a date by a pattern of more than {_MAX_PATTERN} characters")
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
