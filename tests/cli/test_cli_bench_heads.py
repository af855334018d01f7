"""`kvist bench heads`, in process, on tiny decoders; the probe of the bandwidth is told."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest

from kvist.bench.heads import UNCACHED_LENGTHS
from kvist.cli import bench_heads

SMALL = ("--embed-dim", "32", "--num-heads", "4", "--kv-heads", "4,2,1", "--layers", "2", "--new-tokens", "40")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (2e10, 1e10))


def test_a_row_for_each_number_of_kv_heads(kvist) -> None:
    outcome = kvist("bench", "heads", *SMALL)
    assert (outcome.code, outcome.err) == (0, "")
    title, heading, *lines = outcome.out.splitlines()
    assert title == "4 tokens and 40 new ones; 2 layers of 32 dims, 4 query heads of 8; fp32 on cpu"
    assert heading.split("  ")[0] == "KV heads"
    assert [tuple(line.split()[:2]) for line in lines[:3]] == [("4", "MHA"), ("2", "GQA"), ("1", "MQA")]
    assert lines[0].split()[-1] == "1.00x"
    assert lines[4].split()[-4:] == ["token,", "at", "36", "43"]
    assert "scalars a layer at 40: counted" in lines[9]
    assert [line.split()[2:4] for line in lines[10:13]] == [["2,560"] * 2, ["1,280"] * 2, ["640"] * 2]
    assert "without" not in outcome.out
    assert lines[-1] == "read bandwidth meanwhile: 20.0 to 20.0 GB/s"
    assert "threads on" in lines[-2]


def test_json_holds_every_turn_and_what_the_table_says(kvist) -> None:
    printed = json.loads(kvist("bench", "heads", *SMALL, "--no-cache", "--json", "-").out)
    assert printed["shape"]["kv_heads"] == [4, 2, 1]
    assert printed["bandwidth_bytes_per_s"] == [2e10] * 3
    many, _, one = printed["rows"]
    assert (many["lengths"], many["new_tokens"]) == ([36, 43], [32, 7])
    assert one["measured_scalars"] == many["measured_scalars"] / 4 == 640
    assert one["speed_up"] == pytest.approx(one["tokens_per_s"] / many["tokens_per_s"])
    assert one["total_seconds"][-1] == pytest.approx(39 / one["tokens_per_s"])
    assert printed["is_steady"] is True
    assert one["uncached"]["lengths"][-1] == 43
    assert len(one["uncached"]["lengths"]) == 16
    assert (one["uncached"]["repetitions"], one["uncached"]["generated_lengths"]) == (3, 40)
    assert one["uncached_total_seconds"][-1] > 0
    assert printed["machine"]["torch"]


def test_no_cache_stands_beside_it(kvist) -> None:
    outcome = kvist("bench", "heads", *SMALL, "--no-cache")
    assert outcome.code == 0
    assert "ms a token without a cache, at 4 " in outcome.out
    (heading,) = (line for line in outcome.out.splitlines() if "seconds with a cache" in line)
    assert "without, from 16 of 40 lengths" in heading
    few = kvist("bench", "heads", *SMALL[:-1], "9", "--no-cache")
    assert "without, from 9 of 9 lengths" in few.out


def test_help_says_how_many_lengths_are_timed_without_a_cache(kvist) -> None:
    assert bench_heads._UNCACHED_LENGTHS == UNCACHED_LENGTHS
    assert f"at {UNCACHED_LENGTHS} lengths" in " ".join(kvist("bench", "heads", "--help").out.replace("│", " ").split())


def test_a_bandwidth_that_moved_is_told(kvist, monkeypatch) -> None:
    rates = cycle([2e10, 1e10])
    monkeypatch.setattr("kvist.kernels.native.read_rates", lambda **_: (next(rates), 0.0))
    outcome = kvist("bench", "heads", *SMALL)
    assert outcome.out.splitlines()[-2:] == [
        "read bandwidth meanwhile: 10.0 to 20.0 GB/s",
        "? it moved by more than 10 %: compare rows at one length, timed in turn, rather than lengths",
    ]
    assert json.loads(kvist("bench", "heads", *SMALL, "--json", "-").out)["is_steady"] is False


@pytest.mark.parametrize("no_cache", [(), ("--no-cache",)])
def test_one_picture_has_four_panels(kvist, no_cache, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'kvist[bench]'")
    outcome = kvist("bench", "heads", *SMALL, *no_cache, "--plot", "a.svg")
    assert (outcome.code, outcome.err) == (0, "")
    drawn = Path("a.svg").read_text(encoding="utf-8")
    shown = ["Time per token", "Total time", "Tokens per second", "Memory", "4 KV heads (MHA)", "1 KV head (MQA)"]
    for text in (*shown, "linear", *(["quadratic", "without a cache, timed at the dots"] if no_cache else [])):
        assert f"<!-- {text} -->" in drawn
    assert ("quadratic" in drawn) == bool(no_cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "16,3"], "num_kv_heads is 3: it must divide the 16 query heads: choose 1, 2, 4, 8 or 16"),
        (["--kv-heads", "16,x"], "kv_heads is '16,x': 'x' is no whole number"),
        (["--new-tokens", "1"], "new_tokens is 1: it must be at least 2"),
        (["--layers", "0"], "layers is 0"),
        (["--embed-dim", "1000"], "embed_dim 1000 does not divide by 16 heads"),
        (["--device", "tpu9"], "the device tpu9 cannot be used"),
        (["--device", "meta"], "the device meta cannot be used: the clock is right on cpu and cuda alone"),
        (["--plot", "a.gif"], "has no known ending"),
        (["--json", "/no/such/folder/a.json"], "there is no folder"),
        (["--threads", "0"], "threads is 0"),
    ],
)
def test_bad_input_is_one_line(kvist, arguments, message) -> None:
    assert message in kvist("bench", "heads", *arguments).error
    assert list(Path.cwd().iterdir()) == []
