"""What a plot of divergences shows, whatever kind of file it goes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.evaluate.evaluation import Evaluation, FormatRow
from kvist.evaluate.plot import write_plot

figure = pytest.importorskip("matplotlib.figure", reason="plots need matplotlib: pip install 'kvist[bench]'")


def evaluation_of(*divergences: tuple[float, float]) -> Evaluation:
    """Formats of so many bytes per token as there are before them, and of a mean and a 99th percentile."""
    rows = (
        FormatRow(f"format{i}", 100 * (i + 1), mean, p99, 1.0, 9.0, (mean,), ((0, mean),), 1.0)
        for i, (mean, p99) in enumerate(divergences)
    )
    return Evaluation(1, 10, 9.0, 1.0, tuple(rows))


@pytest.mark.parametrize(
    ("divergences", "scale"),
    [
        ([(0.01, 0.1), (1e-5, 1e-4)], "log"),
        ([(0.01, 0.1), (0.0, 1e-4)], "symlog"),
        ([(0.0, 0.0)], "linear"),
    ],
)
def test_formats_that_lie_powers_of_ten_apart_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divergences: list[tuple[float, float]], scale: str
) -> None:
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *path, **options: drawn.append(self))
    write_plot(tmp_path / "a.png", "png", evaluation_of(*divergences), "a title")
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == scale
    shown = sorted(float(y) for line in axes.get_lines() for y in line.get_ydata())
    assert shown == sorted(number for both in divergences for number in both)
