"""The verbs together, and what every one of them does about errors."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from kvist.cli.bench import app as bench
from kvist.cli.chat import chat
from kvist.cli.convert import app as convert
from kvist.cli.eval import evaluate
from kvist.cli.models import models
from kvist.cli.output import print_error, print_note
from kvist.cli.plan import plan
from kvist.cli.pull import pull
from kvist.cli.run import run
from kvist.errors import KvistError

EXIT_ERROR = 2
EXIT_BROKEN_PIPE = 1  # what typer exits with when the reader of a pipe has gone

app = typer.Typer(
    name="kvist",
    help="Run open-weight language models, with the KV cache in your hands.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"kvist {version('kvist')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


@app.callback(invoke_without_command=True)
def _kvist(context: typer.Context, version: VersionOption = False) -> None:
    _help_when_alone(context)


def _help_when_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


for _verb in (run, chat, plan, pull, models):
    app.command()(_verb)
app.command("eval")(evaluate)
app.add_typer(
    bench,
    name="bench",
    callback=_help_when_alone,
    invoke_without_command=True,
    no_args_is_help=False,
    help="Measure this machine.",
)
app.add_typer(
    convert,
    name="convert",
    callback=_help_when_alone,
    invoke_without_command=True,
    no_args_is_help=False,
    help="Convert checkpoints between numbers of KV heads.",
)


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process, and return its exit code.

    0 is success, 2 an error that the user can act on (one line on standard error), 130 an interruption by Ctrl-C. Any
    other exception is a bug and passes through with its traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = typer.main.get_command(app).main(
                args=None if arguments is None else list(arguments), prog_name="kvist", standalone_mode=False
            )
        sys.stdout.flush()
    except KvistError as error:
        return _fail(str(error))
    except typer.TyperException as error:
        return _fail(_usage_message(error, sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        _drop_unwritable_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        return _fail(f"standard output cannot be written: {reason}" if _drop_unwritable_output() else reason)
    return code if isinstance(code, int) else 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as a line for people, without the place in the code; those of libraries as Python has them."""
    if issubclass(category, RuntimeWarning):
        print_note(str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _fail(message: str) -> int:
    print_error(message)
    return EXIT_ERROR


def _usage_message(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """What was wrong with the arguments, in one line that ends in where to read more."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else _command_path(arguments)
    if message == "Option '--json' requires an argument":
        message += ": --json FILE writes a file, --json - prints"
    return f"{message[:1].lower()}{message[1:]} (see {command} --help)"


def _command_path(arguments: Sequence[str]) -> str:
    """The verb that arguments begin with, for an error that does not know its own."""
    path = ["kvist"]
    verbs = getattr(typer.main.get_command(app), "commands", {})
    for argument in arguments:
        if argument not in verbs:
            break
        path.append(argument)
        verbs = getattr(verbs[argument], "commands", {})
    return " ".join(path)


def _drop_unwritable_output() -> bool:
    """Where standard output takes nothing more, send it nowhere: Python's flush at exit would fail once more."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False
