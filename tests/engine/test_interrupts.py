"""Ctrl-C at any moment leaves nothing behind: no sequence, no page, no lock."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from cache_checks import bytes_in_use, check_books
from engine_fakes import fake_llm, memory_for
from kvist.cache import page_pool
from kvist.config import SamplingParams
from kvist.engine.one_user import OneUser
from kvist.engine.uninterrupted import uninterrupted
from kvist.errors import StateError
from kvist.llm import LLM

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
# Python reports what is raised in a finalizer, and goes on.
IN_FINALIZERS_TOO = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _pythons_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(number: int, act: Callable[[], object]) -> bool:
    """Whether `act` came as far as line `number` of the engine's and the cache's code, where Ctrl-C is pressed."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        name = frame.f_code.co_filename
        if not ("/kvist/engine/" in name or "/kvist/cache/" in name or name.endswith(("/llm.py", "/session.py"))):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines >= number


def check_nothing_is_left(llm: LLM, sequences: int = 0) -> None:
    cache, scheduler = llm._engine.cache, llm._engine._scheduler
    assert llm.generate("x", PARAMS).completion_tokens == 2
    assert scheduler.sequences == ()
    assert len(cache._sequences) == sequences
    check_books(cache)
    if not sequences:
        assert llm.kv_used_bytes == bytes_in_use(cache) == 0


@IN_FINALIZERS_TOO
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_wherever_it_comes_nothing_is_left(way: str) -> None:
    llm = fake_llm(kv_memory=memory_for(256))
    act = {
        "generate": lambda: llm.generate(["a" * 70, "b"], PARAMS),
        "stream": lambda: list(llm.stream("a" * 70, PARAMS)),
    }[way]
    number = 1
    while interrupted_at(number, act):
        check_nothing_is_left(llm)
        number += 2
    assert number > 200


@IN_FINALIZERS_TOO
def test_wherever_it_comes_a_session_goes_on() -> None:
    llm = fake_llm(kv_memory=memory_for(512))
    number = 1
    session = llm.session()
    while interrupted_at(number, lambda: session.chat("hello", PARAMS)):
        assert session.chat("again", PARAMS).completion_tokens == 2
        check_nothing_is_left(llm, sequences=1)
        session.reset()
        number += 7
    assert number > 200
    session.close()
    check_nothing_is_left(llm)


def test_it_is_not_lost_where_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    decommit = page_pool.ReservedRange.decommit

    def press(self: page_pool.ReservedRange, page: int) -> None:
        decommit(self, page)
        signal.raise_signal(signal.SIGINT)

    llm = fake_llm(kv_memory=memory_for(512))
    monkeypatch.setattr(page_pool.ReservedRange, "decommit", press)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a" * 400, PARAMS)
    monkeypatch.undo()
    check_nothing_is_left(llm)


# --- the means --------------------------------------------------------------------------------------------------------


def test_an_interrupt_waits_until_the_block_is_through() -> None:
    through = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        through.append(True)
    assert through
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGALRM])
def test_so_do_the_other_signals_that_a_program_handles(sent: signal.Signals) -> None:
    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before, through = signal.signal(sent, end), []
    try:
        with pytest.raises(SystemExit, match=str(128 + sent)), uninterrupted():
            signal.raise_signal(sent)
            through.append(True)
        assert through
        assert signal.getsignal(sent) is end
    finally:
        signal.signal(sent, before)


def test_of_several_signals_each_is_acted_on() -> None:
    taken: list[int] = []
    before = {sent: signal.signal(sent, lambda signum, _: taken.append(signum)) for sent in (signal.SIGINT, 15)}
    try:
        with uninterrupted():
            for sent in (15, signal.SIGINT, 15):
                signal.raise_signal(sent)
            assert taken == []
        assert taken == [15, signal.SIGINT]
        signal.raise_signal(15)
        assert taken == [15, signal.SIGINT, 15]
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)


def test_an_error_of_the_block_is_raised_with_it() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_a_process_that_ignores_it_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_have_nothing_to_wait_for() -> None:
    done = []

    def act() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert done


def test_one_user_refuses_another_thread_and_not_itself() -> None:
    one = OneUser("taken")
    refused: list[str] = []

    def enter() -> None:
        try:
            with one:
                pass
        except StateError as error:
            refused.append(str(error))

    with one:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    one.__enter__()  # an interrupt came before it was left
    with one:
        pass
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert refused == ["taken"]
