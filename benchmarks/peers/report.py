"""The results as JSON, as Markdown and as a picture. They name the machine's kind, never its name or its folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from field import Failure
from peers import KVIST, PLAIN_CACHE, REFERENCE_CACHE
from workloads import Plan, Row

from kvist.bench.machine import MachineFacts

_REFERENCE = f"{KVIST.name} {REFERENCE_CACHE}"
_PLAIN = f"{KVIST.name} {PLAIN_CACHE}"
_PATH = re.compile(r"(?<![\w/])~?(?:/[^\s/,:;()'\"]+){2,}/?")


@dataclass(frozen=True)
class ModelResult:
    """What came of one model.

    Attributes:
        model: its name.
        weights_bytes: of its file.
        rows: all figures.
        failures: who is missing, and why.
        agreement: by label, how many of the tokens drawn are those of Kvist with its plain cache, up to the first that
            differs.
        drawn: of how many.
    """

    model: str
    weights_bytes: int
    rows: list[Row]
    failures: list[Failure]
    agreement: dict[str, int]
    drawn: int

    @property
    def labels(self) -> list[str]:
        """Of all that have a figure, in the order of their first."""
        return list(dict.fromkeys(row.label for row in self.rows))

    def row(self, label: str, work: str, context: int, sequences: int = 1) -> Row | None:
        """One figure, where there is one."""
        key = (label, work, context, sequences)
        return next((row for row in self.rows if (row.label, row.work, row.context, row.sequences) == key), None)

    def contexts(self, work: str) -> list[int]:
        """At which there are figures, ascending."""
        return sorted({row.context for row in self.rows if row.work == work})


@dataclass(frozen=True)
class Report:
    """One run of the comparison."""

    name: str
    plan: Plan
    machine: MachineFacts
    versions: dict[str, str]
    models: list[ModelResult]
    missing: list[Failure]

    def write(self, folder: Path) -> list[Path]:
        """Write the three files; their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}{ending}" for ending in (".json", ".md", ".png")]
        paths[0].write_text(json.dumps(self.fields(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        paths[1].write_text(self.markdown(), encoding="utf-8")
        self.draw(paths[2])
        return paths

    def fields(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "machine": asdict(self.machine),
            "versions": self.versions,
            "plan": asdict(self.plan),
            "reference": _REFERENCE,
            "missing": [_failure(one) for one in self.missing],
            "models": [
                {
                    "model": result.model,
                    "weights_bytes": result.weights_bytes,
                    "rows": [row.fields() for row in result.rows],
                    "failures": [_failure(one) for one in result.failures],
                    "agreement": result.agreement,
                    "drawn": result.drawn,
                }
                for result in self.models
            ],
        }

    def markdown(self) -> str:
        """Tables, and what they rest on."""
        machine = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"# Kvist and its peers: {self.name}",
            "",
            f"{machine.cpu} ({machine.architecture}), {machine.cpus} CPUs, {machine.threads} threads, "
            f"{machine.system}, python {machine.python}. {versions}.",
            "",
            "Medians of rounds in turn. After ± half of what lies between the slowest and the fastest round: a figure "
            "without it is of one round, since more would take too long. "
            f"Then how many times as fast {_REFERENCE} was. "
            "`?`: the read bandwidth moved by more than 10 % around every round. "
            "`*`: computed once, from one context to the next.",
        ]
        for result in self.models:
            lines += ["", f"## {result.model}, {result.weights_bytes / 1e6:,.0f} MB of weights", ""]
            lines += ["Decode, tokens per second over the tokens before:", "", *_by_context(result, "decode")]
            if result.contexts("prefill"):
                lines += ["", "Prefill, tokens per second over the prompt's tokens:", ""]
                lines += _by_context(result, "prefill")
            lines += self._together(result)
            lines += ["", *self._notes(result)]
        lines += ["", *(f"- {one.label} is missing: {_without_paths(one.reason)}" for one in self.missing)]
        return "\n".join(lines).rstrip() + "\n"

    def draw(self, path: Path) -> None:
        """Decode over the context, a line for each engine and cache."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.5 * len(self.models), 5.5), layout="constrained")
        every_axes = figure.subplots(1, len(self.models), squeeze=False)[0]
        styles = _styles(list(dict.fromkeys(label for result in self.models for label in result.labels)))
        lines: dict[str, Any] = {}
        for axes, result in zip(every_axes, self.models, strict=True):
            for label in result.labels:
                rows = [row for row in result.rows if row.label == label and row.work == "decode"]
                (lines[label],) = axes.plot(
                    [row.context for row in rows], [row.figure.tokens_per_s for row in rows], **styles[label]
                )
            contexts = result.contexts("decode")
            axes.set_xscale("log", base=2)
            axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tokens of context")
            axes.set_ylabel("tokens per second, decode")
            axes.set_title(result.model)
            axes.grid(alpha=0.3)
        # Below, since the lines are everywhere.
        shown = [label for label in styles if label in lines]
        figure.legend([lines[label] for label in shown], shown, loc="outside lower center", ncols=4, fontsize="x-small")
        figure.suptitle(f"{self.machine.cpu}, {self.machine.threads} threads", fontsize="small")
        figure.savefig(path, dpi=150)

    def _together(self, result: ModelResult) -> list[str]:
        plan, requests = self.plan, result.contexts("requests")
        lines: list[str] = []
        if result.contexts("batch"):
            title = f"Sequences of {plan.batch_context:,} tokens each that decode together, tokens per second of all:"
            columns = {f"{count} sequences": (plan.batch_context, count) for count in plan.batches}
            lines += ["", title, "", *_table(result, "batch", columns, _rate)]
        if requests:
            title = (
                f"{plan.num_requests} requests at once, {requests[0]:,} tokens of prompts in all, "
                f"{plan.answer_tokens} drawn for each, seconds:"
            )
            columns = {"until the last": (requests[0], plan.num_requests)}
            lines += ["", title, "", *_table(result, "requests", columns, _seconds)]
        return lines

    def _notes(self, result: ModelResult) -> list[str]:
        rates = [row.figure.gb_per_s for row in result.rows]
        counted = sum(row.figure.rounds for row in result.rows)
        discarded = sum(row.figure.discarded for row in result.rows)
        agreeing = ", ".join(f"{label} {count}" for label, count in result.agreement.items())
        notes = [f"- Read bandwidth meanwhile {min(rates):.0f} to {max(rates):.0f} GB/s."] if rates else []
        return [
            *notes,
            f"- {counted} rounds count, {discarded} were discarded, since the bandwidth moved by more than 10 %.",
            f"- Of {result.drawn} tokens drawn after the contexts, so many are those of {_PLAIN}, up to the first that "
            f"differs: {agreeing or 'none'}.",
            *(f"- {one.label} failed: {_without_paths(one.reason)}" for one in result.failures),
        ]


def agreement(drawn: dict[str, dict[int, list[int]]]) -> tuple[dict[str, int], int]:
    """How many tokens each drew as Kvist did, up to the first that differs after each context, and of how many."""
    plain = drawn.get(_PLAIN, {})
    same = {
        label: sum(_common(tokens, plain.get(context, [])) for context, tokens in contexts.items())
        for label, contexts in drawn.items()
        if label != _PLAIN
    }
    return same, sum(map(len, plain.values()))


def _common(left: list[int], right: list[int]) -> int:
    pairs = list(zip(left, right, strict=False))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _by_context(result: ModelResult, work: str) -> list[str]:
    return _table(result, work, {f"{context:,}": (context, 1) for context in result.contexts(work)}, _rate)


def _table(
    result: ModelResult, work: str, columns: dict[str, tuple[int, int]], cell: Callable[[Row], str]
) -> list[str]:
    """A line for each contender. Columns are contexts and how many sequences there are."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for label in result.labels:
        rows = [result.row(label, work, *column) for column in columns.values()]
        references = [result.row(_REFERENCE, work, *column) for column in columns.values()]
        if any(rows):
            cells = [_cell(row, reference, cell) for row, reference in zip(rows, references, strict=True)]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _cell(row: Row | None, reference: Row | None, cell: Callable[[Row], str]) -> str:
    if row is None:
        return "-"
    text = cell(row)
    if row.figure.rounds > 1:
        text += f" ±{row.figure.spread / 2:.0%}".replace("%", " %")
    if reference is not None and reference is not row:
        text += f", {reference.figure.tokens_per_s / row.figure.tokens_per_s:.2f}x"
    return text + ("" if row.figure.is_steady else " ?") + (" *" if row.in_parts else "")


def _rate(row: Row) -> str:
    rate = row.figure.tokens_per_s
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _seconds(row: Row) -> str:
    return f"{row.figure.seconds:.1f}"


def _styles(labels: list[str]) -> dict[str, dict[str, Any]]:
    """A colour for each engine, a marker for each of its caches; Kvist's lines are thick, its peers' dashed."""
    engines = list(dict.fromkeys(label.split()[0] for label in labels))
    seen: dict[str, int] = dict.fromkeys(engines, 0)
    styles: dict[str, dict[str, Any]] = {}
    for label in labels:
        engine = label.split()[0]
        own = engine == KVIST.name
        styles[label] = {
            "color": f"C{engines.index(engine)}",
            "marker": "os^D"[seen[engine] % 4],
            "linestyle": "-" if own else "--",
            "linewidth": 2.2 if own else 1.2,
            "markersize": 5,
        }
        seen[engine] += 1
    return styles


def _failure(failure: Failure) -> dict[str, str]:
    return {"label": failure.label, "reason": _without_paths(failure.reason)}


def _without_paths(text: str) -> str:
    return _PATH.sub("<path>", text)
