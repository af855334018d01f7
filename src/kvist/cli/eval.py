"""`kvist eval`: what a format of the cache costs in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.cli import options
from kvist.cli.output import print_note, table_console
from kvist.cli.output_file import check_apart, output_file
from kvist.cli.progress import progress_bar
from kvist.cli.reading import read_bytes
from kvist.config import WEIGHTS_FORMATS, check_threads
from kvist.evaluate.eval_config import EvalConfig
from kvist.kv_format import LayerFormats

if TYPE_CHECKING:
    from kvist.cli.eval_report import EvalReport
    from kvist.evaluate.text_windows import EvaluationText

DEFAULT_KV_FORMATS = ("bf16", "int8", "k=int8,v=int4", "int4")
_DASH = Path("-")  # standard input or output


def evaluate(
    text: Annotated[
        Path, typer.Option(help="The text to predict, a file in UTF-8; - reads standard input.", metavar="FILE")
    ],
    model: options.ModelOption = options.DEFAULT_MODEL,
    kv_format: Annotated[
        list[str] | None,
        typer.Option(
            help="A format to evaluate, as for kvist run (int4/0-1:int8 too); may be given several times.",
            metavar="FORMAT",
            show_default=" ".join(DEFAULT_KV_FORMATS),
        ),
    ] = None,
    weights_format: Annotated[
        str,
        typer.Option(
            "--weights-format",
            "--compute",
            help=f"How the rows' model keeps its weights: {', '.join(WEIGHTS_FORMATS)}.",
            metavar="FORMAT",
        ),
    ] = EvalConfig.weights_format,
    window: Annotated[int, typer.Option(help="Tokens that are predicted in one go.", metavar="N")] = EvalConfig.window,
    windows: Annotated[int, typer.Option(help="How many, from the beginning on.", metavar="N")] = EvalConfig.windows,
    every: Annotated[int, typer.Option(help="Score every Nth position: quicker.", metavar="N")] = EvalConfig.every,
    pytorch: Annotated[
        bool, typer.Option("--pytorch", help="Each format through the kernels' twins in PyTorch beside it.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write one JSON object; - prints it and nothing else.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw divergence over bytes per token: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Measure what a cache format costs in quality.

    A text is predicted through each format and by a reference, with cache, weights and compute in fp32. Printed are
    the divergence of the predictions (KL, nats per token), their agreement (how often the likeliest token is the
    same), and the perplexity of the text.

    The defaults take some minutes, for a large model many: --windows 1, a shorter --window or --every 16 take less.

    With --weights-format every row contains what these weights and their arithmetic cost, too; with --kv-format fp32 it
    is that alone.
    """
    config = EvalConfig(
        tuple(map(LayerFormats.parse, kv_format or DEFAULT_KV_FORMATS)),
        weights_format,
        window,
        windows,
        every,
        pytorch,
    )
    if threads is not None:
        check_threads("threads", threads)
    options.prepare_to_compute()
    check_apart({"--text": text, "--json": json, "--plot": plot})
    from kvist.evaluate.text_windows import EvaluationText

    source = EvaluationText.of(read_bytes(), "standard input") if text == _DASH else EvaluationText.read(text)
    alone = json == _DASH
    with output_file("--json", None if alone else json) as json_file, output_file("--plot", plot) as plot_file:
        kind = _kind_of_plot(plot)
        report = _evaluate(model, source, config, threads, silent=alone)
        try:
            if json_file is not None:
                json_file.write(lambda path: path.write_text(report.json() + "\n", encoding="utf-8"))
            if plot_file is not None:
                plot_file.write(lambda path: _draw(path, kind, report))
        finally:  # a full disk must not cost the minutes that the figures took
            if alone:
                print(report.json())
            else:
                table_console().print(report.table())


def _kind_of_plot(path: Path | None) -> str:
    if path is None:
        return ""
    from kvist.evaluate.plot import check_plot

    return check_plot(path)


def _draw(path: Path, kind: str, report: EvalReport) -> None:
    from kvist.evaluate.plot import write_plot

    write_plot(path, kind, report.evaluation, report.title)


def _evaluate(
    model: str, source: EvaluationText, config: EvalConfig, threads: int | None, *, silent: bool
) -> EvalReport:
    """Load the model and take all windows. An interrupt prints what is known by then, unless `silent`."""
    import torch

    from kvist.cli.eval_report import EvalProgress, EvalReport
    from kvist.evaluate.evaluated_model import EvaluatedModel
    from kvist.evaluate.evaluation import evaluate as evaluations
    from kvist.evaluate.text_windows import holds_part_of, text_windows
    from kvist.loading.key_calibration import calibration_ids

    if threads is not None:
        torch.set_num_threads(threads)
    with progress_bar() as progress:
        evaluated = EvaluatedModel.load(model, config, progress=progress)
        loaded = evaluated.reference
        windows = text_windows(loaded.tokenizer, loaded.config, source.text, config)
        key_statics = evaluated.key_statics(config, progress=progress)
    if key_statics is not None and holds_part_of(windows, calibration_ids(loaded.tokenizer, loaded.config)):
        print_note(
            "the quantised keys of every model are fitted to a passage of this text: they do better here than on others"
        )
    shown = EvalProgress(config.windows)
    report: EvalReport | None = None
    try:
        with shown.drawn():
            for evaluation in evaluations(
                loaded.decoder,
                evaluated.tested.decoder,
                windows,
                config,
                key_statics=key_statics,
                started=shown.started,
            ):
                shown.done(evaluation)
                report = EvalReport(loaded.name, source, config, evaluated.tested.bf16_matrices, evaluation)
    except KeyboardInterrupt:
        if report is not None and not silent:
            table_console().print(report.table())
            print_note("interrupted: the table is of the windows that were through, and no file was written")
        raise
    if report is None:
        raise RuntimeError("the evaluation ended without a window")
    return report
