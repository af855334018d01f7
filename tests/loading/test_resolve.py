"""A model's name is a path, a demo model or a Hub id, and anything else is answered with what is near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_files import write_tiny_directory, write_tiny_gguf

from kvist.errors import ModelFileError, ModelNotFoundError
from kvist.loading import resolve as resolve_module
from kvist.loading.progress import no_progress
from kvist.loading.resolve import resolve


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and neither index nor Hub: what would be fetched is noted instead."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(resolve_module, "pull", lambda name, progress: Path("pulled", name))
    monkeypatch.setattr(resolve_module, "fetch_repository", lambda repo, revision, progress: Path(repo, str(revision)))
    monkeypatch.setattr(
        resolve_module, "fetch_file", lambda repo, file, revision, progress: Path(repo, file, str(revision))
    )
    return folder


def found(model: str) -> tuple[str, Path]:
    source = resolve(model, no_progress)
    return source.name, source.path


def test_a_directory_and_a_file_are_taken_as_they_are(elsewhere: Path) -> None:
    directory = write_tiny_directory(elsewhere / "my model")
    file = write_tiny_gguf(elsewhere / "tiny.Q4_1.gguf")
    assert found(str(directory)) == ("my model", directory)
    assert found("my model") == ("my model", Path("my model"))
    assert found("tiny.Q4_1.gguf") == ("tiny.Q4_1", Path("tiny.Q4_1.gguf"))
    assert not resolve(str(directory), no_progress).is_gguf
    assert resolve(str(file), no_progress).is_gguf


def test_a_path_object_is_taken_as_a_string_is(elsewhere: Path) -> None:
    file = write_tiny_gguf(elsewhere / "tiny.gguf")
    assert resolve(file, no_progress) == resolve(str(file), no_progress)
    with pytest.raises(ModelNotFoundError, match=r"there is no file or directory absent.gguf"):
        resolve(Path("absent.gguf"), no_progress)


def test_the_home_directory_is_understood(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    file = write_tiny_gguf(elsewhere / "tiny.gguf")
    assert found("~/tiny.gguf") == ("tiny", file)


def test_a_demo_name_is_pulled() -> None:
    assert found("smollm2-135m") == ("smollm2-135m", Path("pulled/smollm2-135m"))


def test_a_local_directory_comes_before_a_demo_name_and_a_hub_id(elsewhere: Path) -> None:
    write_tiny_directory(elsewhere / "smollm2-135m")
    write_tiny_directory(elsewhere / "org" / "name")
    assert found("smollm2-135m")[1] == Path("smollm2-135m")
    assert found("org/name") == ("name", Path("org/name"))


def test_a_hub_id_may_have_a_revision_and_a_file() -> None:
    assert found("org/name-1.5B") == ("org/name-1.5B", Path("org/name-1.5B/None"))
    assert found("org/name@v2") == ("org/name", Path("org/name/v2"))
    assert found("org/name/file.Q4_K.gguf") == ("file.Q4_K", Path("org/name/file.Q4_K.gguf/None"))
    assert found("org/name@abc/sub/file.gguf") == ("file", Path("org/name/sub/file.gguf/abc"))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("gpt-5", "known: smollm2-135m, gemma3-270m, or give a directory, a .gguf file or a Hugging Face id"),
        ("", "no model is called ''"),
        ("absent.gguf", "there is no file or directory absent.gguf"),
        ("models/absent.gguf", "there is no file or directory models/absent.gguf"),
        ("./absent", "there is no file or directory ./absent"),
        ("/absent/model", "there is no file or directory /absent/model"),
        ("~/absent", "there is no file or directory ~/absent"),
        ("a/b/c/d", "there is no file or directory a/b/c/d"),
        ("null\0byte", "no model is called"),
        ("x" * 5000, "no model is called"),
    ],
)
def test_what_is_not_there_is_said_with_what_is_possible(model: str, reason: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(model, no_progress)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pytorch_model.bin", "can run any code when it is read, so it is never opened"),
        ("model.pt", "can run any code"),
        ("model.safetensors", "is a part of a model: give the directory"),
        ("config.json", "is a part of a model: give the directory"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_way_out(name: str, reason: str, elsewhere: Path) -> None:
    (elsewhere / name).write_bytes(b"\x80\x02")
    with pytest.raises(ModelFileError, match=reason):
        resolve(name, no_progress)


def test_a_directory_without_a_model_says_what_it_lacks(elsewhere: Path) -> None:
    (elsewhere / "empty").mkdir()
    with pytest.raises(
        ModelFileError, match=r"empty has no config.json: give a directory in Hugging Face format or a .gguf file"
    ):
        resolve("empty", no_progress)
    write_tiny_gguf(elsewhere / "empty" / "tiny.gguf")
    with pytest.raises(ModelFileError, match=r"has no config.json: it holds tiny.gguf: give that file"):
        resolve("empty", no_progress)


def test_what_is_neither_file_nor_directory_is_refused(elsewhere: Path) -> None:
    with pytest.raises(ModelFileError, match="is neither a file nor a directory"):
        resolve("/dev/null", no_progress)


def test_progress_reaches_whoever_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(resolve_module, "pull", lambda name, progress: given.append(progress) or Path(name))
    resolve("gemma3-270m", no_progress)
    assert given == [no_progress]


@pytest.mark.parametrize("name", ["org/tiny/../../x.gguf", "org/tiny/./x.gguf", "~nosuchuser/x.gguf", "~nosuchuser/x"])
def test_what_no_hub_file_is_called_is_looked_for_here_alone(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file or directory"):
        resolve(name, no_progress)
