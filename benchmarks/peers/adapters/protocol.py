"""What an engine does for the comparison, and the loop in which its process is told to: JSON lines over pipes.

It runs in every peer's environment, so it needs the standard library alone.

A request is `{"command": NAME, ...arguments}`, an answer `{"seconds": ..., "token_ids": [...]}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Timed(NamedTuple):
    """What was measured: how long it took, and the tokens that were drawn."""

    seconds: float
    token_ids: list[int]


@dataclass(frozen=True)
class Settings:
    """What an engine is loaded with.

    Attributes:
        model: path of the GGUF file.
        cache: how keys and values are kept, in the engine's own word.
        threads: it computes with.
        max_context: tokens that a sequence must have room for, prompt and drawn ones together.
        work_folder: where it may keep what it makes of the model.
    """

    model: str
    cache: str
    threads: int
    max_context: int
    work_folder: str


class Engine(Protocol):
    """An engine under test. All draw the most likely token and go on past end tokens.

    Two states are kept apart: one sequence (`reset`, `extend`, `decode`) and a batch of them (`fill`, `decode_batch`).
    """

    def reset(self) -> None:
        """Forget the sequence."""

    def extend(self, token_ids: list[int]) -> Timed:
        """Compute more of the sequence's prompt, from the call to the token drawn at its end. That is not kept."""

    def decode(self, num_tokens: int) -> Timed:
        """Draw `num_tokens` after the one that follows the prompt. The sequence is then what it was before."""

    def fill(self, prompts: list[list[int]]) -> Timed:
        """Begin a batch: compute these prompts. The next call forgets them, and an empty list does only that."""

    def decode_batch(self, num_tokens: int) -> Timed:
        """As `decode`, for all sequences of the batch together. The tokens are those of the first."""

    def answer(self, prompts: list[list[int]], num_tokens: int) -> Timed:
        """Requests that come at once: from the call until each has its `num_tokens`. The tokens are the first's."""


_COMMANDS = ("reset", "extend", "decode", "fill", "decode_batch", "answer")


def serve(load: Callable[[Settings], Engine]) -> None:
    """Do what is asked for until the other side closes its pipe.

    Args:
        load: makes the engine, once the settings have come.
    """
    # Libraries print as they like: what they print goes to the log, and the answers have a pipe of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        answer: dict[str, Any] = {}
        try:
            if command == "load":
                engine = load(Settings(**request))
            elif command in _COMMANDS and engine is not None:
                timed = getattr(engine, command)(**request)
                if timed is not None:
                    answer = {"seconds": timed.seconds, "token_ids": [int(token) for token in timed.token_ids]}
            else:
                raise ValueError(f"no such command, or nothing loaded: {command}")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
