"""What a chat template may make in one step: sizes, measured before there is anything to measure."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from kvist.errors import shown

# Far above what a conversation that fits a context takes.
MAX_CHARACTERS = 10_000_000
_MAX_DEPTH = 100
MAX_EXPONENT = 64

# What an entry of a list or mapping counts besides its text: it takes as much memory as many characters. A text may be
# split into one entry per character.
ENTRY = 10
_MAX_CHARACTERS_SPLIT = MAX_CHARACTERS // ENTRY

# Filters and methods whose result is at most a small multiple of what they are given.
LINEAR_FILTERS = frozenset((
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "filesizeformat", "first",
    "float", "forceescape", "int", "items", "last", "length", "lower", "max", "min", "random", "reverse", "safe",
    "string", "title", "trim", "truncate", "upper", "urlencode", "wordcount",
))  # fmt: skip
LINEAR_METHODS = frozenset((
    "capitalize", "casefold", "copy", "count", "endswith", "find", "get", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
    "items", "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition",
    "rstrip", "startswith", "strip", "swapcase", "title", "upper", "values", "is_integer",
))  # fmt: skip
# The same, but of a text they make a list.
_SPLITTING = frozenset((
    "groupby", "list", "map", "reject", "rejectattr", "select", "selectattr", "sort", "split", "rsplit", "splitlines",
    "sum", "unique",
))  # fmt: skip
# What their arguments can multiply.
_SIZED = frozenset((
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "zfill",
))  # fmt: skip


def size_of(value: object) -> int:
    """The first of `measure`."""
    return measure(value)[0]


def measure(value: object) -> tuple[int, int]:
    """About how long a value is when it is written, and how many values it is made of; counting stops where that is too
    much.

    A value counts as often as it is written: a list that holds one other list twice is longer than both.
    """
    if isinstance(value, (str, bytes)):
        return len(value), 1
    size, num_entries, stack = 0, 0, [(value, 0)]
    while stack and size <= MAX_CHARACTERS:
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise SecurityError(f"it nests values more than {_MAX_DEPTH} deep")
        size, num_entries = size + ENTRY + depth, num_entries + 1
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, Collection):
            if len(item) * ENTRY > MAX_CHARACTERS:
                return len(item) * ENTRY, len(item)
            parts = (part for pair in item.items() for part in pair) if isinstance(item, Mapping) else item
            stack.extend((part, depth + 1) for part in parts)
    return size, num_entries


def check_size(size: int) -> None:
    """Refuse a value of this size."""
    if size > MAX_CHARACTERS:
        raise SecurityError(f"it makes a value of more than {MAX_CHARACTERS} characters")


def check_growth(name: str, subject: Any, arguments: list[Any], linear: Collection[str]) -> None:
    """Refuse a filter or method that could make too much of what it is given."""
    if name in linear:
        return
    if name in _SPLITTING:
        if isinstance(subject, (str, bytes)) and len(subject) > _MAX_CHARACTERS_SPLIT:
            raise SecurityError(f"it splits a text of more than {_MAX_CHARACTERS_SPLIT} characters")
        # A sum of lists copies each of them again and again; a long path is followed for every item.
        if name == "sum" and any(isinstance(value, (list, tuple)) for value in arguments):
            raise SecurityError("it adds up lists")
        if any(isinstance(value, str) and value.count(".") > _MAX_DEPTH for value in arguments):
            raise SecurityError("it names too long an attribute")
    elif name in _SIZED:
        factors = (abs(value) if isinstance(value, int) else size_of(value) for value in arguments)
        check_size((1 + size_of(subject)) * (1 + sum(factors)))
    elif name == "replace":
        text, old, new = str(subject), str(arguments[0]), str(arguments[1])
        check_size(len(text) + text.count(old) * (len(new) - len(old)))
    elif name == "round":
        if any(isinstance(value, (int, float)) and not abs(value) <= MAX_EXPONENT for value in arguments):
            raise SecurityError(f"it rounds to more than {MAX_EXPONENT} digits")
    else:
        raise SecurityError(f"it uses {shown(name)}, which templates cannot here")


def check_format(template: object, sign: str, arguments: object) -> None:
    """Refuse a formatting whose widths and values could be too long; every field could show all of the arguments."""
    if not isinstance(template, str):
        raise SecurityError("it formats bytes")
    widths = re.findall(r"\d+", template)
    if sign == "%":
        nested = "*" in template
    else:
        fields = list(string.Formatter().parse(template))
        nested = any("{" in (spec or "") for _, _, spec, _ in fields)
        if any(set(".[") & set(name or "") for _, name, _, _ in fields):
            raise SecurityError("it formats a part of a value")  # which may be larger than what is measured here
    if nested or any(len(width) > 9 for width in widths):
        raise SecurityError("it formats with a width that is too large or not written out")
    check_size(len(template) + sum(map(int, widths)) + template.count(sign) * (1 + size_of(arguments)))


def joinable(values: Any, separator: Any) -> list[Any]:
    """The values of a `join` as a list, once their text is known not to be too long."""
    if isinstance(values, (str, bytes)) and len(values) > _MAX_CHARACTERS_SPLIT:
        raise SecurityError(f"it splits a text of more than {_MAX_CHARACTERS_SPLIT} characters")
    items = list(values)
    check_size(size_of(items) + size_of(separator) * len(items))
    return items
