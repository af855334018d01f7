"""Converts checkpoints between numbers of KV heads: from many to few, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.convert.conversion import expand, to_gqa

__all__ = ["expand", "to_gqa"]


def __getattr__(name: str) -> object:
    # They need torch; whoever only parses a command line should not wait for it.
    if name in __all__:
        from kvist.convert import conversion

        return getattr(conversion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
