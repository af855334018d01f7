"""The options that verbs share, as types of their parameters, and the model that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.config import WEIGHTS_FORMATS, check_format, check_threads
from kvist.errors import OptionError
from kvist.kv_format import KV_FORMATS, LayerFormats
from kvist.memory import MemoryBudget
from kvist.threads import wait_briefly

if TYPE_CHECKING:
    from kvist.llm import LLM

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_FORMAT = "bf16"


ModelOption = Annotated[
    str, typer.Option(help="A name from kvist models, a .gguf file, a directory or a Hub id.", metavar="MODEL")
]
SystemOption = Annotated[str | None, typer.Option(help="A system message before the conversation.", metavar="TEXT")]

# SamplingParams checks the ranges of these, in the words of the Python API.
MaxTokensOption = Annotated[int, typer.Option(help="The most tokens of an answer.", metavar="N")]
TemperatureOption = Annotated[
    float, typer.Option(help="0 takes the likeliest token, 1 draws as the model predicts.", metavar="T")
]
TopPOption = Annotated[float, typer.Option(help="Draw among the likeliest tokens that together reach P.", metavar="P")]
TopKOption = Annotated[int, typer.Option(help="Draw among the K likeliest tokens; 0 is off.", metavar="K")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens less likely than P times the likeliest.", metavar="P")]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="Above 1, tokens that were there before get less likely.", metavar="R")
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be given several times.", metavar="TEXT", show_default=False),
]
SeedOption = Annotated[
    int | None, typer.Option(help="Makes draws repeatable.", metavar="N", min=0, show_default="new each time")
]

WeightsFormatOption = Annotated[
    str | None,
    typer.Option(
        help=f"How weights are kept: {', '.join(WEIGHTS_FORMATS)} (what a GGUF file holds).",
        metavar="FORMAT",
        show_default="gguf for GGUF files, else bf16",
    ),
]
KVFormatOption = Annotated[
    str,
    typer.Option(
        help=f"How keys and values are kept: {', '.join(KV_FORMATS)}; each side apart, k=int8,v=int4; other formats "
        "for single layers, int4/0-1:int8.",
        metavar="FORMAT",
    ),
]
KVMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="The most the cache may hold: 512MiB, or 25% of what is free.", metavar="SIZE", show_default="50%"
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads to compute with.", metavar="N", show_default="one per core")
]


def open_llm(
    model: str, *, weights_format: str | None, kv_format: str, kv_memory: str | None, threads: int | None
) -> LLM:
    """Load the model, after the checks that need none of it: a typo should not cost the seconds of loading.

    Raises:
        KvistError: an option cannot be honoured, or the model cannot be found, read or run.
    """
    if weights_format is not None:
        check_format("weights_format", weights_format, WEIGHTS_FORMATS)
    LayerFormats.parse(kv_format)
    MemoryBudget.parse(kv_memory)
    if threads is not None:
        check_threads("threads", threads)

    prepare_to_compute()
    from kvist.cli.progress import progress_bar
    from kvist.llm import LLM

    with progress_bar() as progress:
        return LLM(
            model,
            weights_format=weights_format,
            kv_format=kv_format,
            kv_memory=kv_memory,
            threads=threads,
            progress=progress,
        )


def prepare_to_compute() -> None:
    """What must come before PyTorch does.

    Without a working directory, the mathematical library that PyTorch calls ends the process in the midst of the first
    token.

    Raises:
        OptionError: there is none.
    """
    try:
        Path.cwd()
    except OSError:
        raise OptionError("the folder that you are in is gone: change to another") from None
    wait_briefly()
