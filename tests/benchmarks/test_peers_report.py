from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from field import Failure
from report import ModelResult, Report, agreement
from turns import Figure, Limits
from workloads import Plan, Row

from kvist.bench.machine import MachineFacts

FIGURE = Figure(tokens_per_s=100.0, seconds=2.0, spread=0.08, gb_per_s=40.0, rounds=3, discarded=1, is_steady=True)
LIMITS = Limits(3, 10.0)
PLAN = Plan((128, 1024), LIMITS, LIMITS, LIMITS, LIMITS)
MACHINE = MachineFacts("A CPU", "x86_64", "avx2", 2, 4, 1 << 25, 1 << 34, "Linux 6", "3.12", "2.13", "0.1")
ROWS = [
    Row("kvist int8", "decode", 128, 1, FIGURE),
    Row("kvist int8", "decode", 1024, 1, replace(FIGURE, tokens_per_s=90.0)),
    Row("other f16", "decode", 128, 1, replace(FIGURE, tokens_per_s=50.0, rounds=1)),
    Row("other f16", "decode", 1024, 1, replace(FIGURE, tokens_per_s=45.0, is_steady=False)),
    Row("other f16", "prefill", 1024, 1, replace(FIGURE, tokens_per_s=10.0, rounds=1), in_parts=True),
    Row("kvist int8", "batch", 1000, 8, replace(FIGURE, tokens_per_s=800.0)),
    Row("kvist int8", "batch", 1000, 32, replace(FIGURE, tokens_per_s=1600.0)),
    Row("other f16", "batch", 1000, 8, replace(FIGURE, tokens_per_s=200.0)),
    Row("kvist int8", "requests", 28_306, 32, replace(FIGURE, seconds=10.0, tokens_per_s=3000.0)),
]


@pytest.fixture
def report() -> Report:
    failures = [Failure("other f16", "no file /home/somebody/.cache/model.gguf (gone)")]
    result = ModelResult("smollm2", 92_000_000, ROWS, failures, {"other f16": 60}, 64)
    missing = [Failure("vllm", "no wheel; all of it is in /tmp/logs/install.log")]
    return Report("today", PLAN, MACHINE, {"kvist": "0.1", "other": "3"}, [result], missing)


def test_tables_stand_under_what_was_measured(report: Report) -> None:
    lines = report.markdown().splitlines()
    assert lines[0] == "# Kvist and its peers: today"
    assert "A CPU (x86_64), 4 CPUs, 2 threads, Linux 6, python 3.12. kvist 0.1, other 3." in lines
    assert "## smollm2, 92 MB of weights" in lines
    tables = {line: lines[index + 2 : index + 6] for index, line in enumerate(lines) if line.endswith(":")}
    decode = tables["Decode, tokens per second over the tokens before:"]
    assert decode == [
        "| | 128 | 1,024 |",
        "|---|---|---|",
        "| kvist int8 | 100 ±4 % | 90.0 ±4 % |",
        "| other f16 | 50.0, 2.00x | 45.0 ±4 %, 2.00x ? |",
    ]
    batch = tables["Sequences of 1,000 tokens each that decode together, tokens per second of all:"]
    assert batch == [
        "| | 8 sequences | 32 sequences |",
        "|---|---|---|",
        "| kvist int8 | 800 ±4 % | 1,600 ±4 % |",
        "| other f16 | 200 ±4 %, 4.00x | - |",
    ]
    assert "| other f16 | 10.0 * |" in lines
    assert "32 requests at once, 28,306 tokens of prompts in all, 64 drawn for each, seconds:" in lines
    assert "| kvist int8 | 10.0 ±4 % |" in lines


def test_who_is_missing_or_failed_is_said_without_folders(report: Report) -> None:
    text = report.markdown()
    assert "- other f16 failed: no file <path> (gone)" in text
    assert "- vllm is missing: no wheel; all of it is in <path>" in text
    assert f"- {sum(row.figure.rounds for row in ROWS)} rounds count, {len(ROWS)} were discarded" in text
    assert "- Of 64 tokens drawn after the contexts, so many are those of kvist bf16" in text
    assert "/home" not in json.dumps(report.fields())


def test_the_files_hold_all_figures(report: Report, tmp_path: Path) -> None:
    paths = report.write(tmp_path / "results")
    assert [path.name for path in paths] == ["today.json", "today.md", "today.png"]
    written = json.loads(paths[0].read_text(encoding="utf-8"))
    rows = written["models"][0]["rows"]
    assert len(rows) == len(ROWS)
    assert (rows[5]["sequences"], rows[5]["tokens_per_s"], rows[5]["rounds"]) == (8, 800.0, 3)
    assert written["plan"]["batches"] == [8, 32]
    assert paths[1].read_text(encoding="utf-8") == report.markdown()
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_agreement_counts_up_to_the_first_that_differs_after_each_context() -> None:
    drawn = {
        "kvist bf16": {128: [1, 2, 3, 4], 1024: [5, 6, 7, 8]},
        "same": {128: [1, 2, 3, 4], 1024: [5, 6, 7, 8]},
        "other": {128: [1, 2, 9, 4], 1024: [5, 6, 7, 9]},
        "fails later": {128: [1, 2, 3, 4]},
    }
    assert agreement(drawn) == ({"same": 8, "other": 5, "fails later": 4}, 8)
    assert agreement({"other": {128: [1]}}) == ({"other": 0}, 0)
