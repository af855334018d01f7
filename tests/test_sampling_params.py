"""Parameters that the sampler cannot take are refused where they are given, not in a step that others share."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from engine_fakes import HashingDecoder, fake_llm
from kvist import SamplingParams
from kvist.errors import OptionError
from kvist.models.step_inputs import StepInputs

INTEGERS = ("max_tokens", "top_k", "seed", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MAY_BE_NONE = ("seed", "logprobs")


def message_of(**params: object) -> str:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 200
    return message


@pytest.mark.parametrize("value", [2.5, 2.0, "2", None, True, [2], math.nan])
@pytest.mark.parametrize("name", INTEGERS)
def test_a_count_must_be_an_integer(name: str, value: object) -> None:
    if value is None and name in MAY_BE_NONE:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        shown = repr(value) if isinstance(value, (str, list)) else str(value)
        assert message_of(**{name: value}).startswith(f"{name} is {shown}: it must be an integer, ")


@pytest.mark.parametrize("value", ["1", None, True, [1.0], 1j])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_measure_must_be_a_number(name: str, value: object) -> None:
    assert "number" in message_of(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400)])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_measure_must_be_finite(name: str, value: float) -> None:
    assert message_of(**{name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"top_k": -1}, "top_k is -1: it must be at least 0, and 0 is off"),
        ({"seed": -1}, "seed is -1: it must be at least 0, or None for a new one each time"),
        ({"logprobs": 101}, "logprobs is 101: it must be from 0 to 100, or None for none"),
        ({"temperature": -0.1}, "temperature is -0.1: it must be at least 0"),
        ({"temperature": None}, "temperature is None: it must be a number at least 0"),
        ({"top_p": 0}, "top_p is 0: it must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5: it must be at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: it must be above 0"),
        ({"presence_penalty": -math.inf}, "presence_penalty is -inf: it must be a finite number"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no': it must be True or False"),
        ({"stop": ["a", 5]}, "stop holds 5: each must be a string"),
        ({"stop": 5}, "stop is 5: it must be a list of strings"),
        ({"stop": [""]}, "a stop string is empty: it would end every text at once; leave it out"),
        ({"stop_token_ids": [1, 2.5]}, "stop_token_ids names token 2.5: token ids are integers"),
        ({"stop_token_ids": [True]}, "stop_token_ids names token True: token ids are integers"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7: it must be a list of token ids"),
        ({"logit_bias": {3.0: 1}}, "logit_bias names token 3.0: token ids are integers"),
        ({"logit_bias": {"3": 1}}, "logit_bias names token '3': token ids are integers"),
        ({"logit_bias": [3]}, "logit_bias is [3]: it must map token ids to numbers, like {42: -5.0}"),
        ({"logit_bias": {3: None}}, "logit_bias[3] is None: it must be a finite number, or -inf to forbid the token"),
        (
            {"logit_bias": {3: math.inf}},
            "logit_bias[3] is inf: it must be a finite number, or -inf to forbid the token",
        ),
        (
            {"logit_bias": {3: math.nan}},
            "logit_bias[3] is nan: it must be a finite number, or -inf to forbid the token",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_can(params: dict[str, object], message: str) -> None:
    assert message_of(**params) == message


def test_a_number_that_python_does_not_write_out_is_told_of() -> None:
    assert message_of(max_tokens=-(10**5000)) == (
        "max_tokens is a number of thousands of digits: it must be at least 1"
    )
    assert message_of(top_p=10**5000) == ("top_p is a number of thousands of digits: it must be above 0 and at most 1")


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int32(4): np.float64(-1)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=(1, 2), logit_bias={4: -1.0})
    assert [type(value) for value in (params.max_tokens, params.temperature, *params.logit_bias)] == [int, float, int]


def test_none_and_a_single_string_are_what_people_mean() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_a_bias_that_is_changed_later_is_not_that_of_the_parameters() -> None:
    bias = {1: -math.inf}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 5.0
    assert params.logit_bias == {1: -math.inf}


def test_a_parameter_of_the_wrong_kind_does_not_reach_a_request_that_runs() -> None:
    decoder = HashingDecoder()
    llm = fake_llm(decoder)
    expected = llm.generate("good", SamplingParams(max_tokens=20)).token_ids
    running, refused = threading.Event(), threading.Event()

    def wait(inputs: StepInputs) -> None:
        running.set()
        assert refused.wait(timeout=10)

    decoder.before_step = wait
    tokens: list[int] = []
    thread = threading.Thread(
        target=lambda: tokens.extend(llm.generate("good", SamplingParams(max_tokens=20)).token_ids)
    )
    thread.start()
    assert running.wait(timeout=10)
    for params in ({"top_k": 2.5, "temperature": 1}, {"max_tokens": 2.5}, {"logit_bias": {3.0: 1}}):
        with pytest.raises(OptionError):
            llm.generate("bad", SamplingParams(**params))  # type: ignore[arg-type]
    refused.set()
    thread.join(timeout=60)
    assert tuple(tokens) == expected
