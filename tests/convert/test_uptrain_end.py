"""The end of a training, which may be cut short at any moment: what is there then, and that it is made good."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_fakes import same_bits, state_of
from safetensors.torch import load_file
from uptrain_tiny import stopped, train_config, training, write_student, write_teacher

import kvist.convert.uptrain as uptrain_module
from kvist.loading import load


class Killed(BaseException):
    """As if the process were gone."""


# All by which files get names, lose them or reach the disk; `Path` and `shutil` call them too.
_OPERATIONS = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync")


def kill_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let so many operations on files be the last; says whether there was one more."""
    done, dead = 0, False

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            nonlocal done, dead
            dead = dead or done == count
            if dead:
                raise Killed
            done += 1
            return operation(*arguments, **options)

        return called

    for name in _OPERATIONS:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: dead


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return write_teacher(tmp_path / "teacher")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_kill_at_any_moment_of_the_end_is_made_good(tmp_path: Path, teacher: Path, num_shards: int) -> None:
    whole, waiting = (write_student(tmp_path / name, num_shards=num_shards) for name in ("whole", "waiting"))
    before = state_of(waiting)
    training(whole, teacher, train_config(2)).run()
    trained = state_of(whole)
    stopped(training(waiting, teacher, train_config(2)), 2)
    count, found = 0, set()
    while True:
        student = shutil.copytree(waiting, tmp_path / f"student_{count}")
        ending = training(student, teacher, resume=True, config=train_config(2))
        with pytest.MonkeyPatch.context() as patched:
            is_dead = kill_after(count, patched)
            try:
                ending.run()
            except Killed:
                assert is_dead()
        if not is_dead():
            break
        listed = listed_state(student)
        assert same_bits(listed, before) or same_bits(listed, trained)
        load(student)
        if waits(student):
            training(student, teacher, resume=True, config=train_config(2)).run()
        assert same_bits(listed_state(student), trained)
        (entry,) = json.loads((student / "conversion.json").read_text())["uptraining"]
        assert entry["steps"] == 2
        assert (student / "uptraining.jsonl").read_text().count("\n") == 3
        left = {path.name for path in student.iterdir() if "partial" in path.name}
        assert len(list(student.glob("*.safetensors"))) == num_shards
        assert left <= {".uptraining.partial"}
        found |= left
        shutil.rmtree(student)
        count += 1
    assert count > 10
    assert found == {".uptraining.partial"}


def waits(student: Path) -> bool:
    return (student / "uptraining").exists()


def listed_state(student: Path) -> dict[str, torch.Tensor]:
    """The weights that readers find."""
    index = student / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(student / file).items()}


def test_what_was_left_of_a_training_that_ended_goes_away_with_the_next(tmp_path: Path, teacher: Path) -> None:
    student = write_student(tmp_path / "student")
    (student / ".uptraining.partial" / "step-00000002").mkdir(parents=True)
    training(student, teacher).run()
    assert not [path for path in student.iterdir() if "partial" in path.name]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_the_end(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    student, replace = write_student(tmp_path / "student"), uptrain_module.replace_weights

    def replaced(*arguments: Any) -> None:
        replace(*arguments)
        signal.raise_signal(sent)

    monkeypatch.setattr(uptrain_module, "replace_weights", replaced)
    before = signal.signal(sent, end)
    try:
        with pytest.raises(SystemExit, match=str(128 + sent)):
            training(student, teacher).run()
    finally:
        signal.signal(sent, before)
    assert len(json.loads((student / "conversion.json").read_text())["uptraining"]) == 1
    assert not waits(student)


def test_the_same_training_asked_for_twice_is_two_trainings(tmp_path: Path, teacher: Path) -> None:
    student = write_student(tmp_path / "student")
    for _ in range(2):
        training(student, teacher).run()
    first, second = json.loads((student / "conversion.json").read_text())["uptraining"]
    assert first["id"] != second["id"]


def test_weights_that_the_files_do_not_hold_stop_the_training_while_it_can_go_on(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are fp32 while they are trained, and rounded to fp16 at the end."""
    student = write_student(tmp_path / "student", dtype=torch.float16)
    begun = training(student, teacher)
    stopped(begun, 3)
    again = training(student, teacher, train_config(save_minutes=0), resume=True)
    norm = again._ready.trained["model.norm.weight"]
    with torch.no_grad():
        norm[3] = 1e6
    with pytest.raises(uptrain_module.NumericsError) as caught:
        again.run()
    assert str(caught.value) == (
        "model.norm.weight has numbers that F16 does not hold, whose largest is 6.55e+04: the training checkpoint of "
        "step 3 is kept: go on from it with --resume and a lower rate, like --learning-rate 0.0007, or convert the "
        "model from a source in a wider dtype"
    )
    assert training(student, teacher, resume=True).run().steps == 6
