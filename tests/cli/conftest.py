"""The command line in process, with a model that answers by rote in place of a real one."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable

import pytest
from cli_fakes import FakeLLM, Outcome

from kvist.cli.app import command_line


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Takes the place of `kvist.llm.LLM`, which is not even imported."""
    fake = FakeLLM()

    def load(model: str, **options: object) -> FakeLLM:
        fake.loaded_with.update(options, model=model)
        return fake

    module = types.ModuleType("kvist.llm")
    module.LLM = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvist.llm", module)
    return fake


@pytest.fixture
def kvist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `kvist ARGUMENTS`, with `given` on standard input."""

    def command(*arguments: str, given: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8"))
        code = command_line(arguments)
        return Outcome(code, *capsys.readouterr())

    return command
