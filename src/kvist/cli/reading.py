"""Text from the user: an argument, standard input as a whole, or line by line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from kvist.cli.output import print_error, print_note
from kvist.errors import PromptError


def is_typed() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin.isatty()


def checked(text: str) -> str:
    """The text, if it can be encoded: bytes that are not UTF-8 reach Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _not_utf8() from None
    return text


def read_all() -> str:
    """Standard input without its final line break, which echo and editors add."""
    if is_typed():
        print_note("type the prompt and end it with Ctrl-D on a line of its own")
    try:
        return checked(sys.stdin.read().removesuffix("\n"))
    except UnicodeDecodeError:
        raise _not_utf8() from None


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
    try:
        for line in sys.stdin:
            yield checked(line.removesuffix("\n"))
    except UnicodeDecodeError:
        raise _not_utf8() from None


def _not_utf8() -> PromptError:
    return PromptError("the text is not UTF-8: convert it first, for instance with iconv")
