"""An output file is refused at the start or written whole at the end."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvist.cli.output_file import output_file
from kvist.errors import OptionError


def test_a_finished_file_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with output_file("--json", path) as file:
        assert path.read_text() == "old"
        file.write(lambda aside: aside.write_text("new"))
        assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def fail_after(aside: Path, error: Callable[[], BaseException]) -> None:
    aside.write_text("half")
    raise error()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_not_finished_leaves_nothing_behind(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(error), output_file("--json", path) as file:
        file.write(lambda aside: fail_after(aside, error))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_no_path_is_no_file():
    with output_file("--json", None) as file:
        assert file is None


def test_the_file_that_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "a.json"
    link.symlink_to(tmp_path / "there" / "b.json")
    with output_file("--json", link) as file:
        file.write(lambda aside: aside.write_text("new"))
    assert link.is_symlink()
    assert (tmp_path / "there" / "b.json").read_text() == "new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    with output_file("--json", path) as file:
        file.write(lambda aside: aside.write_text("new"))
    reader.join(10)
    assert read == ["new"]
    assert path.is_fifo()


def test_a_file_that_is_write_protected_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")
    path.chmod(0o400)
    monkeypatch.setattr(os, "access", lambda file, mode: Path(file) != path)  # root may write what it likes
    with pytest.raises(OptionError, match="permission denied"), output_file("--json", path):
        pass
    assert path.read_text() == "old"


def test_a_disk_that_gets_full_is_told_with_the_option(tmp_path):
    path = tmp_path / "a.json"
    with (
        pytest.raises(OptionError, match=r"^--json .*a\.json cannot be written: No space left"),
        output_file("--json", path) as file,
    ):
        file.write(lambda aside: fail_after(aside, lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert list(tmp_path.iterdir()) == []


def test_errors_within_are_not_taken_for_the_files(tmp_path):
    for path in (tmp_path / "a.json", Path(os.devnull)):
        with pytest.raises(FileNotFoundError, match="model"), output_file("--json", path):
            raise FileNotFoundError("model")
    assert Path(os.devnull).exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere/a", "there is no folder .*nowhere"), (".", "it is a folder"), ("file/a", "directory")],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name, message):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=f"^--json .*{message}"), output_file("--json", tmp_path / name):
        pass


def test_who_may_read_it_stays_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    path.chmod(0o600)
    with output_file("--json", path) as file:
        file.write(lambda aside: aside.write_text("new"))
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="this system has no /dev/fd")
def test_a_pipe_without_a_name_is_written_to() -> None:
    reader, writer = os.pipe()
    with output_file("--json", Path(f"/dev/fd/{writer}")) as file:
        assert file is not None
        file.write(lambda path: path.write_text("{}"))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "{}"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_a_folder_that_takes_no_files_is_said_to_be_there() -> None:
    with pytest.raises(OptionError, match="No such file") as caught, output_file("--json", Path("/proc/x.json")):
        pass
    assert "no folder" not in str(caught.value)
