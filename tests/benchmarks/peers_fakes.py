"""Engines that count in place of computing, and what they were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import Cache, Peer
from worker import WorkerError

GB = 1e9


@dataclass
class FakeWorker:
    """Takes some seconds for everything, and draws ascending numbers.

    Attributes:
        seconds: for each command; `DEFAULT_S` where it is not named.
        fails_at: a command that it fails at, with its reason.
        asked: commands and their arguments, in their order.
    """

    DEFAULT_S = 0.5

    seconds: dict[str, float] = field(default_factory=dict)
    fails_at: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    is_closed: bool = False

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert not self.is_closed
        self.asked.append((command, arguments))
        if command in self.fails_at:
            raise WorkerError(self.fails_at[command])
        drawn = list(range(arguments.get("num_tokens", 0) + 1))
        return {"seconds": self.seconds.get(command, self.DEFAULT_S), "token_ids": drawn}

    def load(self, **settings: Any) -> None:
        self.ask("load", **settings)

    def loaded(self) -> None:
        if "loaded" in self.fails_at:
            raise WorkerError(self.fails_at["loaded"])

    def close(self) -> None:
        self.is_closed = True

    def of(self, command: str) -> list[dict[str, Any]]:
        return [arguments for asked, arguments in self.asked if asked == command]


def fake_peer(name: str, *caches: str, in_batches: bool = True) -> Peer:
    return Peer(name, tuple(Cache(cache, in_batches) for cache in caches))


def fake_field(monkeypatch: Any, workers: dict[str, FakeWorker], *, in_batches: bool = True) -> Any:
    """A field of one peer, `fake`, with a worker for each cache."""
    import field as field_module

    waiting = iter(workers.values())
    monkeypatch.setattr(field_module, "Worker", lambda *_: next(waiting))
    installed = field_module.Installed(fake_peer("fake", *workers, in_batches=in_batches), Path("python"), Path("logs"))
    return field_module.Field([installed], Path("model.gguf"), threads=1, max_context=100)
