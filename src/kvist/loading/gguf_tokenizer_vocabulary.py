"""The vocabulary that a GGUF file describes, checked: its metadata is whatever someone wrote into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvist.errors import ModelFileError, shown
from kvist.loading.end_tokens import END_TOKENS
from kvist.loading.untrusted_file import DAMAGED

PREFIX = "tokenizer.ggml."

_Value = TypeVar("_Value", str, int, bool)


class TokenType(IntEnum):
    """What a GGUF says of a token, as llama.cpp numbers it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Found in a text as a whole, before anything else is done to it.
MATCHED_WHOLE = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, what each is, and the ids that have a role.

    Attributes:
        tokens: all different.
        types: one for each token.
        ids: the id of each token.
        special_ids: by role (bos, eos, eot, eom, unknown, padding), those that the file gives.
    """

    tokens: list[str]
    types: list[TokenType]
    ids: dict[str, int]
    special_ids: dict[str, int]


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in the key-value pairs of a GGUF; `ModelFileError` where they contradict themselves."""
    tokens = read_strings(metadata, "tokens")
    if not tokens:
        raise ModelFileError("the GGUF file has no tokens (tokenizer.ggml.tokens): take a file with a tokenizer")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        index, token = next((index, token) for index, token in enumerate(tokens) if ids[token] != index)
        raise ModelFileError(f"the GGUF file's tokens {index} and {ids[token]} are both {shown(token)}: {DAMAGED}")

    numbers = read_numbers(metadata, "token_type", len(tokens), "iu")
    if numbers is None:
        types = [TokenType.NORMAL] * len(tokens)
    else:
        known = {int(kind): kind for kind in TokenType}
        types = [known.get(number, TokenType.UNDEFINED) for number in numbers.tolist()]

    special_ids: dict[str, int] = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        special = read_value(metadata, f"{PREFIX}{role}_token_id", int)
        if special is None:
            continue
        if not 0 <= special < len(tokens):
            raise ModelFileError(
                f"the GGUF file's {role} token is {special}, beyond its {len(tokens)} tokens: {DAMAGED}"
            )
        special_ids[role] = special
    # The unknown and padding ids of some files point at plain tokens; those must stay plain.
    mended = [special for role, special in special_ids.items() if role not in ("unknown", "padding")]
    # Files that list an end token as a plain one are mended, as llama.cpp does: a template that writes it means it.
    mended += sorted(ids[token] for token in END_TOKENS if token in ids)
    for index in mended:
        if types[index] is TokenType.NORMAL:
            types[index] = TokenType.CONTROL
    return Vocabulary(tokens, types, ids, special_ids)


# --- untrusted values -------------------------------------------------------------------------------------------------


def read_value(metadata: Mapping[str, object], key: str, kind: type[_Value]) -> _Value | None:
    """One value of the metadata; None where it is missing, `ModelFileError` where it is of another kind."""
    value = metadata.get(key)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return None
    # A bool is an int to isinstance.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = type(value).__name__
        raise ModelFileError(f"the GGUF file's {key} is of type {found}, not {kind.__name__}: {DAMAGED}")
    return value


def read_strings(metadata: Mapping[str, object], name: str) -> list[str]:
    """A list of strings that the tokenizer cannot do without."""
    values = metadata.get(PREFIX + name)
    if values is None:
        raise ModelFileError(f"the GGUF file has no {PREFIX}{name}, which its tokenizer needs: {DAMAGED}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"the GGUF file's {PREFIX}{name} is not a list of strings: {DAMAGED}")
    return values


def read_numbers(metadata: Mapping[str, object], name: str, size: int, kinds: str) -> npt.NDArray[Any] | None:
    """`size` numbers whose numpy kind is one of `kinds`; None where they are missing."""
    values = metadata.get(PREFIX + name)
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in kinds:
        raise ModelFileError(f"the GGUF file's {PREFIX}{name} is not a list of numbers of the right kind: {DAMAGED}")
    if len(values) != size:
        raise ModelFileError(f"the GGUF file has {size} tokens, but {len(values)} entries in {PREFIX}{name}: {DAMAGED}")
    return values
