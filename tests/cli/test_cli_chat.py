from __future__ import annotations

import os
import signal
import sys
import types

import pytest

import engine_fakes
from kvist.cli import chat as chat_module


@pytest.fixture
def typed(monkeypatch):
    """Has lines typed into a terminal, one of which may be an exception such as KeyboardInterrupt."""

    def type_lines(*lines: object) -> None:
        def answer_prompt(sign: str) -> object:
            assert sign == "> "
            for line in lines:
                if isinstance(line, type):
                    raise line
                yield line

        monkeypatch.setattr(chat_module, "typed_lines", answer_prompt)
        monkeypatch.setattr(chat_module, "is_typed", lambda: True)

    return type_lines


def test_lines_of_a_pipe_are_turns_of_one_session(kvist, fake_llm):
    outcome = kvist("chat", "--system", "be brief", given="hello\n\n  again \n")
    assert (outcome.code, outcome.out, outcome.err) == (0, "turn 1: hello\nturn 2: again\n", "")
    (session,) = fake_llm.sessions
    assert session.system == "be brief"
    assert fake_llm.closed == ["session", "llm"]


def test_reset_forgets_and_quit_leaves(kvist, fake_llm):
    outcome = kvist("chat", given="hello\n/reset\nagain\n/QUIT\nnever\n")
    assert outcome.out == "turn 1: hello\nturn 1: again\n"


def test_stats_show_the_last_answer_and_the_context(kvist, fake_llm):
    outcome = kvist("chat", given="/stats\nhello\nagain\n/stats\n")
    before, after = outcome.err.splitlines()[:2], outcome.err.splitlines()[2:]
    assert before == ["note: there is no finished answer to tell of", "context  0 of 2,048 tokens"]
    assert after[0] == "tokens   20 prompt (10 cached) + 2 completion"
    assert after[-1] == "context  20 of 2,048 tokens"


def test_help_lists_every_command(kvist, fake_llm):
    listed = kvist("chat", given="/help\n").err
    assert [line.split()[0] for line in listed.splitlines()] == ["/help", "/stats", "/reset", "/quit"]


def test_unknown_command_ends_a_script_and_names_the_nearest(kvist, fake_llm):
    error = kvist("chat", given="/rest\nhello\n").error
    assert error == "unknown command '/rest': did you mean '/reset'? known: /help, /stats, /reset, /quit"


def test_slash_alone_is_no_command(kvist, fake_llm):
    assert kvist("chat", given="/\n").error.startswith("unknown command '/'")


def test_path_at_the_start_of_a_line_is_text(kvist, fake_llm):
    assert kvist("chat", given="/etc/passwd is what?\n").out == "turn 1: /etc/passwd is what?\n"


def test_error_at_a_terminal_keeps_the_chat(kvist, fake_llm, typed):
    typed("too long", "/xyz", "hello")
    outcome = kvist("chat")
    assert (outcome.code, outcome.out) == (0, "turn 1: hello\n")
    assert outcome.err.splitlines()[1:] == [
        "error: the context is full",
        "error: unknown command '/xyz': known: /help, /stats, /reset, /quit",
    ]


def test_interrupt_stops_the_answer_and_keeps_the_chat(kvist, fake_llm, typed):
    def interrupt_once() -> None:
        fake_llm.during_answer = lambda: None
        os.kill(os.getpid(), signal.SIGINT)

    fake_llm.during_answer = interrupt_once
    typed("hello", "again")
    outcome = kvist("chat")
    assert (outcome.code, outcome.out) == (0, "turn 1: \nturn 2: again\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait_for_the_step(kvist, fake_llm, typed):
    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    fake_llm.during_answer = interrupt_twice
    typed("hello", "/stats")
    outcome = kvist("chat")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.splitlines()[1] == "note: there is no finished answer to tell of"


def test_interrupt_at_the_prompt_leaves(kvist, fake_llm, typed):
    typed("hello", KeyboardInterrupt)
    outcome = kvist("chat")
    assert (outcome.code, outcome.out) == (130, "turn 1: hello\n")


def test_model_without_template_is_refused(kvist, fake_llm):
    fake_llm.has_chat_template = False
    assert kvist("chat").error == "rote has no chat template, so it cannot chat: try kvist run --raw"


@pytest.fixture
def small_llm(monkeypatch):
    """A real LLM in front of a model that repeats what was said, with a context and a cache of few tokens."""

    def load(**limits: object) -> None:
        module = types.ModuleType("kvist.llm")
        module.LLM = lambda model, **options: engine_fakes.fake_llm(
            engine_fakes.AnsweringDecoder(engine_fakes.echo), **limits
        )
        monkeypatch.setitem(sys.modules, "kvist.llm", module)

    return load


def test_a_full_context_names_the_command_that_empties_it(kvist, small_llm, typed):
    small_llm(max_context=50)
    typed("x" * 60, "x" * 10, "y" * 30, "/reset", "y" * 30)
    outcome = kvist("chat")
    assert outcome.out == f"{'x' * 10}\n{'y' * 16}\n"
    too_long, full = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert too_long.endswith("must hold at least one more: shorten the prompt")  # nothing that a reset would forget
    assert full == (
        "error: the conversation of 24 tokens leaves 26 of the context of 50, too little for the new text: shorten it, "
        "or forget the conversation with /reset"
    )


def test_a_full_cache_names_the_command_that_empties_it(kvist, small_llm, typed):
    small_llm(kv_memory=engine_fakes.memory_for(64))
    typed("x" * 100, "x" * 12, "y" * 20, "/reset", "y" * 20)
    outcome = kvist("chat", "--max-tokens", "30")
    assert outcome.out == f"{'x' * 12}\n{'y' * 20}\n"
    too_long, full = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert too_long.endswith("shorten the prompt, lower max_tokens or raise kv_memory")
    assert full.endswith("raise kv_memory, or forget the conversation with /reset")


@pytest.mark.parametrize("threads", ["0", "-1", "2000000", "99999999999"])
def test_a_number_of_threads_that_cannot_run_is_one_line_before_anything_is_loaded(kvist, fake_llm, threads):
    assert kvist("chat", "--threads", threads).error.startswith(f"threads is {threads}: it must be from 1 to 1024")
    assert not fake_llm.loaded_with


@pytest.mark.parametrize("threads", ["0", "-1", "2000000", "99999999999"])
def test_a_measurement_refuses_them_in_the_same_words(kvist, threads):
    error = kvist("bench", "bandwidth", "--threads", threads).error
    assert error.startswith(f"threads is {threads}: it must be from 1 to 1024")


def test_wrong_option_is_one_line_before_anything_is_loaded(kvist, fake_llm):
    assert kvist("chat", "--top-p", "0").error == "top_p is 0.0: it must be above 0 and at most 1"
    assert not fake_llm.loaded_with


def test_answers_are_drawn_and_ended_as_asked(kvist, small_llm, typed):
    small_llm()
    typed("abcabc")
    assert kvist("chat", "--stop", "ca", "--top-k", "1", "--min-p", "0.1", "--repetition-penalty", "1").out == "ab\n"
    assert kvist("chat", "--top-k", "-1").error.startswith("top_k is -1: ")
