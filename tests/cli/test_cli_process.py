"""The command line as a process of its own: what signals do to it, and standard streams that are closed or full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BY_ROTE = """
import os, signal, sys, types
sys.path.insert(0, os.environ["KVIST_TEST_FAKES"])
from cli_fakes import FakeLLM
fake = FakeLLM()
module = types.ModuleType("kvist.llm")
module.LLM = lambda model, **options: fake
sys.modules["kvist.llm"] = module
"""
START = """
from kvist.cli.main import main
sys.exit(main())
"""
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TEXT = "用中文 🙂"
FULL = pytest.param(
    "/dev/full", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
)


def command(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", BY_ROTE + code + START, *arguments]


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return inherited | {"KVIST_TEST_FAKES": str(Path(__file__).parent)} | more


def kvist(
    *arguments: str, code: str = "", redirected: str = "", given: bytes | None = None, **variables: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; `redirected` is the shell's, like `2>&-`."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *command(code, *arguments)],
        env=environment(**variables),
        input=given,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(("sent", "exit_code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("imported", ["typer", "json.tool"])
def test_signal_takes_effect_after_the_import_that_would_lose_it(imported, sent, exit_code):
    code = f"""
class Losing:
    def find_spec(name, path, target=None):
        if name == "{imported}":
            try:
                os.kill(os.getpid(), signal.{sent})
            except BaseException:  # as PyTorch's import of NumPy from C++ does
                print("lost", file=sys.stderr)
sys.meta_path.insert(0, Losing)
def work():
    import json.tool, time
    time.sleep(10)
fake.during_answer = work
"""
    assert kvist("run", "hello", code=code) == (exit_code, "", "")


@pytest.mark.parametrize("moment", ["atexit", "threads", "modules"])
def test_interrupt_at_exit_is_no_traceback(moment):
    code = f"""
import atexit, threading
def interrupt(kill=os.kill, process=os.getpid(), number=signal.SIGINT):
    kill(process, number)
class Late:
    __del__ = lambda self, interrupt=interrupt: interrupt()
match "{moment}":
    case "threads": threading._register_atexit(interrupt)
    case "atexit": atexit.register(interrupt)
    case "modules": late = Late()
fake.during_answer = interrupt
"""
    assert kvist("run", "hello", code=code) == (130, "", "")


def test_second_interrupt_does_not_interrupt_the_cleanup():
    code = """
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
def close():
    interrupt()
    print("closed", file=sys.stderr)
fake.during_answer, fake.close = interrupt, close
"""
    assert kvist("run", "hello", code=code) == (130, "", "closed\n")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_ended_pull_cleans_up_and_ends_pip(tmp_path, sent):
    code = """
import functools, kvist.loading.pull
pip = "import os, time, pathlib; pathlib.Path(os.environ['PIP_PID']).write_text(str(os.getpid())); time.sleep(1000)"
kvist.loading.pull.pull = functools.partial(kvist.loading.pull.pull, pip=[sys.executable, "-c", pip])
"""
    written = tmp_path / "pid"
    variables = environment(KVIST_CACHE=str(tmp_path), PIP_PID=str(written))
    process = subprocess.Popen(command(code, "pull", "smollm2-135m"), env=variables, stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + 60
    while not (written.exists() and written.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.communicate(timeout=60) == (None, b"")
    assert process.returncode == 128 + sent
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2-135m.gguf.lock"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def test_signal_that_was_ignored_stays_ignored():
    code = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
fake.during_answer = lambda: os.kill(os.getpid(), signal.SIGHUP)
"""
    assert kvist("run", "--quiet", "hello", code=code) == (0, "hello\n", "")


@pytest.mark.parametrize("arguments", [("run", "-"), ("chat",)])
def test_closed_standard_input_is_one_line_before_anything_is_loaded(arguments):
    code = "module.LLM = None\n"
    message = "error: standard input is closed: leave out <&-, or read from a file or a pipe\n"
    assert kvist(*arguments, code=code, redirected="<&-") == (2, "", message)


