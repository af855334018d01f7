"""How far loading or pulling is: a bar on a terminal, nothing elsewhere. All on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from kvist.loading.progress import Progress

# Work that is over sooner is not worth a bar, nor the import of what draws it.
_PATIENCE_S = 0.4


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A callback that draws a bar which is gone at the end; off a terminal it does nothing."""
    if sys.stderr.isatty():
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.close()
    else:
        from kvist.loading.progress import no_progress

        yield no_progress


class _Bar:
    def __init__(self) -> None:
        self._started_s: float | None = None
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        if self._bars is None:
            if now_s - self._started_s < _PATIENCE_S:
                return
            self._bars = _start_bars()
        if stage not in self._tasks:
            for earlier in self._tasks.values():
                self._bars.update(earlier, visible=False)
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()


def _start_bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    bars.start()
    return bars
