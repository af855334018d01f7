"""`kvist convert report`: the figures of a tiny model and its student, and what is said of them."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from tiny_files import hf_state, write_tiny_directory
from uptrain_tiny import TEXT, write_student, write_teacher, write_text

from kvist.cli.app import command_line
from kvist.cli.convert_report import report as report_command
from kvist.convert.report import conversion_report
from kvist.convert.report_config import ReportConfig
from kvist.convert.report_markdown import markdown
from kvist.convert.report_plot import draw_losses, draw_speeds
from kvist.convert.uptrain import Uptraining
from kvist.convert.uptrain_config import UptrainConfig
from kvist.errors import OptionError, PromptError
from kvist.evaluate.text_windows import EvaluationText
from kvist.kv_format import LayerFormats
from kvist.loading import load
from kvist.loading.progress import no_progress

SMALL = ["--window", "64", "--windows", "3", "--contexts", "40,200", "--tokens", "2", "--repetitions", "1"]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    return write_teacher(tmp_path / "many"), write_student(tmp_path / "few"), write_text(tmp_path / "twig.txt")


@pytest.fixture
def report_line(pair: tuple[Path, Path, Path]) -> list[str]:
    source, converted, text = pair
    return ["convert", "report", str(source), str(converted), "--text", str(text), *SMALL]


def test_the_report_and_its_figures_are_written(
    report_line: list[str], pair: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = pair[2].with_name("report of it.md")
    figures = out.with_name("figures.json")
    arguments = ["--out", str(out), "--json", str(figures), "--bigram", str(pair[2])]
    assert command_line([*report_line, *arguments]) == 0
    said = "lie its figures: report of it_losses.png, report of it_speeds.png\n"
    assert capsys.readouterr().err.endswith(said)
    text = out.read_text()
    assert "![losses](report%20of%20it_losses.png)" in text
    for name in ("losses", "speeds"):
        assert out.with_name(f"report of it_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not out.with_name("report of it_curve.png").exists()  # nothing was trained
    found = json.loads(figures.read_text())
    source, converted, bigram, uniform = found["predictions"]
    assert source["kl_mean"] is None
    assert converted["kl_mean"] > 0.1
    assert bigram["loss"] < 1.5
    assert uniform["loss"] == pytest.approx(math.log(300))
    for row in found["cache"]:
        assert row["converted_bytes"] < row["source_bytes"]
    assert found["cache"][0]["source_measured_bytes"] is None
    assert isinstance(found["cache"][1]["source_measured_bytes"], int)
    assert [row["context"] for row in found["speeds"]] == [40, 200]
    assert all(row["bytes_ratio"] > 1 for row in found["speeds"])


def test_the_loss_is_that_of_the_model(pair: tuple[Path, Path, Path]) -> None:
    text = EvaluationText.read(pair[2])
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    report = conversion_report(str(pair[0]), pair[1], text, config)
    from transformers import AutoModelForCausalLM

    ids = load(pair[0]).tokenizer.encode(text.text, add_special_tokens=False)[:64]
    for prediction, directory in zip(report.predictions, pair[:2], strict=False):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        windows = torch.tensor(ids).view(2, 32)
        assert prediction.loss == pytest.approx(model(input_ids=windows, labels=windows).loss.item(), rel=1e-4)


def test_a_model_beside_itself_differs_in_nothing(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    same = write_teacher(tmp_path / "same")
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    report = conversion_report(str(pair[0]), same, EvaluationText.read(pair[2]), config)
    assert report.predictions[1].kl_mean == pytest.approx(0, abs=1e-6)
    assert report.predictions[1].top1_agreement == 1
    assert report.cache[0].source_bytes == report.cache[0].converted_bytes
    assert report.speeds[0].bytes_ratio == 1


def test_a_training_is_told_and_never_taken_for_the_papers(pair: tuple[Path, Path, Path]) -> None:
    text = EvaluationText.read(pair[2])
    Uptraining(pair[1], str(pair[0]), [text], UptrainConfig(steps=4, sequence=16, batch=2, compute="fp32")).run()
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    report = conversion_report(str(pair[0]), pair[1], text, config)
    assert report.curve is not None
    assert len(report.curve.rows) == 5
    assert report.record.training is not None
    assert report.record.training.losses.keys() == {"before", "after", "bigram model", "teacher"}
    written = markdown(report, {"curve": "curve.png"})
    assert "4 steps, 128 tokens from twig.txt" in written
    assert "The training saw 128 tokens" in written
    assert "That is not the uptraining of the GQA paper" in written
    assert "5 %" not in written
    assert "5%" not in written.replace("%20", "")
    assert "![curve](curve.png)" in written


def test_what_was_made_from_another_model_is_called_so(pair: tuple[Path, Path, Path]) -> None:
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    own = load(pair[0], "fp32").files_hash.get(no_progress)
    for said, is_source in ((own, True), ("0" * 32, False)):
        (pair[1] / "conversion.json").write_text(json.dumps({"source_hash": said}))
        written = markdown(conversion_report(str(pair[0]), pair[1], EvaluationText.read(pair[2]), config), {})
        assert ("It was made from another checkpoint than this `many`." in written) is not is_source


def test_a_terminal_shows_tables(
    report_line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert command_line(report_line) == 0
    shown = capsys.readouterr().out
    assert "| --- |" not in shown
    assert "perplexity" in shown


def test_an_untrained_model_is_called_so(pair: tuple[Path, Path, Path]) -> None:
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    written = markdown(conversion_report(str(pair[0]), pair[1], EvaluationText.read(pair[2]), config), {})
    assert "was not trained after its heads were merged" in written
    assert "## Uptraining" not in written


def test_models_of_one_name_keep_a_bar_and_a_line_each(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new = write_teacher(tmp_path / "old" / "twig"), write_student(tmp_path / "new" / "twig")
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    report = conversion_report(str(old), new, EvaluationText.read(pair[2]), config)
    assert report.names == ("source: twig", "converted: twig", "uniform guessing")
    draw_losses(tmp_path / "losses.svg", "svg", report)
    drawn = (tmp_path / "losses.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in report.names)
    assert drawn.count("<!-- source: twig -->") == 1
    for prediction in report.predictions:
        assert f"<!-- {prediction.loss:.2f} -->" in drawn
    draw_speeds(tmp_path / "speeds.svg", "svg", report)
    drawn = (tmp_path / "speeds.svg").read_text()
    assert "<!-- source: twig, 2 KV heads -->" in drawn
    assert "<!-- converted: twig, 1 KV head -->" in drawn
    written = markdown(report, {})
    assert written.startswith("# twig with 1 KV head in place of 2\n")
    assert "| source: twig |" in written
    assert "| converted: twig |" in written


def test_the_curve_is_drawn_beside_what_it_is_measured_by(
    report_line: list[str], pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EvaluationText.read(pair[2])
    config = UptrainConfig(steps=2, sequence=16, batch=2, compute="fp32")
    references = Uptraining(pair[1], str(pair[0]), [text], config).run().references
    drawn: list[dict[str, float]] = []
    monkeypatch.setattr("kvist.convert.report_plot.draw_curve", lambda path, **fields: drawn.append(fields))
    out = pair[2].with_name("report.md")
    assert command_line([*report_line, "--out", str(out)]) == 0
    assert drawn[0]["references"] == pytest.approx(references)


def test_json_alone_is_printed(
    report_line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line([*report_line, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["num_heads"] == 4
    assert not Path("-").exists()


@pytest.mark.parametrize(
    ("given", "more", "named"),
    [
        ("--text", ["--json", "twig.txt"], "--text and --json"),
        ("--text twig.md", ["--out", "twig.md"], "--text and --out"),
        ("--bigram", ["--json", "twig.txt"], "--bigram and --json"),
        ("--text", ["--out", "a.md", "--json", "a.md"], "--out and --json"),
        ("--text", ["--out", "a.md", "--json", "a_curve.png"], "--json and the curve of --out"),
        ("--text a_losses.png", ["--out", "a.md"], "--text and the losses of --out"),
        ("SRC", ["--json", "many.gguf"], "SRC and --json"),
    ],
)
def test_a_file_that_is_read_is_never_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    more: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_text(Path("many.gguf"))
    name = given.removeprefix("--text ") if given.startswith("--text ") else "twig.txt"
    text, other = write_text(tmp_path / name), write_text(Path("other.txt"))
    read = ["--text", str(other), "--bigram", str(text)] if given == "--bigram" else ["--text", str(text)]
    files = set(tmp_path.iterdir())
    assert command_line(["convert", "report", str(source), "few", *read, *more]) == 2
    printed = capsys.readouterr()
    assert f"error: {named} name the same file" in printed.err
    assert printed.err.count("\n") == 1
    assert set(tmp_path.iterdir()) == files
    assert {path.read_text() for path in files} == {TEXT}


def test_both_texts_may_be_one(report_line: list[str], pair: tuple[Path, Path, Path]) -> None:
    assert command_line([*report_line, "--bigram", str(pair[2])]) == 0


@pytest.mark.parametrize(
    ("bigram", "message"),
    [
        ("a", "the text one.txt has 1 token, too few for a bigram model: give a longer one"),
        ("twig <|outside|>", "the text one.txt: the text holds '<|outside|>', a token that this model does not have"),
    ],
)
def test_a_text_that_no_bigram_model_is_made_of_is_refused_at_the_start(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, bigram: str, message: str
) -> None:
    for directory in pair[:2]:
        add_token(directory, "<|outside|>")
    text = EvaluationText.read(pair[2])
    monkeypatch.setattr("kvist.convert.report.evaluate", lambda *_: pytest.fail("the text was predicted first"))
    with pytest.raises(PromptError, match=re.escape(message)):
        conversion_report(
            str(pair[0]),
            pair[1],
            text,
            ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1),
            bigram_text=EvaluationText("one.txt", "", bigram),
        )


def add_token(directory: Path, token: str) -> None:
    """One that the model has no vector for."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    added = {"id": 300, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["model"]["vocab"][token] = 300
    tokenizer["added_tokens"].append(added | {"normalized": False})
    path.write_text(json.dumps(tokenizer))


def test_models_that_do_not_belong_together_are_refused(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = write_tiny_directory(tmp_path / "other", hf_state("llama"))
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a b"', '"e e"').replace('"ab"', '"ee"'))
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    with pytest.raises(OptionError, match="other has another vocabulary than few"):
        conversion_report(str(other), pair[1], EvaluationText.read(pair[2]), config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "report.txt"], "ends in .md"),
        (["--contexts", "600"], "the context of many is 512"),
        (["--windows", "900"], "too few for 900 windows"),
        (["--text", "missing.txt"], "missing.txt cannot be read"),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_line(
    report_line: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line([*report_line, *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_the_command_takes_by_default_what_the_configuration_does() -> None:
    taken = {name: each.default for name, each in inspect.signature(report_command).parameters.items()}
    config = ReportConfig()
    assert taken["contexts"] == ",".join(map(str, config.contexts))
    assert taken["tokens"] == config.new_tokens
    assert LayerFormats.parse(taken["kv_format"]) == config.kv_format
    for name in ("window", "windows", "repetitions", "weights_format"):
        assert taken[name] == getattr(config, name)
