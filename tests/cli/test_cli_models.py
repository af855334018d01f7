from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvist.cli.progress import progress_bar
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
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:4] for line in lines if line.startswith(tuple(DEMO_MODELS))}
    assert rows == {"smollm2-135m": ["93.8", "MiB", "yes"], "gemma3-270m": ["241.4", "MiB", "no"]}


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


def test_pull_prints_each_stage_once_where_there_is_no_terminal(kvist, cache, monkeypatch):
    def fetch(name, progress):
        for done in range(0, 100, 10):
            progress(f"fetching {name}", done, 100)
        progress(f"checking {name}", 0, None)
        return cache / name

    monkeypatch.setattr("kvist.loading.pull.pull", fetch)
    outcome = kvist("pull", "gemma3-270m")
    assert outcome.out == f"{cache / 'gemma3-270m'}\n"
    note, *stages = outcome.err.splitlines()
    assert note.startswith("note: gemma3-270m is 241.4 MiB large, its licence: Gemma Terms of Use")
    assert stages == ["fetching gemma3-270m", "checking gemma3-270m"]


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
