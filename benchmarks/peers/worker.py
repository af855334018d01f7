"""The process of one engine with one cache, told what to do over pipes. While nothing is asked, it sleeps."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_ADAPTERS = Path(__file__).parent / "adapters"
# Loading may fetch nothing, but some engines compile or calibrate at first.
_LOAD_TIMEOUT_S = 1200.0
_TIMEOUT_S = 900.0


class WorkerError(Exception):
    """An engine failed, or its process ended. The message is one line."""


class Worker:
    """One engine.

    It ends when its pipe closes, so also when this process dies, however that happens.

    Args:
        python: the interpreter of its environment.
        adapter: its file in `adapters`.
        threads: that it may compute with.
        log: a file for what its libraries print.
    """

    def __init__(self, python: Path, adapter: str, threads: int, log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": "",
        }
        with log.open("wb") as errors:
            # A session of its own: Ctrl-C is for the one who asks, who then closes the pipe.
            self._process = subprocess.Popen(
                [str(python), str(_ADAPTERS / adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=variables,
                start_new_session=True,
            )

    def send(self, command: str, **arguments: Any) -> None:
        """Ask for something. `receive` must be called before the next.

        Raises:
            WorkerError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._end()) from None

    def receive(self, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """The answer.

        Raises:
            WorkerError: it is an error, there is none in time, or the process has ended.
        """
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise WorkerError(f"no answer within {timeout_s:.0f} s")
        if not line:
            raise WorkerError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(" ".join(answer["error"].split())[:300])
        return answer

    def load(self, **settings: Any) -> None:
        """Begin to load; `loaded` waits for its end."""
        self.send("load", **settings)

    def loaded(self) -> None:
        """Wait until it has loaded. Raises as `receive`."""
        self.receive(_LOAD_TIMEOUT_S)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait. Raises as `send` and `receive`."""
        self.send(command, **arguments)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not read any more
                pipe.close()

    def _end(self) -> str:
        """What there is to say of a process that has ended: its last words."""
        try:
            status: int | str = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = "unknown"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        words = lines[-1].strip()[:300] if lines else "it said nothing"
        return f"its process ended with status {status}: {words}"
