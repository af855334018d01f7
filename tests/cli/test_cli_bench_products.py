from __future__ import annotations

import json

import pytest

SMALL = ("--shapes", "48x64,32x32", "--rows", "1,3", "--repetitions", "1")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (2e10, 1e10))
    monkeypatch.setattr("kvist.bench.products._LEAST_COPIES_BYTES", 1 << 14)
    monkeypatch.setattr("kvist.bench.products.last_level_cache_bytes", lambda: None)


def test_there_is_a_table_for_each_shape(kvist):
    outcome = kvist("bench", "products", *SMALL)
    assert (outcome.code, outcome.err) == (0, "")
    title, *lines, facts = outcome.out.splitlines()
    assert title == "products of rows with matrices of weights, and PyTorch's"
    headings = [line for line in lines if line.startswith(("48x64", "32x32"))]
    columns = ["rows", "us", "to", "one", "GB/s", "bandwidth", "fraction", "Gop/s", "spread"]
    assert [heading.split() for heading in headings] == [["48x64", *columns], ["32x32", *columns]]
    assert [line.split()[:2] for line in lines[1:5]] == [["int8", "1"], ["int8", "3"], ["int4", "1"], ["int4", "3"]]
    assert "threads on" in facts


def test_json_holds_the_figures(kvist, tmp_path):
    outcome = kvist("bench", "products", *SMALL, "--weights-format", "int4_min", "--json", str(tmp_path / "a.json"))
    assert outcome.code == 0
    printed = json.loads((tmp_path / "a.json").read_text())
    assert list(printed) == ["work", "rows", "machine"]
    row = next(row for row in printed["rows"] if row["rows"] == 3)
    assert (row["shape"], row["name"], row["weights_bytes"]) == ("48x64", "int4_min", 48 * 40)
    assert row["gop_per_s"] == pytest.approx(2 * 48 * 64 * 3 / row["seconds"] / 1e9)


def test_a_picture_is_drawn(kvist, tmp_path):
    assert kvist("bench", "products", *SMALL, "--plot", str(tmp_path / "a.svg")).code == 0
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1536"], "write rows and columns of a matrix like 1536x576"),
        (["--shapes", "64x33"], "must be a multiple of 32"),
        (["--rows", "0"], "rows is 0: it must be"),
        (["--rows", "1,1"], "is there twice"),
        (["--weights-format", "int5"], "int5"),
        (["--threads", "0"], "threads is 0"),
        (["--plot", "a.gif"], "has no known ending"),
    ],
)
def test_bad_input_is_one_line(kvist, arguments, message):
    assert message in kvist("bench", "products", *arguments).error
