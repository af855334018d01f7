"""`kvist convert report`: a converted model beside its source."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from kvist.cli import bench_options, options
from kvist.cli.output import print_note, table_console
from kvist.cli.output_file import OutputFile, check_apart, output_file
from kvist.cli.progress import progress_bar
from kvist.config import check_threads
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats

if TYPE_CHECKING:
    from kvist.convert.report_config import ReportConfig
    from kvist.convert.report_rows import ConversionReport

# As in `ReportConfig`, which needs more than a command line that is only parsed should wait for.
_CONTEXTS, _WINDOW, _WINDOWS, _TOKENS, _REPETITIONS = "128,1024,4096,7000", 1024, 8, 32, 3
_PICTURES = ("losses", "speeds", "curve")
_STANDARD_OUTPUT = Path("-")


def report(
    source: Annotated[str, typer.Argument(help="What it was converted from.", metavar="SRC", show_default=False)],
    directory: Annotated[Path, typer.Argument(help="The converted model.", metavar="DST", show_default=False)],
    text: Annotated[Path, typer.Option(help="The text that both predict, in UTF-8.", metavar="FILE")],
    out: Annotated[
        Path | None, typer.Option(help="Write the report, .md, and its figures beside it.", metavar="FILE")
    ] = None,
    json: bench_options.JsonOption = None,
    bigram: Annotated[
        Path | None, typer.Option(help="Compare with a bigram model of this text.", metavar="FILE")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens that are predicted in one go.", metavar="N")] = _WINDOW,
    windows: Annotated[int, typer.Option(help="How many, from the beginning on.", metavar="N")] = _WINDOWS,
    contexts: Annotated[
        str, typer.Option(help="Tokens in the cache, several numbers with commas.", metavar="N,N")
    ] = _CONTEXTS,
    tokens: Annotated[int, typer.Option(help="Tokens that are timed in a run.", metavar="N")] = _TOKENS,
    repetitions: bench_options.RepetitionsOption = _REPETITIONS,
    kv_format: options.KVFormatOption = options.DEFAULT_FORMAT,
    weights_format: Annotated[
        str, typer.Option(help="How both keep their weights while they are timed.", metavar="FORMAT")
    ] = "bf16",
    threads: options.ThreadsOption = None,
) -> None:
    """What a conversion costs and gives.

    That is quality, cache and speed of both models. Both predict the text in fp32; printed are loss, perplexity, and
    how far the converted model's predictions are from its source's. Then both decode after each context, in turn.
    """
    formats, lengths = LayerFormats.parse(kv_format), bench_options.numbers("contexts", contexts)
    if threads is not None:
        check_threads("threads", threads)
    options.prepare_to_compute()
    from kvist.convert.report_config import ReportConfig

    config = ReportConfig(window, windows, lengths, tokens, repetitions, formats, weights_format)
    alone = json == _STANDARD_OUTPUT
    pictures_at = {} if out is None else _pictures(out)
    written = {"--out": out, "--json": json, **{f"the {name} of --out": path for name, path in pictures_at.items()}}
    for option, read in {"SRC": Path(source), "--text": text, "--bigram": bigram}.items():  # two of these may be one
        check_apart({option: read, **written})
    with ExitStack() as files:
        out_file = files.enter_context(output_file("--out", out))
        json_file = files.enter_context(output_file("--json", None if alone else json))
        pictures = {name: files.enter_context(output_file("--out", path)) for name, path in pictures_at.items()}
        measured = _measured(source, directory, text, bigram, config, threads)
        try:
            if json_file is not None:
                json_file.write(lambda path: path.write_text(_json(measured), encoding="utf-8"))
            if out_file is not None:
                drawn = _write(out_file, pictures, pictures_at, measured)
                print_note(f"{out} has the report, and beside it lie its figures: {', '.join(drawn)}")
        finally:  # a full disk must not cost the minutes that the figures took
            if alone:
                print(_json(measured), end="")
            else:
                _show(_markdown(measured, {}))


def _show(markdown: str) -> None:
    """As Markdown for a program, and for a person as it reads."""
    if not sys.stdout.isatty():
        print(markdown, end="")
        return
    from rich.markdown import Markdown

    table_console().print(Markdown(markdown))


def _pictures(out: Path) -> dict[str, Path]:
    """Where the figures lie: beside the report."""
    from kvist.evaluate.plot import check_plot

    if out.suffix != ".md":
        raise OptionError(f"--out {out} has no known ending: the report is Markdown, give a name that ends in .md")
    found = {name: out.with_name(f"{out.stem}_{name}.png") for name in _PICTURES}
    for path in found.values():
        check_plot(path)
    return found


def _measured(
    source: str, directory: Path, text: Path, bigram: Path | None, config: ReportConfig, threads: int | None
) -> ConversionReport:
    import torch

    from kvist.convert.report import conversion_report
    from kvist.evaluate.text_windows import EvaluationText

    if threads is not None:
        torch.set_num_threads(threads)
    read = EvaluationText.read(text)
    fitted = None if bigram is None else EvaluationText.read(bigram)
    with progress_bar() as progress:
        return conversion_report(source, directory, read, config, bigram_text=fitted, progress=progress)


def _write(
    out_file: OutputFile, pictures: dict[str, OutputFile | None], paths: dict[str, Path], measured: ConversionReport
) -> list[str]:
    """The names of the pictures that there are."""
    from kvist.convert.report_plot import draw_losses, draw_speeds, draw_training

    draw = {"losses": draw_losses, "speeds": draw_speeds, "curve": draw_training}
    written = {}
    for name, file in pictures.items():
        if file is None or (name == "curve" and measured.curve is None):
            continue
        file.write(partial(draw[name], kind="png", report=measured))
        written[name] = quote(paths[name].name)
    out_file.write(lambda path: path.write_text(_markdown(measured, written), encoding="utf-8"))
    return [paths[name].name for name in written]


def _markdown(measured: ConversionReport, pictures: dict[str, str]) -> str:
    from kvist.convert.report_markdown import markdown

    return markdown(measured, pictures)


def _json(measured: ConversionReport) -> str:
    import json

    return json.dumps(measured.figures(), allow_nan=False) + "\n"
