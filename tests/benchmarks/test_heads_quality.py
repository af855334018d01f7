"""`benchmarks/heads_quality`, with two steps of training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import measure
import pytest

from kvist.convert.uptrain_config import UptrainConfig
from kvist.errors import OptionError

TEXT = "The twig wanted to be a tree, and the tree wanted to be a wood; so they grew, slowly. " * 60
SMALL = ["--kv-heads", "4", "--methods", "mean", "--vocab-size", "300", "--sequence", "16", "--batch", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "twig.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def _two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes would be planned by the clock."""
    monkeypatch.setattr(measure, "UptrainConfig", lambda minutes=0, **fields: UptrainConfig(**{"steps": 2} | fields))


def run(monkeypatch: pytest.MonkeyPatch, text: Path, *more: str) -> Path:
    """Runs the benchmark and returns its folder."""
    out = text.with_name("out")
    monkeypatch.setattr(sys, "argv", ["measure.py", "--text", str(text), "--out", str(out), *SMALL, *more])
    assert measure.main() == 0
    return out


def written(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "heads_quality.json").read_text())
    return found


def test_a_run_writes_a_table_a_picture_and_its_figures_and_serves_another(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(monkeypatch, text)
    printed = capsys.readouterr().out
    assert printed.startswith("MHA: 2 steps, loss ")
    assert (out / "heads_quality.md").read_text() in printed
    assert (out / "heads_quality.png").read_bytes().startswith(b"\x89PNG")
    first = written(out)
    assert [(row["method"], row["kv_heads"]) for row in first["rows"]] == [("none", 16), ("mean", 4)]
    assert (first["mha"]["steps"], first["uptraining"]["steps"]) == (2, 1)
    files = ["heads_quality.json", "heads_quality.md", "heads_quality.png", "mha", "mha.json"]
    assert sorted(path.name for path in out.iterdir()) == files

    weights = (out / "mha" / "model.safetensors").read_bytes()
    run(monkeypatch, text, "--methods", "first", "--uptrain-rate", "1e-4")
    assert (out / "mha" / "model.safetensors").read_bytes() == weights
    assert written(out)["mha"] == first["mha"]
    assert [row["method"] for row in written(out)["rows"]] == ["none", "first"]


@pytest.fixture
def trained(text: Path) -> Path:
    """A folder with the model of a run, as far as a second one asks about it before it trains."""
    out = text.with_name("out")
    (out / "mha").mkdir(parents=True)
    (out / "mha" / "conversion.json").write_text('{"uptraining": [{"steps": 2, "loss_after": 3.0}]}')
    asked = {"text": measure.EvaluationText.read(text).sha256, "minutes": 20.0, "vocab_size": 300}
    (out / "mha.json").write_text(json.dumps(asked | {"sequence": 16, "batch": 2, "rate": 0.002}))
    return out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--minutes", "3"), "minutes was 20.0 and is 3.0"),
        (("--vocab-size", "310"), "vocab_size was 300 and is 310"),
        (("--sequence", "8", "--batch", "4"), "sequence was 16 and is 8; batch was 2 and is 4"),
        (("--rate", "0.01"), "rate was 0.002 and is 0.01"),
    ],
)
def test_the_model_of_another_run_is_refused(
    text: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        run(monkeypatch, text, *more)
    assert str(caught.value) == (
        f"{trained / 'mha'} is the model of another run: {message}: give the same options, or another --out"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--methods", "mean,fited"), "unknown method 'fited'"),
        (("--kv-heads", "8,x"), "kv-heads names 'x': the model has 16 heads, take 1, 2, 4, 8"),
        (("--kv-heads", "8,3"), "kv-heads names 3: the model has 16 heads, take 1, 2, 4, 8"),
        (("--kv-heads", "16"), "kv-heads names 16: "),
        (("--kv-heads", ""), "kv-heads names ''"),
        (("--uptrain-rate", "-1"), "learning_rate"),
        (("--sequence", "1"), "sequence"),
        (("--threads", "0"), "threads"),
    ],
)
def test_options_are_looked_at_before_anything_is_made(
    text: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        run(monkeypatch, text, *more)
    assert message in str(caught.value)
    assert not text.with_name("out").exists()


def test_the_control_is_written_before_another_row_is_done(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measure.uptrained

    def interrupted(method: Any, *arguments: Any) -> Any:
        if method is not None:
            raise KeyboardInterrupt
        return plain(method, *arguments)

    monkeypatch.setattr(measure, "uptrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, text)
    assert [row["method"] for row in written(text.with_name("out"))["rows"]] == ["none"]


def test_a_record_without_a_training_is_of_none(tmp_path: Path) -> None:
    (tmp_path / "conversion.json").write_text('{"uptraining": []}')
    assert measure.last_training(tmp_path) is None


def test_the_model_of_another_text_is_refused(text: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text.write_text(TEXT.replace("twig", "leaf"))
    with pytest.raises(OptionError, match=r"of another run: text was '[0-9a-f]{64}' and is '[0-9a-f]{64}': give"):
        run(monkeypatch, text)


def test_a_model_that_nothing_is_known_of_is_refused(
    text: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trained / "mha.json").unlink()
    with pytest.raises(OptionError, match=r"mha is the model of a run that nothing is known of: give another --out$"):
        run(monkeypatch, text)


def test_a_training_that_waits_is_asked_too(text: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trained / "mha" / "conversion.json").unlink()
    (trained / "mha" / "uptraining").mkdir()
    with pytest.raises(OptionError, match=r"minutes was 20\.0 and is 3\.0"):
        run(monkeypatch, text, "--minutes", "3")
