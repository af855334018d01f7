"""`kvist models`: what can be run by name, and what the cache folder holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvist.cli.output import table_console
from kvist.memory import binary_size


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List the demo models and prepared copies.

    A prepared copy of a GGUF file is made when it is first loaded, and makes it load fast from then on.
    """
    if as_json:
        _print_json()
    else:
        print_demo_models()
        _print_prepared_copies()


def print_demo_models() -> None:
    """Print the demo models as a table on standard output."""
    from rich.markup import escape
    from rich.table import Table

    from kvist.loading.demo_models import DEMO_MODELS

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("demo model", "size", "pulled", "what it is"):
        table.add_column(
            heading,
            justify="right" if heading == "size" else "left",
            no_wrap=heading != "what it is",
            overflow="fold",
        )
    for model in DEMO_MODELS.values():
        description = f"{escape(model.description)}\n[dim]{escape(model.licence)}[/dim]"
        table.add_row(model.name, binary_size(model.num_bytes), "yes" if model.is_pulled else "no", description)
    table_console().print(table)


def _print_prepared_copies() -> None:
    from rich.table import Table
    from rich.text import Text

    from kvist.loading.prepared import prepared_copies

    copies = prepared_copies()
    if not copies:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("prepared copy of", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    for copy in copies:
        table.add_row(Text(copy.source), binary_size(copy.num_bytes), copy.weights_format)
    console = table_console()
    console.print()
    console.print(table)
    # A path is no use in pieces.
    console.print(Text(f"kept in {copies[0].path.parent}", style="dim"), soft_wrap=True)


def _print_json() -> None:
    from kvist.loading.demo_models import DEMO_MODELS
    from kvist.loading.prepared import prepared_copies

    demo_models = [
        {
            "name": model.name,
            "description": model.description,
            "licence": model.licence,
            "num_bytes": model.num_bytes,
            "pulled": model.is_pulled,
            "path": str(model.path),
        }
        for model in DEMO_MODELS.values()
    ]
    copies = [
        {
            "source": copy.source,
            "weights_format": copy.weights_format,
            "num_bytes": copy.num_bytes,
            "path": str(copy.path),
        }
        for copy in prepared_copies()
    ]
    print(json.dumps({"demo_models": demo_models, "prepared_copies": copies}, ensure_ascii=False))
