"""`kvist convert`: what it prints, and what it refuses before anything is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_files import write_tiny_directory

from kvist.loading import load


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return write_tiny_directory(tmp_path / "tiny")


def test_gqa_makes_a_model_and_says_what_it_is(kvist, source, tmp_path):
    outcome = kvist("convert", "gqa", str(source), str(tmp_path / "made"), "--kv-heads", "1")
    assert (outcome.code, outcome.err) == (0, "")
    first, second, third = outcome.out.splitlines()
    assert first.endswith("made: tiny with 1 KV head (MQA) instead of 2 KV heads (GQA) for 4 query heads, by mean")
    assert second == "its cache takes 0.5 of the bytes"
    assert f"`kvist convert uptrain {tmp_path / 'made'} --teacher {source} --text FILE` trains it; --method" in third
    assert load(tmp_path / "made").config.num_kv_heads == 1


def test_json_is_the_record(kvist, source, tmp_path):
    outcome = kvist("convert", "expand", str(source), str(tmp_path / "shown"))
    assert outcome.out.splitlines()[1:] == ["its cache takes 2 times the bytes"]
    outcome = kvist("convert", "expand", str(source), str(tmp_path / "made"), "--json")
    record = json.loads((tmp_path / "made" / "conversion.json").read_text())
    assert json.loads(outcome.out) == record
    assert (record["conversion"], record["num_kv_heads"]) == ("expand", 4)


def test_a_calibrated_method_says_how_much_it_misses(kvist, source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a twig on a branch of a tree, " * 40)
    calibration = ("--method", "fitted", "--text", str(text), "--window", "32", "--windows", "4", "--threads", "1")
    outcome = kvist("convert", "gqa", str(source), str(tmp_path / "made"), "--kv-heads", "1", *calibration)
    assert outcome.code == 0
    assert "its layers miss" in outcome.out
    assert "% of the square on average" in outcome.out
    assert outcome.out.endswith("--text FILE` trains it\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing option '--kv-heads'"),
        (("--kv-heads", "0"), "kv_heads is 0: it must be at least 1"),
        (("--kv-heads", "1", "--method", "meen"), "unknown method 'meen': did you mean 'mean'? known: first, mean"),
        (("--kv-heads", "1", "--method", "aligned"), "method aligned looks at the layers on a text: give --text FILE"),
        (
            ("--kv-heads", "1", "--text", "x.txt"),
            "method mean looks at no text: leave it out, or take aligned",
        ),
        (("--kv-heads", "1", "--window", "1"), "window is 1: it must be at least 2"),
        (("--kv-heads", "1", "--threads", "0"), "threads is 0"),
        (("--kv-heads", "1", "--method", "fitted", "--text", "none.txt"), "the text none.txt cannot be read"),
        (("--kv-heads", "3"), "tiny has 2 KV heads for 4 query heads, and merging makes fewer: take 1"),
        (("--kv-heads", "1", "--weights-format", "fp32"), "tiny is no GGUF file: its weights stay as they are stored"),
        (("--kv-heads", "1", "--weights-format", "int8"), "unknown weights_format 'int8'"),
    ],
)
def test_bad_options_are_one_line_and_nothing_is_made(kvist, source, tmp_path, arguments, message):
    assert message in kvist("convert", "gqa", str(source), str(tmp_path / "made"), *arguments).error
    assert not (tmp_path / "made").exists()


def test_what_exists_is_named_before_the_source_is_looked_for(kvist, source):
    error = kvist("convert", "gqa", "no-such-model", str(source), "--kv-heads", "1").error
    assert error == f"{source} exists: give --force to replace it, or take another name"


def test_convert_alone_says_what_there_is(kvist):
    outcome = kvist("convert")
    assert outcome.code == 0
    assert "gqa" in outcome.out
    assert "expand" in outcome.out


def test_options_are_checked_without_pytorch(source):
    code = (
        "import sys\nfrom kvist.cli.app import command_line\n"
        f"assert command_line(['convert', 'gqa', {str(source)!r}, 'made', '--kv-heads', '1', '--method', 'x']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