def test_unreadable_standard_input_is_one_line(tmp_path):
    code, out, err = kvist("run", "-", redirected=f"0>{tmp_path / 'file'}")
    assert (code, out, err) == (2, "", "error: standard input cannot be read: Bad file descriptor\n")


@pytest.mark.parametrize("arguments", [("run", "hello"), ("models",), ("--version",)])
def test_closed_standard_output_is_one_line(arguments):
    message = "error: standard output is closed, so nothing can be shown: leave out >&-, or send it to a file\n"
    assert kvist(*arguments, redirected=">&-") == (2, "", message)


def test_with_every_stream_closed_it_still_ends_with_an_error():
    assert kvist("run", "hello", redirected="<&- >&- 2>&-") == (2, "", "")


@pytest.mark.parametrize("target", ["&-", FULL])
def test_answer_outlives_a_closed_or_full_standard_error(target):
    assert kvist("run", "hello", redirected=f"2>{target}") == (0, "hello\n", "")


@pytest.mark.parametrize("target", ["&-", FULL])
def test_error_keeps_its_exit_code_where_it_cannot_be_told(target):
    assert kvist("run", "", redirected=f"2>{target}") == (2, "", "")


def test_files_never_get_the_number_of_a_closed_stream(tmp_path):
    code = """
def write():
    with open(os.environ["OTHER_FILE"], "wb") as file:
        os.write(2, b"not for the file")
fake.during_answer = write
"""
    other = tmp_path / "file"
    assert kvist("run", "hello", code=code, redirected="<&- 2>&-", OTHER_FILE=str(other)) == (0, "hello\n", "")
    assert other.read_bytes() == b""


def test_text_is_utf8_whatever_the_locale():
    given = TEXT.encode()
    assert kvist("run", "--quiet", "-", given=given, **ASCII_LOCALE) == (0, TEXT + "\n", "")
    assert kvist("run", "--quiet", TEXT, **ASCII_LOCALE) == (0, TEXT + "\n", "")
    assert kvist("chat", given=given, **ASCII_LOCALE) == (0, f"turn 1: {TEXT}\n", "")
    assert kvist("run", "--kv-format", TEXT, "hello", **ASCII_LOCALE)[0] == 2


@pytest.mark.parametrize("locale", [{}, ASCII_LOCALE])
def test_input_that_is_not_utf8_is_refused(locale):
    message = "error: the text is not UTF-8: convert it first, for instance with iconv\n"
    assert kvist("run", "-", given=b"caf\xe9", **locale) == (2, "", message)
    assert kvist("run", os.fsdecode(b"caf\xe9"), **locale) == (2, "", message)
    assert kvist("run", "hello", "--system", os.fsdecode(b"caf\xe9"), **locale) == (2, "", message)
    assert kvist("run", "hello", "--stop", os.fsdecode(b"caf\xe9"), **locale) == (2, "", message)
    assert kvist("chat", given=b"caf\xe9\n", **locale) == (2, "", message)
    assert kvist("chat", "--system", os.fsdecode(b"caf\xe9"), **locale) == (2, "", message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_is_one_line():
    message = "error: standard output cannot be written: No space left on device\n"
    assert kvist("run", "hello", redirected=">/dev/full") == (2, "", message)


@pytest.mark.parametrize("verb", [("models",), ("run", "hello")])
def test_without_a_home_the_cache_folder_must_be_named(verb):
    code = """
import pwd
def getpwuid(number):
    raise KeyError(number)
pwd.getpwuid = getpwuid
del os.environ["HOME"]
sys.modules.pop("kvist.llm") if sys.argv[1] == "run" else None
"""
    variables = {"KVIST_CACHE": "", "XDG_CACHE_HOME": ""}
    message = "error: the cache folder ~/.cache is in no known home folder: set KVIST_CACHE to a folder\n"
    assert kvist(*verb, code=code, **variables) == (2, "", message)
