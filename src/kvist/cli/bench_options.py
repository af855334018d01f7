"""The options that measurements of a model share, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvist.checks import check_integer
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats, check_distinct

FORMATS = ("bf16", "int8", "int4")

FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A format to measure, or several with commas; may be given several times.",
        metavar="FORMAT",
        show_default=",".join(FORMATS),
    ),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        help="The text to run over, again and again; - reads standard input.",
        metavar="FILE",
        show_default="one that comes with Kvist",
    ),
]
RepetitionsOption = Annotated[int, typer.Option(help="That count, of each figure.", metavar="N", min=1)]
JsonOption = Annotated[
    Path | None, typer.Option(help="Write one JSON object; - prints it and nothing else.", metavar="FILE")
]
PlotOption = Annotated[Path | None, typer.Option(help="Draw the figures: .png, .svg or .pdf.", metavar="FILE")]


def numbers(option: str, text: str, most: int | None = None) -> tuple[int, ...]:
    """The numbers of a list with commas, each once, from 1 to `most`.

    Raises:
        OptionError: it is none.
    """
    found: list[int] = []
    for part in text.split(","):
        try:
            number = int(part)
        except ValueError:
            raise OptionError(
                f"{option} is '{text}': '{part.strip()}' is no whole number; write it like 128,1024"
            ) from None
        if check_integer(option, number, 1, most) in found:
            raise OptionError(f"{option} is '{text}': {number} is there twice; keep one")
        found.append(number)
    return tuple(found)


def formats(given: Sequence[str] | None) -> tuple[LayerFormats, ...]:
    """The formats that are asked for, each once.

    Raises:
        OptionError: one is unknown, or there twice.
    """
    names = [name for text in given or FORMATS for name in _split(text)]
    return check_distinct(map(LayerFormats.parse, names))


def _split(text: str) -> list[str]:
    """The formats of a list with commas, where formats may have commas too: `k=int8,v=int4`, `int4/0-1,29:int8`."""
    names: list[str] = []
    for part in text.split(","):
        if names and (part.strip()[:1].isdigit() or _is_half(names[-1])):
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def _is_half(name: str) -> bool:
    """Whether a format for keys or values alone is what a name ends with."""
    last = name.rpartition(":")[2]
    return "=" in last and "," not in last
