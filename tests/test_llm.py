from __future__ import annotations

import math
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

import pytest
import torch
from tiny_files import hf_config, hf_state, write_tiny_directory

import kvist
from engine_fakes import (
    BYTES_PER_TOKEN,
    END,
    PAGE_BYTES,
    ByteTokenizer,
    FakeLoaded,
    HashingDecoder,
    fake_llm,
    scripted,
    tiny_config,
)
from key_texts import random
from kvist import LLM, Completion, SamplingParams, TextDelta
from kvist.cache.cache_view import Span
from kvist.cache.page_layout import PAGE_SLOTS, storage_format
from kvist.errors import CacheFullError, ContextFullError, OptionError, PromptError, SameAnswerWarning, StateError
from kvist.kernels import native
from kvist.kernels.codec import VectorCodec
from kvist.loading import LoadedModel, load
from kvist.models.step_inputs import StepInputs


def answering(text: str | list[int], prompt: str) -> LLM:
    """An LLM that answers `prompt`, with the BOS before it, with a text."""
    script = [*text.encode(), END] if isinstance(text, str) else text
    return fake_llm(scripted(script, len(prompt.encode()) + 1))


def test_one_prompt_gives_its_completion() -> None:
    llm = answering("hi", "abc")
    completion = llm.generate("abc")
    timings = completion.timings
    assert completion == Completion(
        text="hi",
        token_ids=(*b"hi", END),
        finish_reason="stop",
        prompt_tokens=4,
        completion_tokens=3,
        cached_tokens=0,
        kv_bytes=PAGE_BYTES,
        kv_bytes_per_token=BYTES_PER_TOKEN,
        timings=timings,
        logprobs=None,
    )
    assert timings.ttft_ms > 0
    assert timings.prefill_tokens_per_s == pytest.approx(4 / timings.ttft_ms * 1000)
    assert timings.decode_tokens_per_s is not None
    assert llm.kv_used_bytes == 0


def test_a_single_token_has_no_decode_speed() -> None:
    assert fake_llm().generate("abc", SamplingParams(max_tokens=1)).timings.decode_tokens_per_s is None


def test_many_prompts_give_a_list_in_their_order() -> None:
    llm = fake_llm()
    prompts: list[str | list[int]] = ["abc", [1, 2, 3], "a much longer prompt than the others"]
    params = [SamplingParams(max_tokens=n) for n in (3, 9, 5)]
    together = llm.generate(prompts, params)
    assert [completion.completion_tokens for completion in together] == [3, 9, 5]
    for prompt, one, completion in zip(prompts, params, together, strict=True):
        alone = llm.generate(prompt, one)
        assert isinstance(alone, Completion)
        assert alone.token_ids == completion.token_ids
    assert [completion.completion_tokens for completion in llm.generate(["a", "b"], SamplingParams(max_tokens=2))] == [
        2,
        2,
    ]


def test_a_text_and_its_ids_are_the_same_prompt() -> None:
    llm = fake_llm()
    assert llm.generate("abc").token_ids == llm.generate(llm.tokenizer.encode("abc")).token_ids
    assert llm.generate("abc").token_ids == llm.generate(tuple(llm.tokenizer.encode("abc"))).token_ids


@pytest.mark.parametrize("text", ["plain", "ünï — 爱丽丝 🌿👩‍👩‍👧", "stop here. Not here"])
def test_a_stream_joins_to_the_completion(text: str) -> None:
    params = SamplingParams(stop=(". N",), logprobs=1)
    deltas = list(answering(text, "abc").stream("abc", params))
    whole = answering(text, "abc").generate("abc", params)
    last = deltas[-1].completion
    assert last is not None
    assert all(delta.completion is None for delta in deltas[:-1])
    assert last.text == whole.text == text.split(". N")[0] == "".join(delta.text for delta in deltas)
    assert last.token_ids == whole.token_ids == tuple(i for delta in deltas for i in delta.token_ids)
    assert len(deltas) == len(last.token_ids)
    assert all("\N{REPLACEMENT CHARACTER}" not in delta.text for delta in deltas)


