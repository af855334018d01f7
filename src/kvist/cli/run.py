"""`kvist run`: one prompt, one answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.cli import options
from kvist.cli.output import Report, print_note, print_statistics, written
from kvist.cli.reading import checked, read_all
from kvist.config import SamplingParams
from kvist.errors import OptionError, PromptError

if TYPE_CHECKING:
    from kvist.llm import LLM
    from kvist.loading.chat_template import Message
    from kvist.results import Completion, TextDelta


def run(
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The text; - reads standard input, but for a final line break."),
    ],
    model: options.ModelOption = options.DEFAULT_MODEL,
    system: options.SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the text and what it took.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No statistics under the text.")] = False,
    max_tokens: options.MaxTokensOption = SamplingParams.max_tokens,
    temperature: options.TemperatureOption = SamplingParams.temperature,
    top_p: options.TopPOption = SamplingParams.top_p,
    top_k: options.TopKOption = SamplingParams.top_k,
    min_p: options.MinPOption = SamplingParams.min_p,
    repetition_penalty: options.RepetitionPenaltyOption = SamplingParams.repetition_penalty,
    stop: options.StopOption = None,
    seed: options.SeedOption = None,
    weights_format: options.WeightsFormatOption = None,
    kv_format: options.KVFormatOption = options.DEFAULT_FORMAT,
    kv_memory: options.KVMemoryOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Answer one prompt.

    The text goes to standard output, what it took to standard error.

    The prompt is put into the model's chat template. A model that has none (a base model) continues the prompt as it
    is, as with --raw, and a note says so.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(map(checked, stop or ())),
        seed=seed,
    )
    if raw and system is not None:
        raise OptionError("--system has no place without a chat template: leave out --raw, or put it into the prompt")
    system = None if system is None else checked(system)
    prompt = read_all() if prompt == "-" else checked(prompt)
    if not prompt:
        raise PromptError("the prompt is empty: give the text as an argument, or - to read it from standard input")

    llm = options.open_llm(
        model, weights_format=weights_format, kv_format=kv_format, kv_memory=kv_memory, threads=threads
    )
    with closing(llm):
        deltas = _deltas(llm, prompt, system, raw, params)
        report = Report.of(llm, _last_completion(deltas if json else written(deltas)))
        if not raw and not llm.tokenizer.has_chat_template:
            print_note(f"{llm.model_name} has no chat template: it continued the prompt as it is (--raw)")
    if json:
        print(report.json())
    elif not quiet:
        print(file=sys.stderr)
        print_statistics(report.statistics())


def _deltas(llm: LLM, prompt: str, system: str | None, raw: bool, params: SamplingParams) -> Iterator[TextDelta]:
    if raw:
        return llm.stream(prompt, params)
    if llm.tokenizer.has_chat_template:
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return llm.stream_chat(messages, params)
    if system is not None:
        raise OptionError(f"{llm.model_name} has no chat template for --system: put it into the prompt")
    return llm.stream(prompt, params)


def _last_completion(deltas: Iterator[TextDelta]) -> Completion:
    completion = None
    for delta in deltas:
        completion = delta.completion
    if completion is None:
        raise RuntimeError("the stream ended without its completion")
    return completion
