"""Where the `kvist` process starts. It imports little, so that a Ctrl-C is handled from the first moment."""

from __future__ import annotations

import sys

from kvist.cli.interrupts import INTERRUPTED, end_at_once, take_signals


def main() -> int:
    """Set the process up, run the command line and return the exit code.

    130 is an interruption by Ctrl-C, 2 an error; `kvist.cli.app.command_line` gives the others.
    """
    try:
        take_signals()
        from kvist.cli.output import print_error
        from kvist.cli.streams import prepare_streams

        prepare_streams()
        if sys.stdout is None:
            print_error("standard output is closed, so nothing can be shown: leave out >&-, or send it to a file")
            return 2
        from kvist.cli.app import command_line

        return command_line()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        end_at_once()