def test_a_cut_character_ends_the_text_as_a_replacement() -> None:
    completion = answering("a🌿", "abc").generate("abc", SamplingParams(max_tokens=3))
    assert (completion.text, completion.finish_reason) == ("a\N{REPLACEMENT CHARACTER}", "length")


@pytest.mark.parametrize(
    ("params", "text", "reason", "tokens"),
    [
        (SamplingParams(), "one two", "stop", 8),
        (SamplingParams(max_tokens=5), "one t", "length", 5),
        (SamplingParams(stop=("e t",)), "on", "stop", 5),
        (SamplingParams(stop=("zzz", "two!")), "one two", "stop", 8),
        (SamplingParams(stop_token_ids=(ord("t"),)), "one ", "stop", 5),
        (SamplingParams(max_tokens=7, stop=("o!",)), "one two", "length", 7),
    ],
)
def test_what_ends_a_text(params: SamplingParams, text: str, reason: str, tokens: int) -> None:
    completion = answering("one two", "abc").generate("abc", params)
    assert (completion.text, completion.finish_reason, completion.completion_tokens) == (text, reason, tokens)


def test_ignore_eos_goes_on_and_shows_no_special_token() -> None:
    llm = answering([*b"on", END, *b"e", END, *b"xyz"], "abc")
    completion = llm.generate("abc", SamplingParams(ignore_eos=True, max_tokens=6))
    assert (completion.text, completion.finish_reason) == ("onex", "length")
    assert completion.token_ids == (*b"on", END, *b"e", END, *b"x")
    stopped = llm.generate("abc", SamplingParams(ignore_eos=True, stop_token_ids=(END,)))
    assert stopped.text == "on"


def test_seeds_make_a_request_repeatable_in_any_company() -> None:
    llm = fake_llm()
    params = SamplingParams(temperature=1, seed=7, max_tokens=20)
    alone = llm.generate("abc", params).token_ids
    others = [SamplingParams(temperature=1, max_tokens=20)] * 2
    assert llm.generate(["x", "abc", "yz"], [others[0], params, others[1]])[1].token_ids == alone
    unseeded = {llm.generate("abc", others[0]).token_ids for _ in range(4)}
    assert len(unseeded) == 4
    assert llm.generate("abc", SamplingParams(temperature=1, seed=8, max_tokens=20)).token_ids != alone


def test_penalties_count_prompt_and_text() -> None:
    llm = answering("aaaa", "abc")
    never_again = SamplingParams(max_tokens=4, presence_penalty=20)
    assert llm.generate("abc", never_again).token_ids[0] == ord("a")  # of the prompt, which presence does not count
    assert llm.generate("abc", never_again).token_ids.count(ord("a")) == 1
    # "a" is wanted with 9 and "z" with 1; "a" counts from the prompt on, "z" once it was said.
    repeating = SamplingParams(max_tokens=4, repetition_penalty=20, logit_bias={ord("z"): 1.0})
    assert llm.generate("abc", repeating).text == "zaaa"
    banned = SamplingParams(max_tokens=4, logit_bias={ord("a"): -math.inf})
    assert ord("a") not in llm.generate("abc", banned).token_ids


def test_logprobs_come_with_every_token() -> None:
    completion = answering("hi", "abc").generate("abc", SamplingParams(logprobs=2))
    assert completion.logprobs is not None
    assert tuple(one.token_id for one in completion.logprobs) == completion.token_ids
    for one in completion.logprobs:
        assert one.top[0] == (one.token_id, one.logprob)
        assert one.logprob == pytest.approx(9 - math.log(math.exp(9) + 261), rel=1e-4)


