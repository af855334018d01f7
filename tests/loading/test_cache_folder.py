"""The cache folder is where the environment says, and what is made in it appears whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvist.errors import OptionError
from kvist.loading.cache_folder import cache_folder, make_folder, move_into_place, only_process
from kvist.loading.progress import no_progress


def test_kvist_cache_comes_before_xdg_and_xdg_before_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVIST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "kvist"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "kvist"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kvist"
    monkeypatch.setenv("KVIST_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "home" / "mine"
    assert not cache_folder().exists(), "asking must not make it"


@pytest.mark.parametrize("variable", ["KVIST_CACHE", "XDG_CACHE_HOME"])
def test_a_home_folder_that_is_not_known_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVIST_CACHE", raising=False)
    monkeypatch.setenv(variable, "~no-such-user/x")
    with pytest.raises(OptionError, match="~no-such-user/x is in no known home folder: set KVIST_CACHE"):
        cache_folder()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_variable(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(OptionError, match=r"cannot be written .*set KVIST_CACHE to a folder that can"):
        make_folder("models")


def test_a_folder_without_permission_is_an_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OptionError, match="cannot be written"):
        make_folder("models")


def test_what_was_left_half_made_is_removed_by_the_next_who_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    stale, other = tmp_path / "thing.abc.partial", tmp_path / "another.abc.partial"
    for folder in (stale, other):
        folder.mkdir()
        (folder / "part").write_text("half")
    with only_process(target, no_progress) as work:
        assert not stale.exists()
        assert other.exists(), "what another is making under its own lock must stay"
        (work / "new").write_text("whole")
        move_into_place(work / "new", target)
    assert target.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.abc.partial", "thing", "thing.lock"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_and_an_interruption_leave_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def make() -> None:
        with only_process(tmp_path / "thing", no_progress) as work:
            (work / "part").write_text("half")
            raise error

    with pytest.raises(error):
        make()
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]


def test_a_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    (target / "old").write_text("old")
    with only_process(target, no_progress) as work:
        (work / "made").mkdir()
        (work / "made" / "new").write_text("new")
        move_into_place(work / "made", target)
    assert [path.name for path in target.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "copy.lock"]


def test_the_second_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with only_process(tmp_path / "thing", lambda stage, done, total: (order.append(stage), waiting.set())[0]):
            order.append("second")

    with only_process(tmp_path / "thing", no_progress):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(20)
        order.append("first")
    thread.join(20)
    assert order == ["waiting for another process that makes thing", "first", "second"]
