"""The same work on Kvist and on its peers: one model file, the same tokens and threads, in turn.

    python benchmarks/peers/run.py              everything: an hour or more once the peers are installed
    python benchmarks/peers/run.py --quick      a minute or two: does everything work?

It runs with the interpreter of Kvist's own environment (the `bench` extra draws the picture) and installs each peer
into one of its own. docs/peers.md says what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import os
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from environments import InstallError, python_of, versions
from field import Failure, Field, Installed
from peers import KVIST, PEERS, Peer
from report import ModelResult, Report, agreement
from turns import Limits
from workloads import Plan, Row, Text, Workloads

from kvist.errors import KvistError

if TYPE_CHECKING:
    from kvist.loading.resolve import ModelSource

_REPOSITORY = Path(__file__).resolve().parents[2]
_TEXT = _REPOSITORY / "tests" / "data" / "alice.txt"
_RESULTS = _REPOSITORY / "benchmarks" / "results"
_ENVIRONMENTS = Path("~/.cache/kvist-peers")
_MODELS = ("smollm2-135m", "gemma3-270m")
_CONTEXTS = (128, 1024, 4096, 7000)
_ROUNDS = 5
_PROBE_PASSES = 2


def main() -> int:
    """Run the command; its exit status."""
    options = _parser().parse_args()
    # Ended politely it leaves no process either; ended otherwise, the pipes close and the workers end by themselves.
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _compare(options)
    except KeyboardInterrupt as stop:
        print(f"\nstopped{f' by {stop}' if stop.args else ''}; nothing was written", file=sys.stderr)
        return 130
    except KvistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _compare(options: argparse.Namespace) -> int:
    peers = _chosen(options.peers)
    _check_results(options.results, options.name)
    sources = [_source(model) for model in options.models or (_MODELS[:1] if options.quick else _MODELS)]
    threads = options.threads or len(os.sched_getaffinity(0))
    plan = _plan(options)
    environments = options.environments.expanduser().resolve()
    installed, missing, found_versions = _install(peers, environments)

    import torch

    from kvist.bench.machine import MachineFacts

    torch.set_num_threads(threads)
    machine = MachineFacts.gather(threads)
    results = [_measure(source, installed, plan, threads) for source in sources]
    if not any(result.rows for result in results):
        print("nothing could be measured", file=sys.stderr)
        return 1
    report = Report(options.name, plan, machine, {"kvist": machine.kvist} | found_versions, results, missing)
    paths = report.write(options.results)
    print(f"\n{report.markdown()}\nwritten: {', '.join(str(path) for path in paths)}")
    return 0


def _check_results(folder: Path, name: str) -> None:
    """Refuse at the start what could not be written at the end."""
    if Path(name).name != name or not name.strip("."):
        raise SystemExit(f"--name is '{name}': it must be a name for files, without folders")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SystemExit(f"--results {folder} cannot be written: {error.strerror or error}") from None
    if find_spec("matplotlib") is None:
        raise SystemExit("the picture needs matplotlib: pip install 'kvist[bench]', or pip install matplotlib")


def _source(model: str) -> ModelSource:
    """The file of a model, which all engines read."""
    from kvist.loading.progress import no_progress
    from kvist.loading.resolve import resolve

    source = resolve(model, no_progress)
    if not source.is_gguf:
        raise SystemExit(f"{source.name} is no GGUF file, which all engines read: name one")
    return source


def _measure(source: ModelSource, installed: list[Installed], plan: Plan, threads: int) -> ModelResult:
    from kvist.kernels import native
    from kvist.loading import load

    tokenizer = load(source.path).tokenizer
    text = _TEXT.read_text(encoding="utf-8")
    plain = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text)
    tokens = Text(whole[: len(whole) - len(plain)], plain)
    rows: list[Row] = []
    print(f"{source.name}: loading", flush=True)
    with Field(installed, source.path, threads, plan.max_context) as field:
        workloads = Workloads(
            field, tokens, plan, lambda: max(native.read_rates(passes=_PROBE_PASSES, num_threads=threads))
        )
        for row in workloads.rows():
            rows.append(row)
            figure = row.figure
            print(
                f"{source.name}  {row.work:8} {row.sequences:2} x {row.context:6,}  {row.label:34} "
                f"{figure.tokens_per_s:9,.1f} tokens/s  {figure.rounds} rounds, {figure.discarded} discarded, "
                f"{figure.gb_per_s:.0f} GB/s",
                flush=True,
            )
        failures = list(field.failures)
    same, drawn = agreement(workloads.drawn)
    return ModelResult(source.name, source.path.stat().st_size, rows, failures, same, drawn)


def _install(peers: list[Peer], environments: Path) -> tuple[list[Installed], list[Failure], dict[str, str]]:
    """Kvist and those peers that can be had, those that cannot, and all versions."""
    installed, missing, found = [], [], {}
    for peer in [KVIST, *peers]:
        try:
            python = python_of(peer, environments)
        except InstallError as error:
            print(f"{peer.name}: {error}", flush=True)
            missing.append(Failure(peer.name, str(error)))
            continue
        folder = environments / peer.name
        installed.append(Installed(peer, python, folder))
        found.update(versions(peer, python))
    return installed, missing, found


def _chosen(names: str | None) -> list[Peer]:
    if names is None:
        return list(PEERS)
    known = {peer.name: peer for peer in PEERS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"no peer is called '{unknown[0]}': there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _plan(options: argparse.Namespace) -> Plan:
    rounds = options.rounds or (2 if options.quick else _ROUNDS)
    contexts = options.contexts or (_CONTEXTS[:2] if options.quick else _CONTEXTS)
    few = min(rounds, 3)
    plan = Plan(contexts, Limits(rounds, 8.0), Limits(few, 12.0), Limits(few, 12.0), Limits(few, 60.0))
    if options.quick:
        return replace(plan, batches=(8,), batch_context=128, num_requests=4, answer_tokens=16)
    return plan


def _contexts(text: str) -> tuple[int, ...]:
    contexts = sorted({int(part) for part in text.split(",")})
    if contexts[0] < 2:
        raise ValueError
    return tuple(contexts)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare Kvist with other engines.")
    parser.add_argument(
        "--peers", help=f"some of them, with commas between; default: {','.join(each.name for each in PEERS)}"
    )
    parser.add_argument("--models", type=lambda text: text.split(","), help=f"default: {','.join(_MODELS)}")
    parser.add_argument("--contexts", type=_contexts, help=f"default: {','.join(map(str, _CONTEXTS))}")
    parser.add_argument("--rounds", type=_at_least_one, help=f"that are to count; default: {_ROUNDS}")
    parser.add_argument("--threads", type=_at_least_one, help="default: one per CPU")
    parser.add_argument("--quick", action="store_true", help="one model, short contexts, few rounds")
    parser.add_argument("--environments", type=Path, default=_ENVIRONMENTS, help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="a folder; default: benchmarks/results")
    parser.add_argument("--name", default=datetime.date.today().isoformat(), help="of the files; default: today's date")
    return parser


if __name__ == "__main__":
    sys.exit(main())
