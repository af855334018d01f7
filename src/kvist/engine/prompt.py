"""From what a caller gives as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kvist.checks import is_integer
from kvist.errors import PromptError

Prompt: TypeAlias = str | Sequence[int]
"""A text, or the token ids of one."""


class Encode(Protocol):
    """A tokenizer's way from text to token ids."""

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...


def prompt_ids(prompt: Prompt, encode: Encode, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a prompt. Ids are taken as they are, and an empty text has none, not even a BOS token."""
    if isinstance(prompt, str):
        return encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
    if is_token_ids(prompt):
        return [int(token_id) for token_id in prompt]
    raise PromptError(f"a prompt is a text or a list of token ids, not {_described(prompt)}")


def is_token_ids(prompt: object) -> bool:
    """Whether a prompt is token ids, rather than text or a list of prompts."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes, bytearray))
        and all(map(is_integer, prompt))
    )


def _described(prompt: object) -> str:
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
        return f"a {type(prompt).__name__} of {', '.join(sorted({type(item).__name__ for item in prompt}))}"
    return f"a {type(prompt).__name__}"
