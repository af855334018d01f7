from __future__ import annotations

import json
import re

import pytest


@pytest.fixture
def model(smollm2_gguf) -> list[str]:
    return ["--model", str(smollm2_gguf)]


def test_run_answers_and_counts(kvist, model):
    outcome = kvist("run", "What is the capital of Sweden?", "--json", *model)
    assert (outcome.code, outcome.err) == (0, "")
    printed = json.loads(outcome.out)
    assert "Stockholm" in printed["text"]
    assert (printed["finish_reason"], printed["cached_tokens"]) == ("stop", 0)
    # 30 layers with keys and values of 3 heads of 64 numbers in bf16, in one page of 64 tokens or two.
    assert printed["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    # The last token drawn is not computed.
    computed = printed["prompt_tokens"] + printed["completion_tokens"] - 1
    assert printed["kv_bytes"] == -(-computed // 64) * 64 * printed["kv_bytes_per_token"]
    assert printed["ttft_ms"] > 0
    assert printed["decode_tokens_per_s"] > 0


def test_chat_does_not_compute_its_history_again(kvist, model):
    outcome = kvist("chat", "--max-tokens", "8", *model, given="Hi, I am Ada.\n/stats\nWho am I?\n/stats\n")
    assert outcome.code == 0
    turns = [tuple(map(int, turn)) for turn in re.findall(r"(\d+) prompt \((\d+) cached\)", outcome.err)]
    (first_prompt, first_cached), (second_prompt, second_cached) = turns
    assert first_cached == 0
    assert first_prompt <= second_cached < second_prompt


def test_prompt_beyond_the_context_is_one_line(kvist, model):
    assert "context of 8,192" in kvist("run", "-", *model, given="twig " * 9000).error
