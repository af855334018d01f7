"""`kvist eval`, in process, on a tiny model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tiny_files import hf_config, hf_state, write_tiny_directory

from kvist.cli import eval_report
from kvist.cli.app import command_line
from kvist.cli.eval_report import EvalProgress
from kvist.cli.interrupts import INTERRUPTED
from kvist.loading import load
from kvist.loading.key_calibration import calibration_ids

TEXT = "a twig is a branch of a branch, and a branch is a twig of a tree. " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights small enough that no token is certain."""
    state = {name: 0.2 * value for name, value in hf_state("llama").items()}
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_directory(folder, state, config=hf_config())


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")


@pytest.fixture
def asked(model: Path) -> list[str]:
    return ["eval", "--model", str(model), "--text", "text.txt", "--window", "100", "--windows", "3"]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that gets as far as loading a model."""

    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was loaded before the mistake was told")

    monkeypatch.setattr("kvist.evaluate.evaluated_model.load", load)


def left_over() -> list[str]:
    return sorted(path.name for path in Path.cwd().iterdir() if path.name not in ("cache", "text.txt"))


def test_a_row_for_each_format_and_the_reference_below(kvist, asked):
    outcome = kvist(*asked, "--kv-format", "fp32", "--kv-format", "k=int8,v=int4")
    assert (outcome.code, outcome.err) == (0, "")
    title, _, heading, exact, mixed, reference = outcome.out.splitlines()
    assert title.rstrip() == "tiny on text.txt, 3 windows of 100 tokens, weights in fp32"
    assert heading.split() == ["kv_format", "token", "divergence", "divergence", "agreement", "perplexity", "time"]
    # 3 layers with keys and values of 2 heads of 32 numbers.
    assert exact.split()[:5] == ["fp32", "1,536", "0", "0", "100.00%"]
    assert mixed.split()[:2] == ["k=int8,v=int4", str(3 * 2 * (32 + 4 + 16 + 4))]
    assert 0 < float(mixed.split()[2]) < float(mixed.split()[3])
    assert reference.startswith(
        f"reference: the same model with fp32 cache, weights and compute; perplexity {exact.split()[5]}; "
    )
    assert "297 positions scored" in reference
    assert left_over() == []


def test_the_twins_stand_beside_the_kernels(kvist, asked):
    outcome = kvist(*asked, "--kv-format", "int8", "--pytorch", "--json", "-")
    assert [row["kv_format"] for row in json.loads(outcome.out)["rows"]] == ["int8", "int8, PyTorch"]


def test_json_holds_the_figures_and_what_they_hold_for(kvist, asked):
    outcome = kvist(*asked, "--kv-format", "bf16", "--kv-format", "int4", "--every", "3", "--json", "out.json")
    assert outcome.code == 0
    assert "one position in 3" in outcome.out
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert list(found) == [
        "model", "text", "text_sha256", "weights_format", "bf16_matrices", "window", "every", "threads", "kvist",
        "torch", "windows", "positions", "reference_perplexity", "reference_seconds", "rows",
    ]  # fmt: skip
    assert (found["model"], found["text"], found["weights_format"]) == ("tiny", "text.txt", "fp32")
    assert found["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (found["window"], found["windows"], found["every"], found["positions"]) == (100, 3, 3, 99)
    assert found["torch"] == torch.__version__
    bf16, int4 = found["rows"]
    assert list(bf16)[:6] == [
        "kv_format", "kv_bytes_per_token", "kl_mean", "kl_p99", "top1_agreement", "perplexity"
    ]  # fmt: skip
    assert (bf16["kv_format"], bf16["kv_bytes_per_token"], int4["kv_format"]) == ("bf16", 768, "int4")
    assert 0 < bf16["kl_mean"] < int4["kl_mean"] < int4["kl_p99"]
    assert len(int4["kl_mean_of_windows"]) == 3
    assert left_over() == ["out.json"]


def test_json_alone_on_standard_output(kvist, asked):
    outcome = kvist(*asked, "--kv-format", "fp32", "--json", "-")
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    assert json.loads(outcome.out)["rows"][0]["kl_mean"] == 0
    assert left_over() == []


def test_the_default_formats_are_those_of_the_documents(kvist, asked):
    found = json.loads(kvist(*asked, "--windows", "1", "--json", "-").out)
    assert [row["kv_format"] for row in found["rows"]] == ["bf16", "int8", "k=int8,v=int4", "int4"]
    means = [row["kl_mean"] for row in found["rows"]]
    assert means[1] < means[2] < means[3]


def test_weights_show_in_every_row_and_not_in_the_reference(kvist, asked):
    asked += ["--kv-format", "bf16", "--kv-format", "fp32", "--json", "-"]
    fp32, bf16, int8 = (
        json.loads(kvist(*asked, option, name).out)
        for option, name in (("--compute", "fp32"), ("--compute", "bf16"), ("--weights-format", "int8"))
    )
    assert (fp32["weights_format"], bf16["weights_format"], int8["weights_format"]) == ("fp32", "bf16", "int8")
    assert int8["rows"][1]["kl_mean"] > 0
    assert bf16["reference_perplexity"] == fp32["reference_perplexity"]
    assert fp32["rows"][1]["kl_mean"] == 0 < bf16["rows"][1]["kl_mean"]
    assert fp32["rows"][0]["kl_mean"] < bf16["rows"][0]["kl_mean"]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_plot_is_drawn_in_the_kind_that_its_name_says(kvist, asked, name, start):
    outcome = kvist(*asked, "--kv-format", "fp32", "--kv-format", "int8", "--plot", name)
    assert (outcome.code, outcome.err) == (0, "")
    data = Path(name).read_bytes()
    assert data.startswith(start)
    assert left_over() == [name]
    if name.endswith("SVG"):
        assert b"bytes of keys and values per token" in data


def test_a_plot_where_nothing_diverges_is_drawn_too(kvist, asked):
    assert kvist(*asked, "--kv-format", "fp32", "--plot", "a.png").code == 0


def test_a_plot_without_matplotlib_says_what_to_install(kvist, asked, unloaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'kvist[bench]'" in kvist(*asked, "--plot", "a.png").error
    assert left_over() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-format", "int9"], "unknown kv_format 'int9': did you mean 'int8'"),
        (["--kv-format", "k=int8"], "gives no format for the values"),
        (["--kv-format", "int8", "--kv-format", "int8"], "kv_format int8 is there twice"),
        (["--compute", "int9"], "unknown weights_format 'int9'"),
        (["--window", "1"], "window is 1: it must be at least 2"),
        (["--windows", "0"], "windows is 0: it must be at least 1"),
        (["--every", "0"], "every is 0: it must be from 1 to 100, the window"),
        (["--threads", "0"], "threads is 0"),
        (["--text", "nowhere.txt"], "the text nowhere.txt cannot be read: No such file or directory"),
        (["--text", "."], "cannot be read: Is a directory"),
        (["--text", "empty.txt"], "the text empty.txt is empty"),
        (["--text", "binary.txt"], "binary.txt is not a text in UTF-8"),
        (["--json", "nowhere/a.json"], "--json nowhere/a.json cannot be written: there is no folder"),
        (["--json", "."], "--json . cannot be written: it is a folder"),
        (["--plot", "nowhere/a.png"], "--plot nowhere/a.png cannot be written: there is no folder"),
        (["--plot", "a.pgn"], "the plot a.pgn has no known ending: did you mean 'png'? known: png, svg, pdf"),
        (["--plot", "a"], "the plot a has no known ending: known: png, svg, pdf"),
        (["--json", "a.png", "--plot", "a.png"], "--json and --plot name the same file"),
        (["--json", "a.png", "--plot", "./a.png"], "--json and --plot name the same file"),
        (["--json", "./text.txt"], "--text and --json name the same file"),
        (["--plot", "text.txt"], "--text and --plot name the same file"),
        (["--every", "101"], "every is 101: it must be from 1 to 100, the window"),
        (["--every", "9" * 20], "it must be from 1 to 100, the window"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(kvist, asked, unloaded, options, message):
    Path("empty.txt").touch()
    Path("binary.txt").write_bytes(b"\x89PNG\r\n\xff")
    assert message in kvist(*asked, *options).error
    assert left_over() == ["binary.txt", "empty.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "100"], "too few for 100 windows of 100: take 13 windows of them, a window of"),
        (["--window", "600"], "a window of 600 tokens exceeds the model's context of 512"),
        (["--kv-format", "int8/7:int4"], "names layer 7: the model has 3 layers"),
        (["--model", "nothing-of-the-kind"], "nothing-of-the-kind"),
    ],
)
def test_mistakes_that_the_model_shows_leave_old_files_alone(kvist, asked, options, message):
    Path("a.json").write_text("old", encoding="utf-8")
    assert message in kvist(*asked, "--json", "a.json", "--plot", "a.png", *options).error
    assert left_over() == ["a.json"]
    assert Path("a.json").read_text(encoding="utf-8") == "old"


def test_a_text_that_quantised_keys_are_fitted_to_is_told(kvist, asked, model):
    loaded = load(str(model))
    fitted_to = loaded.tokenizer.decode(calibration_ids(loaded.tokenizer, loaded.config))
    Path("text.txt").write_text(TEXT[:150] + fitted_to[100:400], encoding="utf-8")
    asked += ["--json", "-"]
    assert "note: the quantised keys" in kvist(*asked, "--kv-format", "int8").err
    assert kvist(*asked, "--kv-format", "k=bf16,v=int8").err == ""
    assert kvist(*asked, "--kv-format", "int8", "--windows", "1").err == ""


def test_a_text_may_come_from_standard_input(kvist, asked):
    asked[asked.index("text.txt")] = "-"
    asked += ["--kv-format", "fp32", "--json", "-"]
    found = json.loads(kvist(*asked, given=TEXT + "\n").out)
    assert (found["text"], found["positions"]) == ("standard input", 297)
    assert found["text_sha256"] == hashlib.sha256(f"{TEXT}\n".encode()).hexdigest()
    assert kvist(*asked).error == "standard input is empty: give one of some thousand words"


def test_help_says_that_it_takes_long_and_what_takes_less(kvist):
    text = " ".join(kvist("eval", "--help").out.split())
    assert (
        "The defaults take some minutes, for a large model many: --windows 1, a shorter --window or --every 16" in text
    )


def test_who_waits_long_without_a_terminal_is_told(kvist, asked, monkeypatch):
    monkeypatch.setattr(eval_report, "_LONG_S", 0.0)
    asked += ["--kv-format", "fp32"]
    error = kvist(*asked).err
    assert error.startswith("note: 1 of 3 windows is through, the others take about ")
    assert error.endswith(" s: --windows, --window and --every make it less\n")
    assert error.count("\n") == 1
    assert kvist(*asked, "--windows", "1").err == ""


def test_text_is_required(kvist):
    assert "missing option '--text'" in kvist("eval").error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_does_not_cost_the_figures(kvist, asked):
    outcome = kvist(*asked, "--kv-format", "bf16", "--json", "/dev/full")
    assert (outcome.code, outcome.err) == (2, "error: --json /dev/full cannot be written: No space left on device\n")
    assert "297 positions scored" in outcome.out


def test_an_interrupt_shows_what_is_known_and_writes_no_file(asked, monkeypatch, capsys):
    def interrupted(self: EvalProgress, window: int, name: str) -> None:
        if window == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(EvalProgress, "started", interrupted)
    asked += ["--kv-format", "bf16"]
    assert command_line([*asked, "--json", "a.json"]) == INTERRUPTED
    shown = capsys.readouterr()
    assert "2 windows of 100 tokens" in shown.out
    assert "note: interrupted" in shown.err
    assert left_over() == []
    assert command_line([*asked, "--json", "-"]) == INTERRUPTED
    assert capsys.readouterr().out == ""


def test_a_terminal_sees_the_table_fill(asked, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(eval_report, "_LONG_S", 0.0)
    assert command_line([*asked, "--kv-format", "bf16", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert "window 1 of 3, reference" in shown.err
    assert "window 3 of 3, bf16" in shown.err
    assert "left" in shown.err
    assert "note:" not in shown.err
    assert "kv_format" in shown.err
    assert shown.out.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.000112873, "0.000113"),
        (0.0131, "0.0131"),
        (1.5, "1.50"),
        (123.4, "123"),
        (-2e-8, "-0.0000000200"),
    ],
)
def test_small_numbers_keep_three_digits(number, text):
    assert eval_report._small(number) == text


def test_a_deleted_working_folder_is_one_line(kvist, asked, tmp_path, unloaded):
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert "the folder that you are in is gone" in kvist(*asked).error
