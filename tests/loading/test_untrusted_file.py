"""JSON that is none is an error for the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.errors import ModelFileError
from kvist.loading.untrusted_file import read_json, write_json


def test_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    value = {"name": "åäö 漢字", "list": [1, 2.5, None, True]}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"is not valid JSON \(it is empty\): fetch it again"),
        (b"{'a': 1}", r"is not valid JSON \(it is a JSON file\): fetch it again"),
        (b"<!doctype html>", "it is a web page"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b"[]", "holds no JSON object"),
        (b"3", "holds no JSON object"),
    ],
)
def test_anything_else_is_an_error_that_names_the_file(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ModelFileError, match=reason) as caught:
        read_json(tmp_path / "x.json")
    assert "x.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_with_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"x.json is missing in {tmp_path}"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").mkdir()
    with pytest.raises(ModelFileError, match="cannot be read: Is a directory"):
        read_json(tmp_path / "x.json")


def test_a_configuration_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.loading.untrusted_file._MOST_JSON_BYTES", 1 << 20)
    with pytest.raises(ModelFileError, match="/dev/zero is larger than any file of its kind"):
        read_json(Path("/dev/zero"))
