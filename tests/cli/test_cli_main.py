from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from kvist.errors import OptionError, SameAnswerWarning

VERBS = ("run", "chat", "plan", "eval", "pull", "models", "bench", "convert")


def fresh(code: str, *, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def test_alone_it_shows_help(kvist):
    outcome = kvist()
    assert outcome.code == 0
    assert outcome.out == kvist("--help").out
    for verb in VERBS:
        assert f"\n  {verb} " in outcome.out


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_80_columns(kvist, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = kvist(verb, "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize(("group", "verb"), [("bench", "bandwidth"), ("convert", "expand")])
def test_group_alone_shows_its_help(kvist, group, verb):
    outcome = kvist(group)
    assert outcome.code == 0
    assert f"\n  {verb} " in outcome.out


@pytest.mark.parametrize("group", [(), ("bench",), ("convert",)])
def test_a_list_of_verbs_says_of_each_the_whole_of_what_it_does(kvist, group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in kvist(*group, "--help").out.partition("Commands:")[2]


def test_version(kvist, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 1.2.3")
    assert kvist("--version").out == "kvist kvist 1.2.3\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "no such command 'rum'. Did you mean 'run'? (see kvist --help)"),
        (["run"], "missing argument 'PROMPT' (see kvist run --help)"),
        (["models", "all"], "(see kvist models --help)"),
        (
            ["eval", "--json"],
            "option '--json' requires an argument: --json FILE writes a file, --json - prints (see kvist eval --help)",
        ),
        (["bench", "bandwidth", "--threads"], "requires an argument (see kvist bench bandwidth --help)"),
    ],
)
def test_usage_error_is_one_line(kvist, arguments, message):
    assert message in kvist(*arguments).error


@pytest.mark.parametrize("verb", ["run", "chat", "plan", "eval"])
def test_help_names_formats_by_layer(kvist, verb):
    assert "int4/0-1:int8" in kvist(verb, "--help").out


def test_help_does_not_wait_for_torch_or_rich():
    done = fresh(
        "import sys; from kvist.cli.app import command_line; command_line(['run', '--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'huggingface_hub', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    assert (done.returncode, done.stderr) == (0, "")


WRITING = """
import sys, types
from kvist.cli.app import command_line
from kvist.errors import KvistError
class LLM:
    def __init__(self, model, **options):
        for _ in range(100_000):
            print('text')
        raise KvistError('never reached')
module = types.ModuleType('kvist.llm')
module.LLM = LLM
sys.modules['kvist.llm'] = module
sys.exit(command_line(['run', 'hello']))
"""


def test_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = fresh(WRITING, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("category", [RuntimeWarning, SameAnswerWarning])
def test_a_warning_is_a_line(kvist, monkeypatch, category):
    def warn(*arguments, **named):
        warnings.warn("something is slower than it could be", category, stacklevel=2)
        raise OptionError("enough")

    monkeypatch.setattr("kvist.cli.options.open_llm", warn)
    outcome = kvist("run", "hello")
    assert outcome.err == "note: something is slower than it could be\nerror: enough\n"


@pytest.mark.filterwarnings("default")
def test_a_warning_of_a_library_is_not_taken_for_ours(kvist, monkeypatch):
    def warn(*arguments, **named):
        warnings.warn("a library is old", DeprecationWarning, stacklevel=2)
        raise OptionError("enough")

    monkeypatch.setattr("kvist.cli.options.open_llm", warn)
    outcome = kvist("run", "hello")
    assert "DeprecationWarning: a library is old" in outcome.err
    assert "note:" not in outcome.err
