"""The engines that are measured side by side, each with one cache and a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peers import Cache, Peer
from worker import Worker, WorkerError


@dataclass(frozen=True)
class Installed:
    """A peer that can be run: its interpreter, and the folder where it may keep things."""

    peer: Peer
    python: Path
    folder: Path


@dataclass(frozen=True, eq=False)
class Contender:
    """One engine with one cache."""

    peer: Peer
    cache: Cache
    worker: Worker

    @property
    def label(self) -> str:
        return f"{self.peer.name} {self.cache.name}"


@dataclass(frozen=True)
class Failure:
    """What is not measured, or not to the end, and why, in one line."""

    label: str
    reason: str


class Field:
    """All contenders over one model. It is a context manager: no process is left at its end.

    Args:
        peers: those that are installed.
        model: the GGUF file.
        threads: that each computes with.
        max_context: tokens that a sequence has room for.

    Attributes:
        live: those that have loaded and not failed since.
        failures: the others.
    """

    def __init__(self, peers: list[Installed], model: Path, threads: int, max_context: int) -> None:
        self.live: list[Contender] = []
        self.failures: list[Failure] = []
        try:
            for installed in peers:
                for cache in installed.peer.caches:
                    name = "".join(letter if letter.isalnum() else "-" for letter in f"{model.stem}-{cache.name}")
                    log = installed.folder / f"{name}.log"
                    worker = Worker(installed.python, installed.peer.adapter, threads, log)
                    contender = Contender(installed.peer, cache, worker)
                    self.live.append(contender)
                    try:  # in the words of `Settings`
                        contender.worker.load(
                            model=str(model),
                            cache=cache.name,
                            threads=threads,
                            max_context=max_context,
                            work_folder=str(installed.folder),
                        )
                    except WorkerError as error:
                        self.drop(contender, str(error))
            for contender in list(self.live):
                try:
                    contender.worker.loaded()
                except WorkerError as error:
                    self.drop(contender, str(error))
        except BaseException:
            self.close()
            raise

    def drop(self, contender: Contender, reason: str) -> None:
        """Go on without one that failed, and say so."""
        if contender in self.live:
            self.live.remove(contender)
            contender.worker.close()
            self.failures.append(Failure(contender.label, reason))
            print(f"{contender.label}: {reason}", flush=True)

    def close(self) -> None:
        """End all processes."""
        for contender in self.live:
            contender.worker.close()
        self.live.clear()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
