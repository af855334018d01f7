"""What the values of options may be: whoever gives another is told at once, before any work rests on it.

Each check returns the value in its plain form, an `int` for NumPy's and a tuple for a list, else raises `OptionError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TypeGuard, cast

from kvist.errors import OptionError, shown

_MOST_SHOWN = 80

_MOST_NUMBER = 1e300


def is_integer(value: object) -> bool:
    """Whether a value counts: an `int`, NumPy's included. A bool does not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value measures: an integer or a `float`, NumPy's included. A bool does not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value measures, and is no larger than can be computed with: as read from a file of anybody's."""
    return is_number(value) and abs(cast(float, value)) < _MOST_NUMBER


def check_integer(option: str, value: object, least: int, most: int | None = None, *, note: str = "") -> int:
    """An integer within the bounds, both included; a refusal ends with `note`."""
    if is_integer(value):
        integer = int(cast(int, value))
        if least <= integer and (most is None or integer <= most):
            return integer
    kind = "" if is_integer(value) else "an integer, "
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    raise OptionError(f"{option} is {in_words(value)}: it must be {kind}{bounds}{note}")


def check_number(
    option: str, value: object, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False
) -> float:
    """A finite number within the bounds, both included unless `open_low`."""
    if is_number(value):
        number = _float(value)
        if math.isfinite(number) and low <= number <= high and not (open_low and number == low):
            return number
    least = f"above {low}" if open_low else f"at least {low}"
    bounds = least if high == math.inf else f"{least} and at most {high}"
    kind = "" if is_number(value) else "a number "
    raise OptionError(
        f"{option} is {in_words(value)}: it must be {'a finite number' if low == -math.inf else kind + bounds}"
    )


def strings(option: str, values: object) -> tuple[str, ...]:
    """Texts of a list, or one alone; None is none."""
    texts = (values,) if isinstance(values, str) else _items(option, values, "strings")
    for text in texts:
        if not isinstance(text, str):
            raise OptionError(f"{option} holds {in_words(text)}: each must be a string")
    return cast(tuple[str, ...], texts)


def token_ids(option: str, values: object) -> tuple[int, ...]:
    """Token ids of a list; None is none."""
    return tuple(_token_id(option, token_id) for token_id in _items(option, values, "token ids"))


def biases(option: str, values: object) -> dict[int, float]:
    """A copy of a mapping from token ids to what is added to their logits, never NaN or +inf; None is none."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise OptionError(f"{option} is {in_words(values)}: it must map token ids to numbers, like {{42: -5.0}}")
    return {_token_id(option, token_id): _bias(option, token_id, value) for token_id, value in values.items()}


def in_words(value: object) -> str:
    """A value for a message, on one line and not long."""
    try:
        text = str(value) if isinstance(value, Real) else shown(value)
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    except ValueError:  # Python writes out no integer of thousands of digits
        return "a number of thousands of digits"


def _items(option: str, values: object, kind: str) -> tuple[object, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise OptionError(f"{option} is {in_words(values)}: it must be a list of {kind}")
    return tuple(values)


def _token_id(option: str, value: object) -> int:
    if not is_integer(value):
        raise OptionError(f"{option} names token {in_words(value)}: token ids are integers")
    return int(cast(int, value))


def _bias(option: str, token_id: object, value: object) -> float:
    if not is_number(value) or not _float(value) < math.inf:
        raise OptionError(
            f"{option}[{in_words(token_id)}] is {in_words(value)}: it must be a finite number, or -inf to forbid the "
            "token"
        )
    return _float(value)


def _float(value: object) -> float:
    try:
        return float(cast(float, value))
    except OverflowError:  # of an integer
        return math.inf if cast(int, value) > 0 else -math.inf
