"""What `kvist plan` shows a person: formats down, costs across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvist.cli.output import table_console
from kvist.cli.plan_figures import REWIND_SLACK_TOKENS
from kvist.memory import binary_size
from kvist.models.cache_shape import attention_kind

if TYPE_CHECKING:
    from kvist.cli.plan_figures import FormatFigures, Request
    from kvist.cli.plan_heads import FewerHeads
    from kvist.models.cache_shape import CacheShape

_BAR = ""  # the heading of the bars
_BAR_COLUMNS = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"

# Marks of figures that the memory allows and something else does not.
_TOO_LONG, _TOO_MANY = "*", "†"

_UNBOUNDED = 10_000

Cell = str | Text


def print_plan(
    name: str,
    shape: CacheShape,
    request: Request,
    rows: Sequence[FormatFigures],
    fewer: Sequence[FewerHeads],
    weights_format: str | None,
    weights_bytes: int | None,
) -> None:
    """Print a plan on standard output: the model, what fits, layer groups where there are several, other KV heads."""
    console = table_console()

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style))

    line(_model(name, shape))
    if weights_bytes is not None:
        line(f"weights: {binary_size(weights_bytes)} in {weights_format}, beside the cache")
    line(f"cache: at most {binary_size(request.memory_bytes)}{_share(request, weights_bytes)} (--kv-memory)")
    console.print()
    line(_sequences(request), "bold")
    _print_table(console, *_costs(shape, request, rows))
    for excess in _excesses(shape, request, rows):
        line(excess, "dim")
    console.print()
    line(_verdict(request, rows), "bold")
    if len(rows[0].cache.groups) > 1:
        console.print()
        line("by layer group", "bold")
        _print_table(console, *_groups(request, rows))
    for group in rows[0].cache.groups:
        if group.rules.most_live is not None:
            line(
                f"a window of {group.layer_group.window:,}: at most {group.rules.most_live:,} pages of a sequence, for "
                f"the window, {REWIND_SLACK_TOKENS} tokens to rewind and a step of {request.max_step_tokens:,}",
                "dim",
            )
    console.print()
    line(f"with other KV heads for {_count(shape.num_heads, 'query head')}", "bold")
    _print_table(console, *_variants(shape, rows))
    console.print()
    if not fewer:
        line("with fewer KV heads: there is one for all query heads already, so none to merge", "bold")
        return
    shown = next((index for index, row in enumerate(rows) if row.kv_format == "bf16"), 0)
    line(f"with fewer KV heads, in {rows[shown].kv_format}", "bold")
    _print_table(console, *_fewer(shape, fewer, shown, weights_bytes))
    for sentence in _advice(fewer, weights_bytes):
        line(sentence, "dim")


def _model(name: str, shape: CacheShape) -> str:
    kind = attention_kind(shape.num_heads, shape.num_kv_heads)
    context = "" if shape.max_context is None else f", context {shape.max_context:,}"
    return (
        f"{name}: {_count(len(shape.layers), 'layer')}, {_count(shape.num_heads, 'query head')} over "
        f"{_count(shape.num_kv_heads, 'KV head')} of {shape.layers[0].head_dim:,} dims ({kind}){context}"
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _share(request: Request, weights_bytes: int | None) -> str:
    share = request.budget.share
    beside = "" if weights_bytes is None else " beside the weights"
    return "" if share is None else f", {share:.0%} of what is free{beside}"


def _sequences(request: Request) -> str:
    one = f"a sequence of {request.context:,} tokens"
    return one if request.batch == 1 else f"{request.batch:,} sequences of {request.context:,} tokens each"


def _costs(shape: CacheShape, request: Request, rows: Sequence[FormatFigures]) -> tuple[list[str], list[list[Cell]]]:
    each = "" if request.batch == 1 else "in each\n"
    headings = ["kv_format", "bytes per\ntoken", "cache", _BAR, "of the\nbudget"]
    largest = max(row.kv_bytes for row in rows)
    lines: list[list[Cell]] = []
    for row in rows:
        fits = row.kv_bytes <= request.memory_bytes
        lines.append([
            row.kv_format,
            f"{row.cache.bytes_per_token:,}",
            binary_size(row.kv_bytes),
            Text(_bar(row.kv_bytes, largest), style="green" if fits else "red"),
            _percent(row.kv_bytes, request.memory_bytes),
            _tokens_that_fit(row) + _TOO_LONG * _exceeds_context(shape, row),
            f"{row.sequences_that_fit:,}" + _TOO_MANY * (row.sequences_that_fit > request.max_sequences),
        ])  # fmt: skip
    return [*headings, f"tokens\n{each}that fit", "sequences\nthat fit"], lines


def _tokens_that_fit(row: FormatFigures) -> str:
    return "no end" if row.tokens_that_fit is None else f"{row.tokens_that_fit:,}"


def _exceeds_context(shape: CacheShape, row: FormatFigures) -> bool:
    return shape.max_context is not None and (row.tokens_that_fit is None or row.tokens_that_fit > shape.max_context)


def _excesses(shape: CacheShape, request: Request, rows: Sequence[FormatFigures]) -> Iterator[str]:
    """What the marks in the table mean."""
    if any(_exceeds_context(shape, row) for row in rows):
        yield f"{_TOO_LONG} the model takes {shape.max_context:,} tokens at most"
    if any(row.sequences_that_fit > request.max_sequences for row in rows):
        yield f"{_TOO_MANY} {_count(request.max_sequences, 'sequence')} at once: the others wait"


def _verdict(request: Request, rows: Sequence[FormatFigures]) -> str:
    it_fits = "It fits" if request.batch == 1 else "They fit"
    fitting = [row.kv_format for row in rows if row.kv_bytes <= request.memory_bytes]
    if fitting:
        return f"{it_fits} as {_listed(fitting)}."
    smallest = min(rows, key=lambda row: row.kv_bytes)
    lacking = binary_size(smallest.kv_bytes - request.memory_bytes)
    return f"{it_fits} in none of these formats: {smallest.kv_format} lacks {lacking}."


def _groups(request: Request, rows: Sequence[FormatFigures]) -> tuple[list[str], list[list[Cell]]]:
    headings = ["kv_format"]
    for group in rows[0].cache.groups:
        sees = "all tokens" if group.layer_group.window is None else f"window of {group.layer_group.window:,}"
        headings.append(f"{sees},\n{_count(len(group.layer_group.layers), 'layer')}")
    lines: list[list[Cell]] = []
    for row in rows:
        sizes = [request.batch * group.bytes_for(request.context) for group in row.cache.groups]
        lines.append([row.kv_format, *map(binary_size, (*sizes, row.kv_bytes))])
    return [*headings, "together"], lines


def _variants(shape: CacheShape, rows: Sequence[FormatFigures]) -> tuple[list[str], list[list[Cell]]]:
    headings = ["kv_format"]
    for num_kv_heads in shape.head_variants():
        own = "\nas it is" if num_kv_heads == shape.num_kv_heads else ""
        headings.append(f"{attention_kind(shape.num_heads, num_kv_heads)} {num_kv_heads:,}{own}")
    return headings, [[row.kv_format, *map(binary_size, row.variants)] for row in rows]


def _fewer(
    shape: CacheShape, fewer: Sequence[FewerHeads], shown: int, weights_bytes: int | None
) -> tuple[list[str], list[list[Cell]]]:
    """What a half, a quarter and an eighth of the KV heads cost and save, in one format."""
    headings = ["KV heads", "query\nheads\neach", "cache", "saved", "tokens\nthat fit", "sequences\nthat fit"]
    lines: list[list[Cell]] = []
    for one in fewer:
        found = one.formats[shown]
        cells: list[Cell] = [
            f"{one.num_kv_heads:,} (1/{shape.num_kv_heads // one.num_kv_heads})",
            f"{shape.num_heads // one.num_kv_heads:,}",
            binary_size(found.kv_bytes),
            binary_size(found.saved_bytes),
            "no end" if found.tokens_that_fit is None else f"{found.tokens_that_fit:,}",
            f"{found.sequences_that_fit:,}",
        ]
        if weights_bytes is not None and one.weights_bytes is not None and found.read_share is not None:
            cells += [binary_size(weights_bytes - one.weights_bytes), f"{1 / found.read_share:.2f} x"]
        lines.append(cells)
    return headings + (["weights\nsaved", "decoding\nat most"] if weights_bytes is not None else []), lines


def _advice(fewer: Sequence[FewerHeads], weights_bytes: int | None) -> Iterator[str]:
    cost = "heads that stand for several cost quality, the more the fewer are left, until the model is trained further"
    if weights_bytes is None:
        yield cost
        return
    yield "decoding at most: a step at the end of the context reads so much less, weights and cache together"
    yield (
        f"{cost}: `kvist convert gqa SRC DST --kv-heads {fewer[0].num_kv_heads} --method fitted --text FILE` makes "
        "such a model, `kvist convert report SRC DST --text FILE` measures it"
    )


def _print_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table: where it is too wide without its bars, and where it is still too wide as a block for each row."""
    plain = [index for index, heading in enumerate(headings) if heading != _BAR]
    for columns in (list(range(len(headings))), plain):
        table = _table([headings[i] for i in columns], [[row[i] for i in columns] for row in rows])
        if table.__rich_measure__(console, console.options.update(width=_UNBOUNDED)).maximum <= console.width:
            console.print(table)
            return
    for row in rows:
        console.print(row[0])
        block = Table(box=None, pad_edge=False, show_header=False)
        block.add_column(style="dim")
        block.add_column(justify="right", no_wrap=True)
        for index in plain[1:]:
            block.add_row("  " + headings[index].replace("\n", " "), row[index])
        console.print(block)


def _table(headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, heading in enumerate(headings):
        left = index == 0 or heading == _BAR
        table.add_column(heading, justify="left" if left else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    return table


def _bar(size: int, largest: int) -> str:
    """A bar as long as the size, in eighths of a column; the largest one fills its columns."""
    eighths = max(1, round(size * _BAR_COLUMNS * 8 / largest))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _percent(size: int, budget: int) -> str:
    if budget == 0:
        return "-"
    percent = 100 * size / budget
    if percent < 1:
        return "< 1%"
    if percent <= 1_000:
        return f"{percent:,.0f}%"
    return f"{percent / 100:,.0f} x" if percent <= 1_000_000 else "> 10,000 x"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
