"""`kvist convert report`: a converted model beside its source."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from kvist.cli import bench_options, options
from kvist.cli.output_file import OutputFile, output_file
from kvist.cli.progress import progress_bar
from kvist.config import check_threads
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats

if TYPE_CHECKING:
    from kvist.convert.report import ConversionReport
    from kvist.convert.report_config import ReportConfig

# As in `ReportConfig`, which needs more than a command line that is only parsed should wait for.
_CONTEXTS, _WINDOW, _WINDOWS, _TOKENS, _REPETITIONS = "128,1024,4096,7000", 1024, 8, 32, 3


def report(
    source: Annotated[str, typer.Argument(help="What it was converted from.", metavar="SRC", show_default=False)],
    directory: Annotated[Path, typer.Argument(help="The converted model.", metavar="DST", show_default=False)],
    text: Annotated[Path, typer.Option(help="The text that both predict, in UTF-8.", metavar="FILE")],
    out: Annotated[
        Path | None, typer.Option(help="Write the report, .md, and its figures beside it.", metavar="FILE")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures as one JSON object.", metavar="FILE")] = None,
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
    with ExitStack() as files:
        out_file = files.enter_context(output_file("--out", out))
        json_file = files.enter_context(output_file("--json", json))
        pictures = {} if out is None else _pictures(out, files)
        measured = _measured(source, directory, text, bigram, config, threads)
        try:
            if json_file is not None:
                json_file.write(lambda path: path.write_text(_json(measured), encoding="utf-8"))
            if out_file is not None:
                _write(out_file, pictures, measured)
        finally:
            print(_markdown(measured, {}), end="")


def _pictures(out: Path, files: ExitStack) -> dict[str, tuple[Path, OutputFile]]:
    """The figures' files beside the report."""
    from kvist.evaluate.plot import check_plot

    if out.suffix != ".md":
        raise OptionError(f"--out {out} has no known ending: the report is Markdown, give a name that ends in .md")
    found = {}
    for name in ("losses", "speeds", "curve"):
        path = out.with_name(f"{out.stem}_{name}.png")
        check_plot(path)
        file = files.enter_context(output_file("--out", path))
        assert file is not None
        found[name] = (path, file)
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


def _write(out_file: OutputFile, pictures: dict[str, tuple[Path, OutputFile]], measured: ConversionReport) -> None:
    from kvist.convert.report_plot import draw_losses, draw_speeds
    from kvist.convert.uptrain_curve import draw_curve

    written = {}
    for name, (path, file) in pictures.items():
        if name == "losses":
            file.write(lambda aside: draw_losses(aside, measured))
        elif name == "speeds":
            file.write(lambda aside: draw_speeds(aside, measured))
        elif measured.curve is not None:
            file.write(partial(draw_curve, kind="png", curve=measured.curve, references={}, title=measured.converted))
        else:
            continue
        written[name] = quote(path.name)
    out_file.write(lambda path: path.write_text(_markdown(measured, written), encoding="utf-8"))


def _markdown(measured: ConversionReport, pictures: dict[str, str]) -> str:
    from kvist.convert.report_markdown import markdown

    return markdown(measured, pictures)


def _json(measured: ConversionReport) -> str:
    import json

    return json.dumps(measured.figures(), allow_nan=False, ensure_ascii=False) + "\n"
