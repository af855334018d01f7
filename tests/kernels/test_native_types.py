"""`native_types` says what the library has: the same names, and of each the same parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvist.kernels import native, native_types

LIBRARY = native._library()
HANDLES = [native_types.PageLayer, native_types.PageStep, native_types.LinearWeight, native_types.HiddenRows]
HANDLES += [native_types.DecoderLayer]


def public(names: object) -> set[str]:
    return {name for name in vars(names) if not name.startswith("_")}


def stated(function: Callable[..., Any]) -> list[str]:
    """Names of parameters, after which `*` those that are given by name alone."""
    _self, *parameters = inspect.signature(function).parameters.values()
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return by_place + (["*", *by_name] if by_name else [])


def bound(function: Callable[..., Any]) -> list[str]:
    """The same of a native function, from the signature that its documentation is."""
    assert function.__doc__ is not None
    found = re.match(r"\w+\((.*)\) -> ", function.__doc__)
    assert found is not None
    parameters, count = found.group(1), 1
    while count:  # what stands in brackets is types
        parameters, count = re.subn(r"\[[^\[\]]*\]", "", parameters)
    return [name for name in (p.split(":")[0].strip() for p in parameters.split(",")) if name not in ("self", "")]


def test_the_library_has_what_is_stated_and_nothing_else() -> None:
    assert public(LIBRARY) == public(native_types.Library) | {"LAYER_STAGES"}


@pytest.mark.parametrize("name", sorted(public(native_types.Library)))
def test_functions_have_the_parameters_that_are_stated(name: str) -> None:
    function = getattr(LIBRARY, name)
    made = function.__init__ if isinstance(function, type) else function
    assert bound(made) == stated(getattr(native_types.Library, name))


@pytest.mark.parametrize("handle", HANDLES, ids=lambda handle: handle.__name__)
def test_handles_have_the_methods_that_are_stated(handle: type) -> None:
    given = getattr(LIBRARY, handle.__name__)
    assert public(given) == public(handle)
    for name in public(handle):
        assert bound(getattr(given, name)) == stated(getattr(handle, name))
