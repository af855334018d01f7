"""`kvist plan`: what a context costs in each format, and what fits, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.checks import check_integer
from kvist.cli import options
from kvist.cli.output import print_note
from kvist.config import WEIGHTS_FORMATS, EngineConfig, check_format
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats, check_distinct
from kvist.memory import MemoryBudget, available_bytes, distinct_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.cli.plan_figures import FormatFigures, Request
    from kvist.cli.plan_heads import FewerHeads
    from kvist.models.cache_shape import CacheShape

DEFAULT_KV_FORMATS = ("fp32", "bf16", "int8", "k=int8,v=int4", "int4")

# Far beyond every model and machine.
_MOST = 2**40


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model that is here, as for kvist run; only its configuration is read.",
            metavar="MODEL",
            show_default=options.DEFAULT_MODEL,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="The config.json of any other decoder.", metavar="FILE", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.", metavar="N", show_default="the model's most")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.", metavar="N")] = 1,
    kv_format: Annotated[
        list[str] | None,
        typer.Option(
            help="How keys and values are kept, as for kvist run (int4/0-1:int8 too); may be given several times.",
            metavar="FORMAT",
            show_default=" ".join(DEFAULT_KV_FORMATS),
        ),
    ] = None,
    kv_memory: options.KVMemoryOption = None,
    weights_format: options.WeightsFormatOption = None,
    max_step_tokens: Annotated[
        int, typer.Option(help="The most tokens of a step: windows keep room for them.", metavar="N")
    ] = EngineConfig.max_step_tokens,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """What a context costs in memory, and what fits.

    The formula is the cache's own: whole pages of 64 tokens, windows that drop what no query sees, the most that
    sequences take at once while they grow. Nothing is fetched or loaded.
    """
    if context is not None:
        check_integer("context", context, 1, _MOST)
    check_integer("batch", batch, 1, _MOST)
    check_integer("max_step_tokens", max_step_tokens, 1, _MOST)
    if weights_format is not None:
        check_format("weights_format", weights_format, WEIGHTS_FORMATS)
    formats = check_distinct(map(LayerFormats.parse, kv_format or DEFAULT_KV_FORMATS))
    budget = MemoryBudget.parse(kv_memory)
    if model is not None and config is not None:
        raise OptionError("--model and --config name two models: give one of them")
    name, shape, weights, weights_bytes, weights_with = _described(
        model or options.DEFAULT_MODEL, config, weights_format
    )
    if weights_bytes is None and weights_format is not None:
        raise OptionError(
            f"weights_format is {weights_format}, and Kvist does not run {name}, so that its weights are not known: "
            "leave it out"
        )

    from kvist.cli.plan_figures import Request, figures
    from kvist.cli.plan_heads import fewer_heads

    context = context or shape.max_context
    if context is None:
        raise OptionError(f"{name} does not say how many tokens it takes: give --context N")
    memory_bytes, notes = _memory_for(budget, weights_bytes)
    request = Request(context, batch, max_step_tokens, memory_bytes, budget)
    rows, refusals = figures(shape, formats, request, leave_out=not kv_format)
    fewer = fewer_heads(shape, rows, request, weights_bytes, weights_with)
    for note in (*shape.notes, *notes, *refusals):
        print_note(note)
    if batch > request.max_sequences:
        print_note(f"{request.max_sequences:,} sequences run at once: the others of {batch:,} wait")
    if shape.max_context is not None and context > shape.max_context:
        print_note(f"{name} takes {shape.max_context:,} tokens at most: the {context:,} are planned all the same")
    if as_json:
        print(_json(name, shape, request, rows, fewer, weights, weights_bytes))
    else:
        from kvist.cli.plan_tables import print_plan

        print_plan(name, shape, request, rows, fewer, weights, weights_bytes)


def _described(
    model: str, config: str | None, weights_format: str | None
) -> tuple[str, CacheShape, str | None, int | None, Callable[[int], int]]:
    """What the model goes by and what its cache must hold; where Kvist runs it, the format and bytes of its weights,
    and their bytes with another number of KV heads.
    """
    from kvist.loading.model_config import config_file, model_config
    from kvist.loading.planned_weights import planned_weights, weights_with_kv_heads
    from kvist.loading.untrusted_file import errors_about
    from kvist.models.cache_shape import cache_shape

    name, path, raw = model_config(model) if config is None else config_file(config)
    with errors_about(path):
        shape = cache_shape(raw)
        if (known := shape.config) is None:
            return name, shape, None, None, lambda num_kv_heads: 0
        kept, num_bytes = planned_weights(name, path, known, weights_format)
        return name, shape, kept, num_bytes, lambda number: weights_with_kv_heads(path, known, kept, number)


def _memory_for(budget: MemoryBudget, weights_bytes: int | None) -> tuple[int, tuple[str, ...]]:
    """The bytes of a budget, and what is to be said of them. A share is of what is free once the weights are loaded."""
    free = available_bytes()
    if weights_bytes is None:
        unknown = () if budget.share is None else ("its weights are not known: the share is of all that is free",)
        return budget.resolve(lambda: free), unknown
    left = free - weights_bytes
    if left > 0:
        return budget.resolve(lambda: left), ()
    alone, all_free = distinct_sizes(weights_bytes, free)
    excess = f"the weights alone ({alone}) exceed what is free ({all_free})"
    if budget.num_bytes is not None:
        return budget.num_bytes, (excess,)
    return 0, (f"{excess}: give --kv-memory SIZE to plan for a larger machine",)


def _json(
    name: str,
    shape: CacheShape,
    request: Request,
    rows: Sequence[FormatFigures],
    fewer: Sequence[FewerHeads],
    weights_format: str | None,
    weights_bytes: int | None,
) -> str:
    """One line: what was asked, a row for each format, what the model is."""
    from kvist.cli.plan_figures import REWIND_SLACK_TOKENS
    from kvist.models.cache_shape import attention_kind

    variants = [
        {
            "num_kv_heads": num_kv_heads,
            "kind": attention_kind(shape.num_heads, num_kv_heads),
            "kv_bytes": {row.kv_format: row.variants[index] for row in rows},
        }
        for index, num_kv_heads in enumerate(shape.head_variants())
    ]
    return json.dumps(
        {
            "context": request.context,
            "batch": request.batch,
            "rows": [_json_row(row, request) for row in rows],
            "weights_bytes": weights_bytes,
            "weights_format": weights_format,
            "kv_memory_bytes": request.memory_bytes,
            "max_step_tokens": request.max_step_tokens,
            "rewind_slack_tokens": REWIND_SLACK_TOKENS,
            "model": name,
            "model_type": shape.model_type,
            "max_context": shape.max_context,
            "max_sequences": request.max_sequences,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "variants": variants,
            "fewer_kv_heads": [
                {
                    "num_kv_heads": one.num_kv_heads,
                    "weights_bytes": one.weights_bytes,
                    "formats": {row.kv_format: asdict(figures) for row, figures in zip(rows, one.formats, strict=True)},
                }
                for one in fewer
            ],
        },
        ensure_ascii=False,
    )


def _json_row(row: FormatFigures, request: Request) -> dict[str, object]:
    groups = [
        {
            "window": group.layer_group.window,
            "num_layers": len(group.layer_group.layers),
            "pages": request.batch * group.rules.most_pages(request.context),
            "kv_bytes": request.batch * group.bytes_for(request.context),
        }
        for group in row.cache.groups
    ]
    return {
        "kv_format": row.kv_format,
        "kv_bytes_per_token": row.cache.bytes_per_token,
        "kv_bytes": row.kv_bytes,
        "tokens_that_fit": row.tokens_that_fit,
        "sequences_that_fit": row.sequences_that_fit,
        "groups": groups,
    }
