"""Text from the user: an argument, standard input as a whole, or line by line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from kvist.cli.output import print_error, print_note
from kvist.errors import PromptError


def is_typed() -> bool:
    """Whether standard input is a terminal; `PromptError` if it is closed."""
    if sys.stdin is None:
        raise PromptError("standard input is closed: leave out <&-, or read from a file or a pipe")
    return sys.stdin.isatty()


def checked(argument: str) -> str:
    """The text of an argument; `PromptError` if it is not UTF-8.

    Bytes that are no text in the locale reach Python as lone surrogates. In the locale C that is all but ASCII.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(argument).decode()
        except UnicodeError:
            raise _not_utf8() from None
    return argument


def read_all() -> str:
    """Standard input without its final line break, which echo and editors add."""
    if is_typed():
        print_note("type the prompt and end it with Ctrl-D on a line of its own")
    with _reading_errors():
        return sys.stdin.read().removesuffix("\n")


def read_bytes() -> bytes:
    """Standard input as it is."""
    if is_typed():
        print_note("type the text and end it with Ctrl-D on a line of its own")
    with _reading_errors():
        return sys.stdin.buffer.read()


def typed_lines(sign: str) -> Iterator[str]:
    """Lines of a terminal, each asked for with an empty line and `sign`, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() edits and recalls lines once it is imported)
    while True:
        print(file=sys.stderr)
        try:
            if sys.stdout.isatty():
                line = input(sign)
            else:
                print(sign, end="", file=sys.stderr, flush=True)
                line = input()
        except UnicodeDecodeError:
            print_error(str(_not_utf8()))
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        yield line


def piped_lines() -> Iterator[str]:
    """Lines of standard input, without their line breaks."""
    while True:
        with _reading_errors():
            line = sys.stdin.readline()
        if not line:
            return
        yield line.removesuffix("\n")


@contextlib.contextmanager
def _reading_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise _not_utf8() from None
    except OSError as error:
        raise PromptError(f"standard input cannot be read: {error.strerror or error}") from error


def _not_utf8() -> PromptError:
    return PromptError("the text is not UTF-8: convert it first, for instance with iconv")
