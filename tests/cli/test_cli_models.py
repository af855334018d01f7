from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvist.cli.progress import progress_bar
from kvist.errors import DownloadError
from kvist.loading.demo_models import DEMO_MODELS


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def pulled(cache) -> Path:
    """A sparse file that has the size of the model."""
    model = DEMO_MODELS["smollm2-135m"]
    model.path.parent.mkdir(parents=True)
    with model.path.open("wb") as file:
        file.truncate(model.num_bytes)
    return model.path


def test_models_tells_what_is_pulled(kvist, pulled):
    lines = kvist("models").out.splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in lines if line.startswith(tuple(DEMO_MODELS))}
    assert rows == {"smollm2-135m": ["93.8", "MiB", "yes"], "gemma3-270m": ["241.4", "MiB", "no"]}


@pytest.mark.parametrize("arguments", [("models",), ("pull",)])
@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("60", 60), ("20", 40), ("0", 80)])
def test_tables_fit_the_terminal_and_keep_names_whole(kvist, cache, monkeypatch, arguments, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    out = re.sub(r"\x1b\[[0-9;]*m", "", kvist(*arguments).out)
    assert all(name in out for name in DEMO_MODELS)
    assert width - 10 < max(map(len, out.splitlines())) <= width


def test_tables_are_not_cut_where_a_program_reads_them(kvist, cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    out = kvist("models").out
    for model in DEMO_MODELS.values():
        assert model.name in out
        assert model.description in out


def test_models_json_is_one_object(kvist, pulled):
    outcome = kvist("models", "--json")
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    printed = json.loads(outcome.out)
    assert list(printed) == ["demo_models", "prepared_copies"]
    smollm2 = printed["demo_models"][0]
    assert list(smollm2) == ["name", "description", "licence", "num_bytes", "pulled", "path"]
    assert (smollm2["name"], smollm2["pulled"], smollm2["path"]) == ("smollm2-135m", True, str(pulled))


def test_pull_of_what_is_there_prints_its_path(kvist, pulled):
    outcome = kvist("pull", "smollm2-135m")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{pulled}\n", "note: smollm2-135m was there already\n")


def test_pull_prints_the_path_and_tells_size_and_licence(kvist, cache, monkeypatch):
    def fetch(name, progress):
        progress(f"fetching {name}", 10, 100)
        return cache / name

    monkeypatch.setattr("kvist.loading.pull.pull", fetch)
    outcome = kvist("pull", "gemma3-270m")
    assert outcome.out == f"{cache / 'gemma3-270m'}\n"
    licence = "Gemma Terms of Use (ai.google.dev/gemma/terms)"
    assert outcome.err == f"note: gemma3-270m is 241.4 MiB large, its licence: {licence}\n"


def test_failed_pull_is_one_line(kvist, cache, monkeypatch):
    def fail(name, progress):
        progress(f"fetching {name}", 10, 100)
        raise DownloadError(f"{name} could not be fetched")

    monkeypatch.setattr("kvist.loading.pull.pull", fail)
    assert kvist("pull", "gemma3-270m").error == "gemma3-270m could not be fetched"


def test_pull_alone_lists_what_there_is(kvist, cache):
    outcome = kvist("pull")
    assert outcome.code == 0
    assert all(name in outcome.out for name in DEMO_MODELS)


def test_pull_of_an_unknown_name_suggests_the_nearest(kvist, cache):
    assert "did you mean 'smollm2-135m'?" in kvist("pull", "smollm2").error


def test_loading_draws_nothing_where_there_is_no_terminal(capsys):
    with progress_bar() as progress:
        progress("reading", 1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_loading_draws_a_bar_on_a_terminal_once_it_takes_long(monkeypatch, capsys, patience_s):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("kvist.cli.progress._PATIENCE_S", patience_s)
    with progress_bar() as progress:
        progress("reading [weights]", 1 << 20, 4 << 20)
    drawn = capsys.readouterr()
    assert drawn.out == ""
    assert ("reading [weights]" in drawn.err) == ("1.0/4.0 MiB" in drawn.err) == (patience_s == 0)
