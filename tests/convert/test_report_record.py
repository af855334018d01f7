"""What a report takes from `conversion.json` and the learning curve, which may be anybody's."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from uptrain_tiny import write_student, write_teacher, write_text

from kvist.convert.conversion import to_gqa
from kvist.convert.record import ConversionRecord, add_training
from kvist.convert.report import conversion_report
from kvist.convert.report_config import ReportConfig
from kvist.convert.report_markdown import markdown
from kvist.convert.report_plot import draw_training
from kvist.convert.uptrain_curve import Curve, CurveRow, read_curve
from kvist.errors import ModelFileError
from kvist.evaluate.text_windows import EvaluationText

TRAINING: dict[str, Any] = {
    "texts": [{"name": "a.txt", "sha256": "0"}, {"name": "b.txt", "sha256": "1"}],
    "text_tokens": 900,
    "held_out": "the last part of the texts",
    "held_out_tokens": 64,
    "steps": 4,
    "tokens": 128,
    "seconds": 2.5,
    "loss_before": 3.0,
    "loss_after": 2,
    "references": {"teacher": 1.5},
    "machine": "A CPU",
}


def read(directory: Path, record: object) -> ConversionRecord:
    (directory / "conversion.json").write_text(json.dumps(record))
    return ConversionRecord.read(directory)


def test_what_was_trained_is_read(tmp_path: Path) -> None:
    record = read(tmp_path, {"method": "mean", "layers": [1], "uptraining": [{}, TRAINING]})
    assert record.method == "mean"
    assert record.fields["layers"] == [1]
    assert record.training is not None
    assert record.training.texts == ("a.txt", "b.txt")
    assert (record.training.steps, record.training.held_out_tokens) == (4, 64)
    assert record.training.losses == {"before": 3.0, "after": 2.0, "teacher": 1.5}
    assert record.training.references == {"teacher": 1.5}


def test_what_is_not_said_is_left_out(tmp_path: Path) -> None:
    assert ConversionRecord.read(tmp_path) == ConversionRecord()
    assert read(tmp_path, {"uptraining": []}).training is None
    training = read(tmp_path, {"uptraining": [{}]}).training
    assert training is not None
    assert (training.texts, training.steps, training.losses) == ((), None, {})


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"method": 7}, "method is 7"),
        ({"uptraining": {}}, "uptraining is {}"),
        ({"uptraining": ["a"]}, "an uptraining in it is 'a'"),
        ({"uptraining": ["a", TRAINING]}, "an uptraining in it is 'a'"),
        *(
            ({"uptraining": [TRAINING | {name: value}]}, f"{name} is ")
            for name, value in {
                "texts": ["a"], "text_tokens": "many", "held_out": 5, "held_out_tokens": True, "steps": [4],
                "tokens": 1e400, "seconds": 10**400, "loss_after": "low", "references": [1], "machine": {},
            }.items()
        ),
        ({"uptraining": [TRAINING | {"texts": [{"name": 3}]}]}, "texts is "),
        ({"uptraining": [TRAINING | {"references": {"teacher": float("nan")}}]}, "references is "),
        ({"layers": [float("nan")]}, "holds a number that is not finite"),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused(tmp_path: Path, record: object, place: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path, record)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'conversion.json'} ")
    assert place in message
    assert message.endswith(": convert the model again, or delete the file")
    assert "\n" not in message


@pytest.mark.parametrize(
    "row", ['{"step": 1, "loss": "low"}', '{"step": "a"}', '{"step": 1, "loss": NaN}', "{}", "[1]"]
)
def test_a_curve_of_another_form_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "uptraining.jsonl").write_text(f'{{"step": 0, "validation_loss": 2.0}}\n{row}\n')
    with pytest.raises(ModelFileError, match="is no learning curve that can be read: delete it"):
        read_curve(tmp_path)


def test_a_model_without_a_curve_has_none(tmp_path: Path) -> None:
    assert read_curve(tmp_path) is None


@pytest.mark.parametrize(("name", "text"), [("conversion.json", '{"uptraining": 3}'), ("uptraining.jsonl", "twig")])
def test_it_is_read_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    student = write_student(tmp_path / "few")
    (student / name).write_text(text)
    monkeypatch.setattr("kvist.convert.report.load", lambda *_, **__: pytest.fail("a model was loaded first"))
    with pytest.raises(ModelFileError, match=name):
        conversion_report("many", student, EvaluationText("t", "", "twig"), ReportConfig())


def test_what_a_record_says_is_shown_and_never_acted_on(tmp_path: Path) -> None:
    teacher, student = write_teacher(tmp_path / "many"), write_student(tmp_path / "few")
    text = EvaluationText.read(write_text(tmp_path / "twig.txt"))
    config = ReportConfig(window=32, windows=2, contexts=(8,), new_tokens=1, repetitions=1)
    report = conversion_report(str(teacher), student, text, config)
    evil = "\x1b[31mred\nline | $\\frac$ \ud800"
    training = {
        name: [{"name": evil}] if name == "texts" else evil if isinstance(value, str) else value
        for name, value in TRAINING.items()
    }
    record = read(tmp_path, {"method": evil, "uptraining": [training | {"references": {evil: 1.5}}]})
    trained = replace(report, record=record, curve=Curve([CurveRow(step=0, validation_loss=2.0)]))
    draw_training(tmp_path / "curve.svg", "svg", trained)
    assert r"\x1b[31mred\nline" in (tmp_path / "curve.svg").read_text()
    written = markdown(trained, {})
    plain = "\\x1b[31mred\\nline"
    assert written.count(plain) == 5
    written.encode()
    assert "\x1b" not in written
    (row,) = (line for line in written.splitlines() if line.startswith("| ") and plain in line)
    assert row.replace("\\|", "").count("|") == 3
    json.dumps(report.figures()).encode()


def test_a_record_that_is_nested_too_deep_is_said_to_be(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    (tmp_path / "conversion.json").write_text(json.dumps({"layers": deep}))
    limit = sys.getrecursionlimit()
    plain = json.dumps

    def dumped(*arguments: Any, **options: Any) -> str:
        sys.setrecursionlimit(len(inspect.stack(0)) + 100)
        try:
            return plain(*arguments, **options)
        finally:
            sys.setrecursionlimit(limit)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json, "dumps", dumped)
        with pytest.raises(ModelFileError, match="is nested too deeply: convert the model again, or delete the file"):
            ConversionRecord.read(tmp_path)


def test_a_training_is_added_once(tmp_path: Path) -> None:
    read(tmp_path, {"method": "mean", "uptraining": [{"steps": 1}]})
    for steps in (2, 3):
        add_training(tmp_path, "a", {"steps": steps})
    add_training(tmp_path, "b", {"steps": 4})
    record = ConversionRecord.read(tmp_path)
    assert record.method == "mean"
    assert record.fields["uptraining"] == [{"steps": 1}, {"id": "a", "steps": 3}, {"id": "b", "steps": 4}]


def test_a_source_whose_record_is_of_another_form_is_not_converted(tmp_path: Path) -> None:
    """It would be carried, and no reader would take it."""
    source = write_teacher(tmp_path / "source")
    (source / "conversion.json").write_text('{"a": NaN}')
    with pytest.raises(ModelFileError, match="holds a number that is not finite"):
        to_gqa(source, tmp_path / "made", 1)
    assert not (tmp_path / "made").exists()
