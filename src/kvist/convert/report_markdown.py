"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvist.convert.report_rows import ConversionReport, kv_heads, printable
from kvist.errors import shown


def markdown(report: ConversionReport, pictures: Mapping[str, str]) -> str:
    """The report, with links to its figures.

    Args:
        report: what was measured.
        pictures: the files of the figures `losses`, `speeds` and `curve` as far as there are any, from where the
            report lies.
    """
    sections = (_head(report), _quality(report, pictures), _cache(report), _speed(report, pictures))
    return "\n\n".join((*sections, *_training(report, pictures), _limits(report))) + "\n"


def _head(report: ConversionReport) -> str:
    text = (
        f"# {report.source} with {kv_heads(report.converted_kv_heads)} in place of {report.source_kv_heads}\n\n"
        f"`{report.converted}` beside `{report.source}`: {report.num_heads} query heads share "
        f"{kv_heads(report.converted_kv_heads)} in each layer."
    )
    method = report.record.method
    if not report.is_source:
        text += f" It was made from another checkpoint than this `{report.source}`."
    return text + (f" Heads were merged by the method {shown(method)}." if method is not None else "")


def _quality(report: ConversionReport, pictures: Mapping[str, str]) -> str:
    rows = [
        (
            name,
            f"{row.loss:.3f}",
            f"{row.perplexity:,.1f}",
            "" if row.kl_mean is None else f"{row.kl_mean:.4f}",
            "" if row.top1_agreement is None else f"{row.top1_agreement:.1%}",
        )
        for name, row in zip(report.names, report.predictions, strict=True)
    ]
    table = _table(("", "loss", "perplexity", "divergence", "agreement"), rows)
    return (
        f"## Quality\n\n{report.text}, {report.positions:,} positions in windows of {report.config.window:,} tokens; "
        "weights, cache and compute in fp32. Loss and divergence (KL from the source's predictions) are in nats per "
        f"token; agreement is how often the likeliest token is the source's.\n\n{table}{_picture(pictures, 'losses')}"
    )


def _cache(report: ConversionReport) -> str:
    rows = [
        (
            f"{row.context:,}",
            _mebibytes(row.source_bytes),
            _mebibytes(row.converted_bytes),
            f"{row.converted_bytes / row.source_bytes:.3f}",
            _mebibytes(row.source_measured_bytes),
            _mebibytes(row.converted_measured_bytes),
        )
        for row in report.cache
    ]
    columns = ("context", "source", "converted", "ratio", "source measured", "converted measured")
    return (
        f"## Cache\n\nMiB of one sequence in {report.config.kv_format}: predicted by the formula that the cache "
        "allocates by, and by how much the process grew when the longest context was computed.\n\n"
        f"{_table(columns, rows)}"
    )


def _speed(report: ConversionReport, pictures: Mapping[str, str]) -> str:
    rows = [
        (
            f"{row.context:,}",
            f"{row.source_tokens_per_s:,.1f}",
            f"{row.converted_tokens_per_s:,.1f}",
            f"{row.ratio:.2f}" + ("" if row.is_steady else " ?"),
            f"{row.bytes_ratio:.2f}",
        )
        for row in report.speeds
    ]
    table = _table(("context", "source", "converted", "ratio", "ratio of bytes"), rows)
    note = "" if all(row.is_steady for row in report.speeds) else " ?: the read bandwidth moved meanwhile."
    return (
        f"## Decode\n\nTokens per second after each context, both models in turn, {report.config.weights_format} "
        f"weights. The ratio of bytes is what a step must read, weights and cache: the ratio that reading alone would "
        f"give.{note}\n\n{table}{_picture(pictures, 'speeds')}\n\n{report.machine}"
    )


def _training(report: ConversionReport, pictures: Mapping[str, str]) -> Iterable[str]:
    last = report.record.training
    if last is None:
        return
    names = ", ".join(map(printable, last.texts)) or "?"
    rows = [(printable(name), f"{loss:.3f}") for name, loss in last.losses.items()]
    yield (
        f"## Uptraining\n\n{_number(last.steps)} steps, {_number(last.tokens)} tokens from {names} "
        f"({_number(last.text_tokens)} tokens), {_number(last.seconds)} s on {printable(last.machine or '?')}. Loss "
        f"on {_number(last.held_out_tokens)} held-out tokens ({printable(last.held_out or '?')}):\n\n"
        f"{_table(('', 'nats per token'), rows)}{_picture(pictures, 'curve')}"
    )


def _limits(report: ConversionReport) -> str:
    last = report.record.training
    trained = (
        "The converted model was not trained after its heads were merged: what it lost is the loss of merging alone, "
        "and training brings a part of it back."
        if last is None
        else f"The training saw {_number(last.tokens)} tokens, of a text of "
        f"{_number(last.text_tokens)}. That is not the uptraining of the GQA paper (arXiv 2305.13245), which "
        "goes on with the original data for a share of the original steps: its figures say nothing of this model, "
        "and these nothing of that method at its scale. A short training repairs the most frequent patterns first "
        "and moves the model towards its text; more text, of more kinds, would take it elsewhere."
    )
    return (
        "## What this shows, and what not\n\n"
        f"It shows how far the converted model is from its source on {report.text}, and what its cache and its "
        "decoding cost on this machine. It cannot show how it does on other kinds of text, in other languages, at "
        "following instructions or at finding something in a long context. "
        f"{trained} Small models have few heads and few weights to spare: what sharing costs here need not be what it "
        "costs a large one."
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _picture(pictures: Mapping[str, str], name: str) -> str:
    return f"\n\n![{name}]({pictures[name]})" if name in pictures else ""


def _mebibytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"
