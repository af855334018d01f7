"""`kvist pull`: fetch a demo model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvist.cli.output import binary_size, print_note
from kvist.cli.progress import progress_bar


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Which one; without it, list them.", show_default=False)
    ] = None,
) -> None:
    """Fetch a demo model.

    It is kept in the cache folder (KVIST_CACHE); where its file lies is printed.
    """
    from kvist.loading.demo_models import DEMO_MODELS
    from kvist.loading.pull import pull as fetch

    if name is None:
        from kvist.cli.models import print_demo_models

        print_demo_models()
        return
    known = DEMO_MODELS.get(name)
    if known is not None and known.is_pulled:
        print_note(f"{name} was there already")
    elif known is not None:
        print_note(f"{name} is {binary_size(known.num_bytes)} large, its licence: {known.licence}")
    with progress_bar(plain_lines=True) as progress:
        path = fetch(name, progress)
    print(path)
