from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvist.bench import bandwidth
from kvist.cli.bench import app


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int | None]]:
    """The arguments that the probe is called with. In place of the real one, it finds 40, 50 and 42 GB/s."""
    calls: list[dict[str, int | None]] = []

    def read_rates(**arguments: int | None) -> tuple[float, ...]:
        calls.append(arguments)
        return (40e9, 50e9, 42e9)

    monkeypatch.setattr(bandwidth.native, "read_rates", read_rates)
    return calls


def test_measure_sums_the_passes_up(probes: list[dict[str, int | None]]) -> None:
    result = bandwidth.measure(threads=3, passes=3, buffer_bytes=2**30)
    assert probes == [{"buffer_bytes": 2**30, "passes": 3, "num_threads": 3}]
    assert (result.best_bytes_per_s, result.median_bytes_per_s, result.threads) == (50e9, 42e9, 3)
    assert result.spread_fraction == pytest.approx(10 / 42)


def test_measure_takes_the_threads_of_pytorch(probes: list[dict[str, int | None]]) -> None:
    assert bandwidth.measure().threads == torch.get_num_threads()
    assert probes[0]["num_threads"] == torch.get_num_threads()


def test_bandwidth_prints_figures_and_machine(probes: list[dict[str, int | None]]) -> None:
    result = CliRunner().invoke(app, ["bandwidth", "--threads", "2"])
    assert result.exit_code == 0
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1].strip() for line in result.stdout.splitlines()}
    assert (lines["best"], lines["median"]) == ("50.0 GB/s", "42.0 GB/s")
    assert lines["spread"] == "24% of the median, over 3 passes"
    assert lines["threads"].startswith("2 on ")
    assert "cpu" in lines


def test_bandwidth_json_is_one_object(probes: list[dict[str, int | None]]) -> None:
    result = CliRunner().invoke(app, ["bandwidth", "--json", "--passes", "3", "--threads", "1"])
    printed = json.loads(result.stdout)
    assert printed["read_bandwidth"]["bytes_per_s"] == [40e9, 50e9, 42e9]
    assert printed["machine"]["threads"] == 1
