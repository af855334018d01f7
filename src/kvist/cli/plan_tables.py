"""What `kvist plan` shows a person: formats down, costs across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvist.cli.output import binary_size, table_console
from kvist.cli.plan_figures import REWIND_SLACK_TOKENS
from kvist.models.cache_shape import attention_kind

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.cli.plan_figures import FormatFigures, Request
    from kvist.models.cache_shape import CacheShape

# Columns that all of a usual plan fits into, bars included.
_WIDE = 80
_BAR_COLUMNS = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_plan(
    name: str,
    shape: CacheShape,
    request: Request,
    rows: Sequence[FormatFigures],
    weights_format: str,
    weights_bytes: int | None,
) -> None:
    """Print a plan on standard output: the model, what fits, layer groups where there are several, other KV heads."""
    from rich.text import Text

    console = table_console()
    wide = console.width >= _WIDE

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    line(_model(name, shape))
    if weights_bytes is not None:
        line(f"weights: {binary_size(weights_bytes)} in {weights_format}, beside the cache")
    line(f"cache: at most {binary_size(request.memory_bytes)}{_share(request)} (--kv-memory)")
    console.print()
    line(_sequences(request), "bold")
    console.print(_cost_table(request, rows, wide))
    console.print()
    line(_verdict(request, rows), "bold")
    if len(rows[0].cache.groups) > 1:
        console.print()
        line("by layer group", "bold")
        console.print(_group_table(request, rows, wide))
    for group in rows[0].cache.groups:
        if group.rules.most_live is not None:
            line(
                f"a window of {group.layers.window:,}: at most {group.rules.most_live:,} pages of a sequence, for the "
                f"window, {REWIND_SLACK_TOKENS} tokens to rewind and a step of {request.max_step_tokens:,}",
                "dim",
            )
    console.print()
    line(f"with other KV heads for {_count(shape.num_heads, 'query head')}", "bold")
    console.print(_variant_table(shape, rows, wide))


def _model(name: str, shape: CacheShape) -> str:
    kind = attention_kind(shape.num_heads, shape.num_kv_heads)
    return (
        f"{name}: {_count(len(shape.layers), 'layer')}, {_count(shape.num_heads, 'query head')} over "
        f"{_count(shape.num_kv_heads, 'KV head')} of {shape.layers[0].head_dim:,} dims ({kind})"
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _share(request: Request) -> str:
    share = request.budget.share
    return "" if share is None else f", {share:.0%} of what is free"


def _sequences(request: Request) -> str:
    one = f"a sequence of {request.context:,} tokens"
    return one if request.batch == 1 else f"{request.batch:,} sequences of {request.context:,} tokens each"


def _cost_table(request: Request, rows: Sequence[FormatFigures], wide: bool) -> Table:
    from rich.text import Text

    table = _table("kv_format", "bytes per\ntoken", "cache", wide=wide)
    if wide:
        table.add_column()
    each = "" if request.batch == 1 else "in each\n"
    for heading in ("of the\nbudget", f"tokens\n{each}that fit", "sequences\nthat fit"):
        _add_column(table, heading, wide)
    largest = max(row.kv_bytes for row in rows)
    for row in rows:
        fits = row.kv_bytes <= request.memory_bytes
        bar = Text(_bar(row.kv_bytes, largest), style="green" if fits else "red")
        table.add_row(
            row.kv_format,
            f"{row.cache.bytes_per_token:,}",
            binary_size(row.kv_bytes),
            *([bar] if wide else []),
            _percent(row.kv_bytes, request.memory_bytes),
            "no end" if row.tokens_that_fit is None else f"{row.tokens_that_fit:,}",
            f"{row.sequences_that_fit:,}",
        )
    return table


def _verdict(request: Request, rows: Sequence[FormatFigures]) -> str:
    it_fits = "It fits" if request.batch == 1 else "They fit"
    fitting = [row.kv_format for row in rows if row.kv_bytes <= request.memory_bytes]
    if fitting:
        return f"{it_fits} as {_listed(fitting)}."
    smallest = min(rows, key=lambda row: row.kv_bytes)
    lacking = binary_size(smallest.kv_bytes - request.memory_bytes)
    return f"{it_fits} in none of these formats: {smallest.kv_format} lacks {lacking}."


def _group_table(request: Request, rows: Sequence[FormatFigures], wide: bool) -> Table:
    headings = []
    for group in rows[0].cache.groups:
        sees = "all tokens" if group.layers.window is None else f"window of {group.layers.window:,}"
        headings.append(f"{sees}\n{_count(len(group.layers.layers), 'layer')}")
    table = _table("kv_format", *headings, "together", wide=wide)
    for row in rows:
        sizes = [request.batch * group.bytes_for(request.context) for group in row.cache.groups]
        table.add_row(row.kv_format, *map(binary_size, (*sizes, row.kv_bytes)))
    return table


def _variant_table(shape: CacheShape, rows: Sequence[FormatFigures], wide: bool) -> Table:
    headings = []
    for num_kv_heads in shape.head_variants():
        own = "\nas it is" if num_kv_heads == shape.num_kv_heads else ""
        headings.append(f"{attention_kind(shape.num_heads, num_kv_heads)} {num_kv_heads:,}{own}")
    table = _table("kv_format", *headings, wide=wide)
    for row in rows:
        table.add_row(row.kv_format, *map(binary_size, row.variants))
    return table


def _table(first: str, *others: str, wide: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold", vertical="bottom")
    for heading in others:
        _add_column(table, heading, wide)
    return table


def _add_column(table: Table, heading: str, wide: bool) -> None:
    """A column of numbers. A narrow screen gets them on two lines rather than cut."""
    table.add_column(heading, justify="right", no_wrap=wide, overflow="fold", vertical="bottom")


def _bar(size: int, largest: int) -> str:
    """A bar as long as the size, in eighths of a column; the largest one fills its columns."""
    eighths = max(1, round(size * _BAR_COLUMNS * 8 / largest))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _percent(size: int, budget: int) -> str:
    percent = 100 * size / budget
    if percent < 1:
        return "< 1%"
    return f"{percent:,.0f}%" if percent <= 1_000_000 else "> 10,000 x"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
