"""`kvist convert`: checkpoints with another number of KV heads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.checks import check_integer
from kvist.cli import options
from kvist.cli.convert_report import report
from kvist.cli.convert_uptrain import uptrain
from kvist.cli.output import table_console
from kvist.cli.progress import progress_bar
from kvist.config import check_threads
from kvist.convert.gqa_config import METHODS, GqaConfig

if TYPE_CHECKING:
    from kvist.convert.record import Conversion

app = typer.Typer()


@app.callback()
def convert() -> None:
    """Convert checkpoints between numbers of KV heads."""


SourceArgument = Annotated[
    str,
    typer.Argument(help="A directory in Hugging Face format, a .gguf file, a demo model or a Hub id.", metavar="SRC"),
]
DestinationArgument = Annotated[Path, typer.Argument(help="The directory to make.", metavar="DST")]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="What a GGUF file is de-quantised to: bf16 or fp32. Others keep their own.",
        metavar="FORMAT",
        show_default="bf16",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a model that is there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print what conversion.json holds and nothing else.")]


@app.command()
def gqa(
    source: SourceArgument,
    destination: DestinationArgument,
    kv_heads: Annotated[
        int, typer.Option(help="KV heads that are left: a divisor of those that there are.", metavar="N")
    ],
    method: Annotated[str, typer.Option(help=f"How they are merged: {', '.join(METHODS)}.")] = GqaConfig.method,
    text: Annotated[
        Path | None,
        typer.Option(
            help="The text that aligned and fitted look at, a file in UTF-8.", metavar="FILE", show_default=False
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of the text in one sequence.", metavar="N")] = GqaConfig.window,
    windows: Annotated[int, typer.Option(help="How many, from the beginning on.", metavar="N")] = GqaConfig.windows,
    weights_format: WeightsOption = None,
    threads: options.ThreadsOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge KV heads: a smaller cache.

    More query heads share each. The method first keeps the first head of each group of neighbours, mean averages them;
    aligned chooses groups and turns heads so that they agree before they are averaged; fitted makes heads that give
    each layer's attention output on a text again, as well as they can. The destination loads in Kvist and in
    transformers.
    """
    check_integer("kv_heads", kv_heads, 1)
    config = GqaConfig(method, window, windows)
    config.check_text(text is not None)
    _prepare(threads)
    from kvist.convert import to_gqa

    with progress_bar() as progress:
        done = to_gqa(
            source,
            destination,
            kv_heads,
            config=config,
            text=text,
            weights_format=weights_format,
            force=force,
            progress=progress,
        )
    _print(done, source, destination, as_json)


@app.command()
def expand(
    source: SourceArgument,
    destination: DestinationArgument,
    weights_format: WeightsOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give each query head a KV head of its own.

    It is the same model as MHA, to the bit, with a larger cache. Each KV head is repeated for the query heads that read
    it. `kvist convert gqa --method mean` goes back.
    """
    _prepare(None)
    from kvist.convert import expand as expanded

    with progress_bar() as progress:
        done = expanded(source, destination, weights_format=weights_format, force=force, progress=progress)
    _print(done, source, destination, as_json)


def _prepare(threads: int | None) -> None:
    """What must come before PyTorch does, and how many threads it may take."""
    if threads is not None:
        check_threads("threads", threads)
    options.prepare_to_compute()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _print(done: Conversion, source: str, destination: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(done.as_json(), ensure_ascii=False))
        return
    console = table_console()
    for line in _lines(done, source, destination):
        console.print(line, markup=False)


def _lines(done: Conversion, source: str, destination: Path) -> list[str]:
    """What was done, for a person."""
    from kvist.models.cache_shape import attention_kind

    def heads(num_kv_heads: int) -> str:
        return f"{num_kv_heads} KV head{'s' * (num_kv_heads != 1)} ({attention_kind(done.num_heads, num_kv_heads)})"

    how = f", by {done.method}" if done.method is not None else ""
    lines = [
        f"{destination}: {done.source} with {heads(done.num_kv_heads)} instead of {heads(done.source_num_kv_heads)} "
        f"for {done.num_heads} query heads{how}",
        f"its cache takes {_share(done.num_kv_heads, done.source_num_kv_heads)} the bytes",
    ]
    if done.layers:
        worst = max(range(len(done.layers)), key=lambda layer: done.layers[layer].missed)
        mean = sum(layer.missed for layer in done.layers) / len(done.layers)
        lines.append(
            f"of the attention's output on the text its layers miss {mean:.1%} of the square on average, "
            f"{done.layers[worst].missed:.1%} in layer {worst}"
        )
    if done.num_kv_heads < done.source_num_kv_heads:
        nearer = "" if done.method == "fitted" else "; --method fitted --text FILE begins nearer to the source"
        train = shlex.join(["kvist", "convert", "uptrain", str(destination), "--teacher", source])
        lines.append(f"it is no model to use yet: `{train} --text FILE` trains it{nearer}")
    return lines


def _share(now: int, before: int) -> str:
    return f"{now // before} times" if now >= before else f"{now / before:.3g} of"


app.command()(uptrain)
app.command()(report)
