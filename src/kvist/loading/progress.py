"""How long work tells how far it is; whoever passes the callback draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then while a model is fetched or prepared."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """`stage` is what is being done, for a person to read; `done` of `total` bytes; None where unknown."""


def no_progress(stage: str, done: int, total: int | None) -> None:
    """Draws nothing."""
