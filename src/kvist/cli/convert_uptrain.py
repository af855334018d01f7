"""`kvist convert uptrain`: a converted model learns from the one that it was made of."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.cli import options
from kvist.cli.convert_progress import TrainingProgress
from kvist.cli.output import print_note
from kvist.cli.output_file import OutputFile, check_apart, output_file
from kvist.cli.progress import progress_bar
from kvist.config import check_threads
from kvist.convert.uptrain_config import COMPUTE, DEFAULT_LEARNING_RATE, TRAINED, UptrainConfig
from kvist.errors import OptionError

if TYPE_CHECKING:
    from kvist.convert.uptrain import Uptraining
    from kvist.convert.uptrain_result import UptrainResult

DEFAULT_MINUTES = 20.0


def uptrain(
    directory: Annotated[
        Path,
        typer.Argument(help="A model that kvist convert gqa made.", metavar="DST", show_default=False),
    ],
    teacher: Annotated[
        str, typer.Option(help="What it was converted from: a name, a .gguf file, a directory.", metavar="SRC")
    ],
    text: Annotated[
        list[Path], typer.Option(help="A text to train on, in UTF-8; may be given several times.", metavar="FILE")
    ],
    minutes: Annotated[
        float | None,
        typer.Option(
            help="How long it may take: as many steps are planned as fit.",
            metavar="M",
            show_default=f"{DEFAULT_MINUTES:g}",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="In place of it, how many steps.", metavar="N")] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="A text to judge by alone.", metavar="FILE", show_default="the last 5 % of the text"),
    ] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.", metavar="N")] = UptrainConfig.sequence,
    batch: Annotated[int, typer.Option(help="Sequences of a step.", metavar="N")] = UptrainConfig.batch,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The highest of the schedule; with --resume, as before.",
            metavar="RATE",
            show_default=f"{DEFAULT_LEARNING_RATE:g}",
        ),
    ] = None,
    logit_weight: Annotated[
        float, typer.Option(help="Of the divergence from the teacher's predictions.", metavar="W")
    ] = UptrainConfig.logit_weight,
    attention_weight: Annotated[
        float, typer.Option(help="Of the difference from its layers' attention outputs.", metavar="W")
    ] = UptrainConfig.attention_weight,
    text_weight: Annotated[
        float, typer.Option(help="Of the loss on the text itself.", metavar="W")
    ] = UptrainConfig.text_weight,
    every: Annotated[
        int, typer.Option(help="Let the predictions of every Nth position count: quicker.", metavar="N")
    ] = UptrainConfig.every,
    train: Annotated[
        str, typer.Option(help=f"Which weights: {' or '.join(TRAINED)}.", metavar="WEIGHTS")
    ] = UptrainConfig.train,
    compute: Annotated[
        str, typer.Option(help=f"{', '.join(COMPUTE)}: auto is what is faster here.", metavar="DTYPE")
    ] = UptrainConfig.compute,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = UptrainConfig.gradient_checkpointing,
    save_minutes: Annotated[
        float, typer.Option(help="Between two training checkpoints.", metavar="M")
    ] = UptrainConfig.save_minutes,
    seed: Annotated[int, typer.Option(help="Of the order of the sequences.", metavar="N")] = UptrainConfig.seed,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the training checkpoint in DST.")] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Begin anew; the training checkpoint in DST is replaced by the first new one."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the learning curve: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Train a converted model on its teacher.

    It learns to predict, and to attend, as the teacher does. The loss is the divergence of its predictions from the
    teacher's, and the difference of each layer's attention output. In the end its weights take the place of those in
    DST; conversion.json says how it was trained, and uptraining.jsonl has the learning curve. Ctrl-C saves what is
    done; --resume goes on from there to the same bits, for as many steps as were planned. It computes on the CPU.
    """
    for path in text:
        check_apart({"--text": path, "--held-out": held_out, "--plot": plot})
    if steps is None and minutes is None and not resume:
        minutes = DEFAULT_MINUTES
    config = UptrainConfig(
        steps=steps,
        minutes=minutes,
        sequence=sequence,
        batch=batch,
        learning_rate=learning_rate,
        logit_weight=logit_weight,
        attention_weight=attention_weight,
        text_weight=text_weight,
        every=every,
        train=train,
        compute=compute,
        gradient_checkpointing=gradient_checkpointing,
        save_minutes=save_minutes,
        seed=seed,
    )
    if resume and restart:
        raise OptionError("--resume goes on and --restart begins anew: give one of them")
    if threads is not None:
        check_threads("threads", threads)
    options.prepare_to_compute()
    with output_file("--plot", plot) as plot_file:
        kind = _kind_of_plot(plot)
        training = _prepared(directory, teacher, text, held_out, config, resume, restart, threads)
        _note_changes(training)
        if not training.is_source:
            print_note(f"{directory} was made from another checkpoint than {teacher}: it learns from that all the same")
        result = _run(training)
        try:
            if plot_file is not None:
                _draw(plot_file, kind, result, f"{directory.resolve().name}, taught by {teacher}")
        finally:
            _print(result)


def _kind_of_plot(path: Path | None) -> str:
    if path is None:
        return ""
    from kvist.evaluate.plot import check_plot

    return check_plot(path)


def _draw(plot_file: OutputFile, kind: str, result: UptrainResult, title: str) -> None:
    from kvist.convert.uptrain_curve import draw_curve

    plot_file.write(lambda path: draw_curve(path, kind, result.curve, result.references, title))


def _prepared(
    directory: Path,
    teacher: str,
    texts: list[Path],
    held_out: Path | None,
    config: UptrainConfig,
    resume: bool,
    restart: bool,
    threads: int | None,
) -> Uptraining:
    import torch

    from kvist.convert.uptrain import Uptraining
    from kvist.evaluate.text_windows import EvaluationText

    if threads is not None:
        torch.set_num_threads(threads)
    read = [EvaluationText.read(path) for path in texts]
    apart = None if held_out is None else EvaluationText.read(held_out)
    with progress_bar() as progress:
        return Uptraining(
            directory, teacher, read, config, held_out=apart, resume=resume, restart=restart, progress=progress
        )


def _note_changes(training: Uptraining) -> None:
    before, now = training.learning_rate_before, training.learning_rate
    if before is not None and before != now:
        print_note(f"the learning rate was {before:g} and is {now:g} from here on: the weights will be others")
    threads, threads_now = training.num_threads_before, training.num_threads
    if threads is not None and threads != threads_now:
        print_note(f"{threads} threads computed it and {threads_now} do from here on: the weights will be others")


def _run(training: Uptraining) -> UptrainResult:
    shown = TrainingProgress(training)
    try:
        with shown.drawn():
            return training.run(shown.told)
    except (KeyboardInterrupt, SystemExit):
        if training.saved_step is None:
            print_note("interrupted before a step could be saved: nothing is changed")
        else:
            again = shlex.join(["kvist", *(word for word in sys.argv[1:] if word not in ("--resume", "--restart"))])
            print_note(
                f"saved after step {training.saved_step:,} of {training.num_steps:,}: go on with: {again} --resume"
            )
        raise


def _print(result: UptrainResult) -> None:
    print(f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds:,.0f} s, judging and saving included")
    losses = {"before": result.loss_before, "after": result.loss_after, **result.references}
    for name, loss in losses.items():
        print(f"{loss:8.3f}  nats per token of the held-out text, {name}")
    if result.loss_after > result.loss_before:
        print_note("the training made it worse: convert it again, and take more steps or a lower --learning-rate")
