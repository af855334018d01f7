"""The text that is predicted, in windows of tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvist.config import ModelConfig
from kvist.errors import ContextFullError, PromptError, shown
from kvist.evaluate.eval_config import LEAST_WINDOW
from kvist.loading.tokenizer import Tokenizer

# So many tokens in a row are the same only where the text is.
_PASSAGE_TOKENS = 32
# Of a text that is tokenized as a whole: a book has one or two.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class EvaluationText:
    """A text.

    Attributes:
        name: of its file, without its folder.
        sha256: of its bytes.
        text: what it says.
    """

    name: str
    sha256: str
    text: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> EvaluationText:
        """Read a file.

        Raises:
            PromptError: it cannot be read, is empty, or holds no text in UTF-8.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise PromptError(f"the text {path} cannot be read: {error.strerror or error}") from None
        if len(data) > _MOST_BYTES:
            raise PromptError(f"the text {path} is larger than {_MOST_BYTES >> 20} MiB: give a part of it")
        return replace(cls.of(data, f"the text {path}"), name=path.name)

    @classmethod
    def of(cls, data: bytes, name: str) -> EvaluationText:
        """The text of a file's bytes.

        Raises:
            PromptError: it is empty, or no text in UTF-8.
        """
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise PromptError(
                f"{name} is not a text in UTF-8: give a text file, or convert it first, for instance with iconv"
            ) from None
        if "\0" in text:
            raise PromptError(f"{name} holds zero bytes, as no text does: give a text file in UTF-8")
        if not text.strip():
            raise PromptError(f"{name} is empty: give one of some thousand words")
        return cls(name, hashlib.sha256(data).hexdigest(), text)


class WindowsConfig(Protocol):
    """How much of a text: so many tokens in one sequence, and so many sequences."""

    @property
    def window(self) -> int: ...

    @property
    def windows(self) -> int: ...


def text_windows(tokenizer: Tokenizer, model: ModelConfig, text: str, config: WindowsConfig) -> list[list[int]]:
    """Token ids of the windows, which follow one another from the text's beginning on.

    Where the tokenizer puts the model's BOS token before a text, each window begins with it, and has one token of the
    text less.

    Raises:
        ContextFullError: a window is longer than the model's context.
        PromptError: the text is too short, or holds a token that the model does not have.
    """
    if config.window > model.max_context:
        raise ContextFullError(
            f"a window of {config.window:,} tokens exceeds the model's context of {model.max_context:,}: take a "
            "shorter one"
        )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    start = start_tokens(tokenizer)
    step = config.window - len(start)
    if len(token_ids) < config.windows * step:
        raise PromptError(_too_short(len(token_ids), config, len(start)))
    found = [start + token_ids[i * step : (i + 1) * step] for i in range(config.windows)]
    highest = max(map(max, found))
    if highest >= model.vocab_size:
        written = tokenizer.decode([highest], skip_special_tokens=False)
        raise PromptError(f"the text holds {shown(written)}, a token that this model does not have: take it out")
    return found


def holds_part_of(windows: Sequence[Sequence[int]], other: Sequence[int]) -> bool:
    """Whether windows have a passage of another text, given as its token ids."""
    passages = {
        tuple(other[first : first + _PASSAGE_TOKENS])
        for first in range(0, len(other) - _PASSAGE_TOKENS + 1, _PASSAGE_TOKENS)
    }
    return any(
        tuple(window[first : first + _PASSAGE_TOKENS]) in passages
        for window in windows
        for first in range(len(window) - _PASSAGE_TOKENS + 1)
    )


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The BOS token, where the tokenizer begins texts with it."""
    special = tokenizer.encode("", add_special_tokens=True)
    return special[:1] if tokenizer.bos_token_id is not None and special[:1] == [tokenizer.bos_token_id] else []


def _too_short(num_tokens: int, config: WindowsConfig, num_start: int) -> str:
    fitting, longest = num_tokens // (config.window - num_start), num_tokens // config.windows + num_start
    choices = []
    if fitting:
        choices.append(f"take {_windows(fitting)} of them")
    if longest >= LEAST_WINDOW:
        choices.append(f"a window of {longest:,}" if choices else f"take a window of {longest:,} tokens at most")
    choices.append("give a longer text")
    advice = ", ".join(choices[:-1]) + " or " * (len(choices) > 1) + choices[-1]
    return f"the text has {num_tokens:,} tokens, too few for {_windows(config.windows)} of {config.window:,}: {advice}"


def _windows(number: int) -> str:
    return "1 window" if number == 1 else f"{number:,} windows"
