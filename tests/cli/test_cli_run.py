from __future__ import annotations

import io
import json
import sys

import pytest

from kvist.cli.app import command_line
from kvist.config import SamplingParams
from kvist.errors import ModelNotFoundError, PromptError

JSON_KEYS = [
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "ttft_ms",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "kv_format",
    "kv_bytes",
    "kv_bytes_per_token",
    "weights_format",
    "weights_bytes",
    "bf16_matrices",
    "kernel",
]


@pytest.mark.parametrize("columns", ["80", "20", "0"])
def test_text_goes_to_standard_output_and_statistics_to_standard_error(kvist, fake_llm, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    outcome = kvist("run", "hello")
    assert (outcome.code, outcome.out) == (0, "hello\n")
    assert outcome.err.splitlines() == [
        "",
        "tokens   5 prompt (0 cached) + 1 completion",
        "speed    first token after 12 ms, prefill 400.0 tokens/s",
        "cache    bf16, 2.0 KiB, 256 bytes per token",
        "weights  bf16, 3.0 MiB, --weights-format int8 decodes faster and costs little quality",
        "kernel   by rote",
    ]
    assert fake_llm.closed == ["llm"]


def test_matrices_that_the_format_does_not_fit_are_named(kvist, fake_llm):
    fake_llm.weights_format, fake_llm.bf16_matrices = "int8", ("a",)
    said = "weights  int8, 3.0 MiB, 1 matrix in bf16, whose columns are no multiple of 32 (a)\n"
    assert said in kvist("run", "hello").err
    fake_llm.bf16_matrices = ("a", "b", "c", "d")
    assert "4 matrices in bf16, whose columns are no multiple of 32 (a, b, c ...)\n" in kvist("run", "hello").err
    assert json.loads(kvist("run", "hello", "--json").out)["bf16_matrices"] == ["a", "b", "c", "d"]


def test_quiet_leaves_the_text_alone(kvist, fake_llm):
    outcome = kvist("run", "--quiet", "a line\n")
    assert (outcome.out, outcome.err) == ("a line\n", "")


def test_statistics_say_that_the_answer_was_cut_off(kvist, fake_llm):
    fake_llm.finish_reason = "length"
    assert "1 completion, cut off at the limit\n" in kvist("run", "hello").err


def test_json_prints_one_object_with_these_keys_and_nothing_else(kvist, fake_llm):
    outcome = kvist("run", "--json", "用中文 🙂")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 1
    printed = json.loads(outcome.out)
    assert list(printed) == JSON_KEYS
    assert printed["text"] == "用中文 🙂"
    assert printed["decode_tokens_per_s"] is None
    assert (printed["ttft_ms"], printed["weights_bytes"], printed["kernel"]) == (12.35, 3 << 20, "by rote")


def test_prompt_becomes_a_conversation_with_its_system_message(kvist, fake_llm):
    kvist("run", "--system", "be brief", "hello")
    messages, _ = fake_llm.asked[0]
    assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_raw_prompt_reaches_the_model_as_it_is(kvist, fake_llm):
    kvist("run", "--raw", " hello\n")
    assert fake_llm.asked[0][0] == " hello\n"


def test_model_without_template_continues_the_prompt_and_says_so(kvist, fake_llm):
    fake_llm.has_chat_template = False
    outcome = kvist("run", "--quiet", "once upon")
    assert fake_llm.asked[0][0] == "once upon"
    assert (outcome.code, outcome.out) == (0, "once upon\n")
    assert outcome.err == "note: rote has no chat template: it continued the prompt as it is (--raw)\n"


def test_failure_of_a_model_without_template_is_one_line(kvist, fake_llm):
    def fail() -> None:
        raise PromptError("the context is full")

    fake_llm.has_chat_template = False
    fake_llm.during_answer = fail
    assert kvist("run", "once upon").error == "the context is full"


def test_dash_reads_standard_input_without_its_final_line_break(kvist, fake_llm):
    kvist("run", "--raw", "-", given="one\ntwo\n\n")
    assert fake_llm.asked[0][0] == "one\ntwo\n"


def test_options_reach_the_model_and_the_sampler(kvist, fake_llm):
    kvist(
        *("run", "hello", "--model", "m", "--weights-format", "fp32", "--kv-format", "fp32", "--kv-memory", "2MiB"),
        *("--threads", "3", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4"),
        *("--min-p", "0.1", "--repetition-penalty", "1.2", "--stop", "a", "--stop", "b", "--seed", "11"),
    )
    loaded = {name: fake_llm.loaded_with[name] for name in ("model", "weights_format", "kv_format", "kv_memory")}
    assert loaded == {"model": "m", "weights_format": "fp32", "kv_format": "fp32", "kv_memory": "2MiB"}
    assert fake_llm.loaded_with["threads"] == 3
    assert fake_llm.asked[0][1] == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2, stop=("a", "b"), seed=11
    )


def test_defaults_are_those_of_the_python_api(kvist, fake_llm):
    kvist("run", "hello")
    assert fake_llm.asked[0][1] == SamplingParams()
    assert fake_llm.loaded_with["model"] == "smollm2-135m"
    assert fake_llm.loaded_with["kv_memory"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0: it must be at least 0"),
        (["--max-tokens", "0"], "max_tokens is 0: it must be at least 1"),
        (["--kv-format", "bf61"], "unknown kv_format 'bf61': did you mean 'bf16'? known: bf16, fp32"),
        (["--weights-format", "int3"], "unknown weights_format 'int3'"),
        (["--kv-memory", "-5"], "'-5' is not a size in bytes: write it like 512MiB, or 50% of what is free"),
        (["--threads", "0"], "threads is 0: it must be from 1 to 1024, best the number of CPUs"),
        (["--threads", "-1"], "threads is -1: it must be from 1 to 1024"),
        (["--threads", "2000000"], "threads is 2000000: it must be from 1 to 1024"),
        (["--threads", "99999999999"], "threads is 99999999999: it must be from 1 to 1024"),
        (["--threads", "9" * 5000], "'--threads'"),
        (["--max-tokens", "9" * 5000], "'--max-tokens'"),
        (["--kv-memory", "9" * 400], "is not a size in bytes that any machine has"),
        (["--top-k", "-1"], "top_k is -1: it must be at least 0, and 0 is off"),
        (["--seed", "-1"], "'--seed'"),
        (["--max-tokens", "many"], "'--max-tokens'"),
        (["--stop", ""], "a stop string is empty"),
        (["--raw", "--system", "be brief"], "--system has no place without a chat template"),
        (["--temprature", "1"], "no such option: --temprature"),
    ],
)
def test_wrong_option_is_one_line_before_anything_is_loaded(kvist, fake_llm, arguments, message):
    assert message in kvist("run", "hello", *arguments).error
    assert not fake_llm.loaded_with


