"""`kvist pull`: fetch a demo model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvist.cli.output import print_note
from kvist.cli.progress import progress_bar
from kvist.memory import binary_size


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
    there_already = name in DEMO_MODELS and DEMO_MODELS[name].is_pulled
    with progress_bar() as progress:
        path = fetch(name, progress)
    model = DEMO_MODELS[name]
    size = binary_size(model.num_bytes)
    # Not before, so that a failure is one line.
    print_note(
        f"{name} was there already" if there_already else f"{name} is {size} large, its licence: {model.licence}"
    )
    print(path)
