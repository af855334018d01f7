"""`kvist bench decode --profile`: where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli.bench_model import Asked, bench_model
from kvist.cli.bench_report import ModelReport, new_table

if TYPE_CHECKING:
    from rich.table import Table

    from kvist.bench.profile import StepProfile


@dataclass(frozen=True)
class ProfileReport(ModelReport):
    """A step of decode by operation, after each context in each format.

    Attributes:
        tokens: that a run decodes.
        profiles: the steps.
    """

    tokens: int
    profiles: tuple[StepProfile, ...]

    @property
    def work(self) -> str:
        return "profile of a decode step"

    @property
    def is_steady(self) -> bool:
        return True

    def figures(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "profiles": [{**asdict(profile), "python_ms": profile.python_ms} for profile in self.profiles],
        }

    def tables(self) -> Iterable[Table]:
        for context in dict.fromkeys(profile.context for profile in self.profiles):
            yield _table([profile for profile in self.profiles if profile.context == context])

    def draw(self, path: Path, kind: str) -> None:
        from kvist.bench.plot import write_stacked_bars

        bars = {
            f"{profile.kv_format}, {profile.context:,} tokens": {
                operation.name: operation.ms for operation in profile.operations
            }
            for profile in self.profiles
        }
        write_stacked_bars(path, kind, bars, unit="ms of a step, with clocks around its operations", title=self.title)


def profile_report(asked: Asked, contexts: Sequence[int], tokens: int) -> ProfileReport:
    """Load the model and measure."""
    from kvist.bench.profile import profile_step

    longest, profiles = max(contexts), {}
    with bench_model(asked, [longest], tokens, kept=True) as model:
        memory = model.filled(lambda runs: runs.decode(longest))
        pairs = [(context, name) for context in sorted(contexts, reverse=True) for name in model.runs]
        for done, (context, name) in enumerate(pairs):
            model.progress("measuring", done, len(pairs))
            profiles[context, name] = profile_step(model.runs[name], model.loaded.decoder, context, model.repetitions)
        in_order = tuple(profiles[context, name] for context in contexts for name in model.runs)
    return ProfileReport(model.machine, model.subject, memory, tokens, in_order)


def _table(profiles: Sequence[StepProfile]) -> Table:
    """Operations of a step after one context, and below them what the undisturbed step is made of."""
    heads = [head for profile in profiles for head in (f"{profile.kv_format} ms", "share")]
    table = new_table(f"after {profiles[0].context:,} tokens", "calls", *heads)
    calls = {operation.name: operation.calls for profile in profiles for operation in profile.operations}
    for name in calls:
        cells = [name, f"{calls[name]:,.0f}"]
        for profile in profiles:
            ms = sum(operation.ms for operation in profile.operations if operation.name == name)
            cells += [f"{ms:.2f}", f"{ms / profile.clocked_step_ms:.0%}"]
        table.add_row(*cells)
    table.add_section()
    table.add_row("step with clocks", "", *(cell for one in profiles for cell in (f"{one.clocked_step_ms:.2f}", "")))
    table.add_row("step without", "", *(cell for one in profiles for cell in (f"{one.step_ms:.2f}", "")))
    for label, part in (
        ("  in native kernels", "native_ms"),
        ("  in PyTorch's operations", "pytorch_ms"),
        ("  in Python, between them", "python_ms"),
    ):
        cells = [label, ""]
        for profile in profiles:
            ms = getattr(profile, part)
            cells += [f"{ms:.2f}", f"{ms / profile.step_ms:.0%}"]
        table.add_row(*cells)
    return table
