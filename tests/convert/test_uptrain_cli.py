"""`kvist convert uptrain` as a person runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from uptrain_tiny import TEXT, stopped, training, write_student, write_teacher, write_text

from kvist.cli.app import command_line

TRAINING = ["--sequence", "16", "--batch", "2", "--compute", "fp32", "--threads", "1"]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """The command for a student that is there, but for how long."""
    teacher, text = write_teacher(tmp_path / "teacher"), write_text(tmp_path / "twig.txt")
    student = write_student(tmp_path / "student")
    return ["convert", "uptrain", str(student), "--teacher", str(teacher), "--text", str(text), *TRAINING]


def test_the_losses_are_printed_and_the_curve_drawn(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "curve.png"
    assert command_line([*asked, "--steps", "8", "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("8 steps, 256 tokens in ")
    for name in ("before", "after", "teacher", "bigram model"):
        assert f"nats per token of the held-out text, {name}\n" in printed.out
    assert "note: step 8 of 8, loss " in printed.err
    assert " tokens/s, 0:00 left" in printed.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_teacher_that_is_not_the_source_and_a_loss_that_rose_are_said(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    student = Path(asked[2])
    record = student / "conversion.json"
    for files_hash, rate in (("0" * 32, "3"), (None, "1e-4")):
        record.write_text(json.dumps({} if files_hash is None else {"source_hash": files_hash}))
        assert command_line([*asked, "--steps", "4", "--learning-rate", rate]) == 0
        said = capsys.readouterr().err
        assert (f"{student} was made from another checkpoint" in said) is (files_hash is not None)
        assert ("the training made it worse" in said) is (rate == "3")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "3", "--minutes", "1"], "give either steps or minutes"),
        (["--steps", "3", "--train", "mlp"], "unknown train 'mlp'"),
        (["--steps", "3", "--resume"], "leave --resume out"),
        (["--steps", "3", "--resume", "--restart"], "give one of them"),
        (["--steps", "3", "--plot", "curve.bmp"], "no known ending"),
        (["--steps", "3", "--text", "missing.txt"], "missing.txt cannot be read"),
        (["--steps", "3", "--sequence", "2000"], "exceed the model's context of 512"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    asked: list[str], capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert command_line([*asked, *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_a_file_that_is_read_is_not_written_nor_judged_on(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, apart = write_text(tmp_path / "other.png"), write_text(tmp_path / "apart.svg")
    for more, options in (
        (["--text", str(other), "--plot", str(other)], "--text and --plot"),
        (["--held-out", str(apart), "--plot", str(apart)], "--held-out and --plot"),
        (["--text", str(other), "--held-out", str(other)], "--text and --held-out"),
    ):
        assert command_line([*asked, "--steps", "2", *more]) == 2
        assert f"{options} name the same file" in capsys.readouterr().err
    assert other.read_text() == apart.read_text() == TEXT


def test_what_goes_on_needs_neither_length_nor_rate(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(training(tmp_path / "student", tmp_path / "teacher"), 2)
    assert command_line([*asked, "--resume", "--minutes", "20"]) == 2
    assert "6 steps were asked for and now minutes is 20" in capsys.readouterr().err
    assert command_line([*asked, "--resume"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("6 steps, ")
    assert "learning rate" not in printed.err


def test_another_rate_is_noted(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(training(tmp_path / "student", tmp_path / "teacher"), 2)
    assert command_line([*asked, "--resume", "--learning-rate", "1e-3"]) == 0
    assert "note: the learning rate was 0.002 and is 0.001 from here on" in capsys.readouterr().err


def test_another_number_of_threads_is_noted(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        stopped(training(tmp_path / "student", tmp_path / "teacher"), 2)
        assert command_line([*asked, "--resume"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "note: 2 threads computed it and 1 do from here on: the weights will be others" in capsys.readouterr().err


def test_ctrl_c_saves_and_says_how_to_go_on(asked: list[str], tmp_path: Path) -> None:
    before = load_file(tmp_path / "student" / "model.safetensors")
    command = [sys.executable, "-m", "kvist", *asked]
    with subprocess.Popen(
        [*command, "--steps", "100000", "--save-minutes", "0"], stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            end_s = time.monotonic() + 120
            while not list((tmp_path / "student").glob("uptraining/step-*[0-9]")):
                assert time.monotonic() < end_s
                assert running.poll() is None
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            _, error = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, error
    last = error.strip().splitlines()[-1]
    assert last.startswith("note: saved after step ")
    assert last.endswith("--steps 100000 --save-minutes 0 --resume")
    step = int(last.split()[4].replace(",", ""))
    (saved,) = (tmp_path / "student" / "uptraining").iterdir()
    assert saved.name == f"step-{step:08}"
    after = load_file(tmp_path / "student" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "Traceback" not in error