def test_chat_writes_the_conversation_with_the_template() -> None:
    decoder = scripted([*b"hello", END], prompt_tokens=13)
    llm = fake_llm(decoder)
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi you"}]
    completion = llm.chat(conversation)
    assert completion.text == "hello"
    assert llm.tokenizer.decode(decoder.steps[0].token_ids.tolist(), skip_special_tokens=False) == (
        "<bos><system>s<end><user>hi you<end><model>"
    )
    assert "".join(delta.text for delta in llm.stream_chat(conversation)) == "hello"


def test_chat_without_a_template_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.has_chat_template = False
    with pytest.raises(PromptError, match="no chat template"):
        fake_llm(tokenizer=tokenizer).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        (["a", ""], "prompt 2 of 2: the prompt is empty"),
        ([[1], []], "prompt 2 of 2: the prompt is empty"),
        ([1, "a"], "a prompt is a text or a list of token ids, not a int"),
        ([[1, "a"]], "a prompt is a text or a list of token ids, not a list of int, str"),
        ([True, 5], "a prompt is a text or a list of token ids, not a bool"),
        (b"abc", "a prompt is a text, a list of token ids or a list of these, not bytes"),
        ([b"abc"], "a prompt is a text or a list of token ids, not a bytes"),
        (5, "a prompt is a text, a list of token ids or a list of these, not int"),
        ("x" * 1024, "the prompt has 1,025 tokens"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        fake_llm().generate(prompt)  # type: ignore[call-overload]


def test_no_prompts_give_no_completions() -> None:
    llm = fake_llm()
    assert llm.generate([]) == []
    assert llm.generate((), SamplingParams(max_tokens=3)) == []  # type: ignore[comparison-overlap]
    assert llm.generate([], []) == []
    with pytest.raises(OptionError, match="there are 1 params for 0 prompts"):
        llm.generate([], [SamplingParams()])


@pytest.mark.parametrize("ask", ["stream", "session"])
def test_no_tokens_are_no_prompt_of_a_stream_or_session(ask: str) -> None:
    llm = fake_llm()
    with pytest.raises(PromptError, match="the prompt is empty"):
        llm.stream([]) if ask == "stream" else llm.session().generate([])


def test_a_prompt_beyond_the_context_has_an_error_of_its_own_kind() -> None:
    with pytest.raises(ContextFullError, match="shorten the prompt"):
        fake_llm().generate("x" * 1024)


def test_a_stream_refuses_at_once() -> None:
    with pytest.raises(PromptError, match="empty"):
        fake_llm().stream("")
    with pytest.raises(CacheFullError, match="the cache holds 8,192 tokens"):
        fake_llm(max_context=10**6).stream("abc", SamplingParams(max_tokens=10**5))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "there are 1 params for 2 prompts"),
        (5, "params must be a SamplingParams or a list of them, not int"),
        ([SamplingParams(), {"top_k": 5}], "params must be a single SamplingParams for a single prompt, not dict"),
        (SamplingParams(stop_token_ids=(262,)), "stop_token_ids names token 262"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias names token -1"),
    ],
)
def test_params_that_cannot_be_honoured_are_refused(params: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fake_llm().generate(["a", "b"], params)  # type: ignore[call-overload]


def test_params_of_one_prompt_are_no_list() -> None:
    llm = fake_llm()
    for params in ([SamplingParams()], [], {}, {"top_k": 5}):
        with pytest.raises(OptionError, match="a single SamplingParams"):
            llm.generate("a", params)  # type: ignore[call-overload]
        with pytest.raises(OptionError, match="a single SamplingParams"):
            llm.stream("a", params)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="a single SamplingParams"):
            llm.session().generate("a", params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_format": "fp8"}, "unknown weights_format 'fp8'"),
        ({"kv_format": "int3"}, "unknown kv_format 'int3'"),
        ({"kv_memory": "much"}, "'much' is not a size"),
        ({"kv_memory": -5}, "^-5 is not a size"),
        ({"kv_memory": True}, "^True is not a size"),
        ({"kv_memory": 10**400}, "is not a size"),
        ({"threads": 0}, "threads is 0: it must be from 1 to 1024, best the number of CPUs"),
        ({"threads": -1}, "threads is -1: "),
        ({"threads": 2_000_000}, "threads is 2000000: "),
        ({"threads": 99_999_999_999}, "threads is 99999999999: "),
        ({"threads": 2.5}, "threads is 2.5: it must be an integer, from 1 to 1024"),
        ({"threads": True}, "threads is True: it must be an integer"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
        ({"max_step_tokens": 2.5}, "max_step_tokens is 2.5: it must be an integer"),
        ({"max_step_tokens": "many"}, "max_step_tokens is 'many': it must be an integer"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LLM("/no/such/model", **options)  # type: ignore[arg-type]


def test_the_cache_takes_half_of_the_available_memory_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake_llm(kv_memory="2MiB").kv_memory_bytes == 2 << 20
    monkeypatch.setattr("kvist.memory.available_bytes", lambda: 6 << 20)
    assert fake_llm(kv_memory=None).kv_memory_bytes == 3 << 20


def test_a_machine_that_is_full_says_what_the_cache_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.memory.available_bytes", lambda: 0)
    with pytest.raises(OptionError, match=r"kv_memory is 1 byte: .* \(8,192 bytes\), a page of 64 tokens"):
        fake_llm(kv_memory=None)


@pytest.mark.parametrize(("prompt", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (129, 3)])
def test_the_memory_of_a_text_is_that_of_its_pages(prompt: int, pages: int) -> None:
    completion = fake_llm().generate([1] * prompt, SamplingParams(max_tokens=1))
    assert (completion.kv_bytes, completion.kv_bytes_per_token) == (pages * PAGE_BYTES, BYTES_PER_TOKEN)


def test_a_step_takes_as_many_tokens_as_asked_for() -> None:
    decoder = HashingDecoder()
    llm = fake_llm(decoder, max_context=8192, max_step_tokens=4096)
    llm.generate([1] * 5000, SamplingParams(max_tokens=1))
    assert [len(step.token_ids) for step in decoder.steps] == [4096, 904]


def test_weights_that_do_not_keep_the_bits_of_an_answer_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    directory = write_tiny_directory(tmp_path / "model")
    differ = "the last bits of a token's logits depend on what is computed beside it"
    with pytest.warns(SameAnswerWarning, match=f"^with fp32 weights {differ}$") as said:
        LLM(directory, weights_format="fp32", kv_memory="1MiB")
    assert said[0].filename == __file__
    # A platform of another kind: it matters where a matrix has columns that the native library does not take.
    monkeypatch.setattr("kvist.loading.loader.bf16_rows_keep_their_bits", lambda: False)
    LLM(directory, weights_format="bf16", kv_memory="1MiB")
    LLM(directory, weights_format="int8", kv_memory="1MiB")
    state = {name: x[..., :40] if "down" in name else x[:40] if ".mlp." in name else x
             for name, x in hf_state("llama").items()}  # fmt: skip
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    odd = write_tiny_directory(tmp_path / "odd", state, config=hf_config(intermediate_size=40))
    with pytest.warns(SameAnswerWarning, match=f"^PyTorch's products in bf16 .*: {differ}$"):
        LLM(odd, weights_format="bf16", kv_memory="1MiB")


@pytest.mark.parametrize("kv_format", ["int4", "int8", "bf16/1:int8"])
def test_quantised_keys_are_coded_with_the_statics_of_the_model(
    kv_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    loaded = load(write_tiny_directory(tmp_path / "model"), "bf16")
    cache = LLM.from_loaded(loaded, kv_format=kv_format, kv_memory="1MiB")._engine.cache
    sequence, num_pages = cache.open(), 3
    num_tokens = num_pages * PAGE_SLOTS
    assert cache.reserve(sequence, num_tokens)
    view = cache.view([Span(sequence, num_tokens)])
    for layer, statics in enumerate(loaded.key_statics()):
        shape = loaded.config.layers[layer]
        k = random(num_tokens, shape.num_kv_heads, shape.head_dim)
        view.write(layer, k, k)
        codec = VectorCodec(storage_format(cache.formats[layer].keys), shape.head_dim, statics)
        numbers = torch.arange(num_pages)
        coded = codec.decode(*codec.encode(k.permute(2, 1, 0), numbers), numbers)
        assert torch.equal(view.read_split(layer, 0, 0, num_tokens)[0], coded.permute(1, 2, 0))


@pytest.mark.parametrize(
    ("kv_format", "kv_memory", "message"),
    [
        ("int8", 1, "kv_memory is 1 byte"),
        ("int4", None, "int4 cannot take a head dim of 4"),
        ("int8/7:int4", None, "names layer 7"),
    ],
)
def test_what_the_cache_refuses_is_refused_before_statics_are_computed(
    kv_format: str, kv_memory: int | None, message: str
) -> None:
    class WithoutStatics(FakeLoaded):
        def key_statics(self, progress: object) -> None:
            raise AssertionError("statics were asked for before the mistake was told")

    loaded = WithoutStatics(config=replace(tiny_config(), head_dim=4))
    with pytest.raises(OptionError, match=message):
        LLM.from_loaded(cast(LoadedModel, loaded), kv_format=kv_format, kv_memory=kv_memory)


def test_threads_are_those_of_pytorch() -> None:
    before = torch.get_num_threads()
    try:
        fake_llm(threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_closed_llm_says_so() -> None:
    with fake_llm() as llm:
        stream = llm.stream("abc")
        next(stream)
    with pytest.raises(StateError, match="closed"):
        next(stream)
    with pytest.raises(StateError, match="closed"):
        llm.generate("abc")
    assert llm.kv_used_bytes == 0


def test_it_tells_what_it_is() -> None:
    llm = fake_llm()
    assert (llm.model_name, llm.weights_format, llm.weights_bytes, llm.kv_format) == ("fake", "fp32", 12, "bf16")
    assert (llm.max_context, llm.config.model_type) == (1024, "fake")
    assert llm.kernel == f"native {native.isa()}"


def test_an_interrupt_leaves_the_llm_as_it_was() -> None:
    decoder = HashingDecoder()
    llm = fake_llm(decoder)
    expected = llm.generate("abc").token_ids

    def interrupt(inputs: StepInputs) -> None:
        if len(decoder.steps) % 5 == 4:
            raise KeyboardInterrupt

    decoder.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "x"])
    assert llm.kv_used_bytes == 0
    decoder.before_step = lambda inputs: None
    assert llm.generate("abc").token_ids == expected


def test_many_threads_stream_at_once() -> None:
    llm = fake_llm()
    expected = [llm.generate(f"prompt {i}", SamplingParams(max_tokens=30)).text for i in range(8)]
    texts: dict[int, str] = {}

    def ask(index: int) -> None:
        deltas = llm.stream(f"prompt {index}", SamplingParams(max_tokens=30))
        texts[index] = "".join(delta.text for delta in deltas)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [texts[index] for index in range(8)] == expected


def test_public_names_are_there_and_torch_only_when_used() -> None:
    assert {name: getattr(kvist, name).__name__ for name in kvist.__all__ if name != "__version__"} == {
        name: name for name in kvist.__all__ if name != "__version__"
    }
    assert kvist.TextDelta is TextDelta
    assert kvist.__version__ == version("kvist")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvist.nothing  # noqa: B018
    code = "import sys, kvist; kvist.SamplingParams(); m = sys.modules; print('torch' in m, kvist.LLM and 'torch' in m)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == ["False", "True"]
