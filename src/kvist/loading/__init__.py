"""Where a model comes from: files, the Hub, demo models, and their prepared copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.loading.loader import LoadedModel, load

__all__ = ["LoadedModel", "load"]


def __getattr__(name: str) -> object:
    # The loader needs torch; whoever only lists or pulls models should not wait for it.
    if name in __all__:
        from kvist.loading import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