@pytest.mark.parametrize("arguments", [("",), ("-",)])
def test_empty_prompt_is_refused_before_anything_is_loaded(kvist, fake_llm, arguments):
    assert kvist("run", *arguments).error.startswith("the prompt is empty")
    assert not fake_llm.loaded_with


def test_working_directory_that_is_gone_is_told_before_anything_is_loaded(kvist, fake_llm, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert kvist("run", "hello").error == "the folder that you are in is gone: change to another"
    assert not fake_llm.loaded_with


def test_prompt_that_is_not_utf8_is_refused(kvist, fake_llm, monkeypatch, capsys):
    assert kvist("run", "caf\udce9").error.startswith("the text is not UTF-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert command_line(["run", "-"]) == 2
    assert capsys.readouterr().err.startswith("error: the text is not UTF-8")


def test_system_message_without_a_template_is_refused(kvist, fake_llm):
    fake_llm.has_chat_template = False
    assert kvist("run", "--system", "be brief", "hello").error.startswith("rote has no chat template for --system")
    assert fake_llm.closed == ["llm"]


def test_error_of_the_model_is_one_line(kvist, fake_llm, monkeypatch):
    def fail(model: str, **options: object) -> None:
        raise ModelNotFoundError(f"no model is called\n'{model}'")

    monkeypatch.setattr(sys.modules["kvist.llm"], "LLM", fail)
    assert kvist("run", "hello", "--model", "x").error == "no model is called 'x'"


def test_unexpected_exception_keeps_its_traceback(kvist, fake_llm):
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    fake_llm.during_answer = fail
    with pytest.raises(ZeroDivisionError, match="a bug"):
        kvist("run", "hello")


def test_interrupt_ends_with_130_and_closes_the_model(kvist, fake_llm):
    def interrupt() -> None:
        raise KeyboardInterrupt

    fake_llm.during_answer = interrupt
    outcome = kvist("run", "hello")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")
    assert fake_llm.closed == ["llm"]
