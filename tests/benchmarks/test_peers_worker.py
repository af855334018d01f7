"""A worker's process, with an adapter that only adds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import worker as worker_module
from worker import Worker, WorkerError

ADAPTERS = Path(worker_module.__file__).parent / "adapters"
ADAPTER = f"""
import os, sys, time
sys.path.insert(0, {str(ADAPTERS)!r})
from protocol import Settings, Timed, serve

class Engine:
    def __init__(self, settings: Settings) -> None:
        print("noise on standard output")
        if settings.cache == "none":
            raise ValueError("no such cache\\nin two lines")
        self.settings = settings
        self.reset()

    def reset(self):
        self.total = 0

    def extend(self, token_ids):
        self.total += sum(token_ids)
        return Timed(0.5, [self.total])

    def decode(self, num_tokens):
        if num_tokens == 0:
            print("the last words", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(num_tokens)
        return Timed(0.0, [self.settings.threads, int(os.environ["OMP_NUM_THREADS"])])

serve(Engine)
"""
SETTINGS = {"model": "model.gguf", "threads": 3, "max_context": 10, "work_folder": "."}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(worker_module, "_ADAPTERS", tmp_path)
    (tmp_path / "adding.py").write_text(ADAPTER)
    made = Worker(Path(sys.executable), "adding.py", 3, tmp_path / "logs" / "adding.log")
    yield made
    made.close()


def test_a_worker_does_what_it_is_asked(worker: Worker) -> None:
    worker.load(cache="f16", **SETTINGS)
    worker.loaded()
    assert worker.ask("extend", token_ids=[1, 2]) == {"seconds": 0.5, "token_ids": [3]}
    assert worker.ask("extend", token_ids=[4]) == {"seconds": 0.5, "token_ids": [7]}
    assert worker.ask("reset") == {}
    assert worker.ask("extend", token_ids=[5])["token_ids"] == [5]
    assert worker.ask("decode", num_tokens=0.01)["token_ids"] == [3, 3]


def test_an_error_is_one_line_and_the_process_goes_on(worker: Worker) -> None:
    worker.load(cache="none", **SETTINGS)
    with pytest.raises(WorkerError, match=r"^ValueError: no such cache in two lines$"):
        worker.loaded()
    with pytest.raises(WorkerError, match="no such command, or nothing loaded: extend"):
        worker.ask("extend", token_ids=[1])


def test_the_last_words_of_a_process_that_ends_are_told(worker: Worker) -> None:
    worker.load(cache="f16", **SETTINGS)
    worker.loaded()
    with pytest.raises(WorkerError, match=r"^its process ended with status 3: the last words$"):
        worker.ask("decode", num_tokens=0)
    with pytest.raises(WorkerError, match="status 3"):
        worker.ask("reset")


def test_one_that_does_not_answer_is_given_up(worker: Worker) -> None:
    worker.load(cache="f16", **SETTINGS)
    worker.loaded()
    worker.send("decode", num_tokens=60)
    with pytest.raises(WorkerError, match="no answer within 0 s"):
        worker.receive(0.2)


def test_no_process_is_left(worker: Worker) -> None:
    process = worker._process.pid
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
