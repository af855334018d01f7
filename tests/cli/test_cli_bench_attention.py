from __future__ import annotations

import errno
import json
import os

import pytest

SMALL = (
    *("--heads", "2", "--kv-heads", "1", "--head-dim", "64"),
    *("--context", "70", "--layers", "2", "--repetitions", "1"),
)


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch):
    """The probe takes a buffer of hundreds of MB: here its answer is given. Products for the peak are small ones."""
    monkeypatch.setattr("kvist.bench.peak.SIZES", ((64, 64, 64),))
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (2e10, 1e10))


def test_formats_stand_beside_each_other(kvist):
    outcome = kvist("bench", "attention", *SMALL, "--pytorch")
    assert outcome.code == 0
    assert outcome.out.startswith("decode, 2 query heads over 1 KV heads of 64 dims, 70 tokens, batch 1, 2 layers\n")
    names = [line.split("  ")[0] for line in outcome.out.splitlines()[2:-3]]
    assert names == [
        *("bf16", "int8", "int4"),
        *("PyTorch, enable_gqa", "PyTorch, grouped queries", "PyTorch, product, softmax, product"),
    ]


def test_json_has_what_the_table_has(kvist):
    outcome = kvist("bench", "attention", *SMALL, "--kv-format", "int8", "--json", "-")
    printed = json.loads(outcome.out)
    (row,) = printed["rows"]
    assert printed["work"] == "decode"
    assert (row["name"], row["bytes_per_token"], row["bandwidth_gb_per_s"]) == ("int8", 2 * 2 * 68, 20.0)
    assert row["gb_per_s"] == pytest.approx(row["tokens_per_s"] * 70 * row["bytes_per_token"] / 1e9)
    assert row["roofline_fraction"] == pytest.approx(row["gb_per_s"] / 20)
    assert printed["machine"]["torch"]


def test_a_shared_prefix_stands_beside_sequences_apart(kvist):
    outcome = kvist(
        "bench", "attention", *SMALL, "--batch", "3", "--shared-prefix", "--kv-format", "int8", "--json", "-"
    )
    apart, shared = json.loads(outcome.out)["rows"]
    assert [apart["name"], shared["name"]] == ["int8", "int8, shared prefix"]
    assert apart["gb_per_s"] == pytest.approx(apart["tokens_per_s"] * 70 * 272 / 1e9)
    assert shared["gb_per_s"] == pytest.approx(shared["tokens_per_s"] / 3 * 70 * 272 / 1e9)


@pytest.mark.parametrize("context", ["1", "63", "64"])
def test_a_prefix_shorter_than_a_page_is_shared_too(kvist, context):
    arguments = ("--context", context, "--batch", "2", "--shared-prefix", "--kv-format", "int8", "--json", "-")
    assert len(json.loads(kvist("bench", "attention", *SMALL, *arguments).out)["rows"]) == 2


def test_figures_are_printed_where_their_file_cannot_be_written(kvist, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvist.bench.plot.write_bars", full)
    outcome = kvist("bench", "attention", *SMALL, "--kv-format", "int8", "--plot", str(tmp_path / "a.svg"))
    assert outcome.code == 2
    assert "No space left on device" in outcome.err
    assert outcome.out.splitlines()[2].startswith("int8 ")
    assert list(tmp_path.iterdir()) == []


def test_prefill_is_counted_in_operations(kvist, tmp_path):
    file = tmp_path / "a.json"
    outcome = kvist("bench", "attention", *SMALL, "--prefill", "--kv-format", "bf16", "--json", str(file))
    assert "Gflop/s" in outcome.out
    printed = json.loads(file.read_text())
    (row,) = printed["rows"]
    assert row["gflop_per_s"] == pytest.approx(row["tokens_per_s"] / 70 * 4 * 64 * 2 * 2 * 70 * 71 / 2 / 1e9)
    assert printed["peak_gflop_per_s"].keys() == {"bfloat16", "int8"}
    assert all(peak > 0.1 for peak in printed["peak_gflop_per_s"].values())
    assert "the fastest products that PyTorch has, Gflop/s: " in outcome.out
    assert "last-level caches" not in outcome.out


def test_what_fits_into_the_caches_is_said(kvist, monkeypatch):
    """Read are 70 tokens: 70 * 2 * 2 * 64 * 2 bytes in bf16, and 70 * 272 in int8."""
    monkeypatch.setattr("kvist.bench.machine.last_level_cache_bytes", lambda: 32 << 10)
    arguments = ("bench", "attention", *SMALL, "--kv-format", "bf16,int8")
    said = "no more than the last-level caches, 32.0 KiB, so perhaps not read from memory: "
    assert kvist(*arguments).out.splitlines()[-1] == said + "int8"
    monkeypatch.setattr("kvist.bench.machine.last_level_cache_bytes", lambda: 16 << 10)
    assert "last-level caches" not in kvist(*arguments).out


def test_what_is_unsteady_is_marked_in_decode_and_in_prefill(kvist, monkeypatch):
    rates = iter(range(1, 1000))
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (1e9 * 2 ** (next(rates) % 2),))
    for more in ((), ("--prefill",)):
        lines = kvist("bench", "attention", *SMALL, "--kv-format", "int8", *more).out.splitlines()
        assert lines[1].split()[-1] == "spread"
        assert lines[2].endswith("% ?")
        assert "? the bandwidth moved by more than 10 % around most repetitions" in lines


def test_a_picture_is_drawn(kvist, tmp_path):
    assert kvist("bench", "attention", *SMALL, "--plot", str(tmp_path / "a.svg")).code == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-format", "int5"], "unknown kv_format 'int5'"),
        (["--kv-heads", "2", "--heads", "3"], "kv_heads is 2: it must divide the 3 query heads"),
        (["--head-dim", "0"], "head_dim is 0: it must be at least 1"),
        (["--head-dim", "12", "--kv-format", "int4"], "int4 cannot take a head dim of 12"),
        (["--shared-prefix"], "--shared-prefix is for decoding several sequences: give --batch N"),
        (["--shared-prefix", "--batch", "2", "--prefill"], "and leave out --prefill"),
        (["--prefill", "--pytorch"], "--pytorch has forms of decode only: leave out --prefill"),
        (["--plot", "a.gif"], "has no known ending"),
        (["--plot", "a.png", "--json", "a.png"], "--json and --plot name the same file"),
        (["--kv-format", "int8,int8"], "int8"),
        (["--json", "/no/such/folder/a.json"], "there is no folder"),
        (["--json", "a.png", "--plot", "./a.png"], "--json and --plot name the same file"),
        (["--layers", "99999999999"], "layers is 99999999999: it must be from 1 to 10000"),
        (["--heads", "100000", "--kv-heads", "100000"], "heads is 100000: it must be from 1 to 65536"),
        (["--context", "1", "--batch", "1000000000"], "lower context, batch, layers or heads"),
        (["--threads", "0"], "threads is 0"),
    ],
)
def test_bad_input_is_one_line(kvist, arguments, message):
    assert message in kvist("bench", "attention", *arguments).error
