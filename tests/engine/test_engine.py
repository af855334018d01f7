"""Steps, batches, failures and threads, through the engine's own surface."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import pytest
import torch

from engine_fakes import ByteTokenizer, HashingDecoder, memory_for, tiny_config
from kvist.cache.kv_cache import KVCache
from kvist.config import CacheConfig, EngineConfig, SamplingParams
from kvist.engine import DeltaStream, Engine, Request
from kvist.errors import CacheFullError, NumericsError, PromptError, StateError
from kvist.kv_format import LayerFormats
from kvist.models.step_inputs import StepInputs


def engine_of(
    decoder: HashingDecoder | None = None,
    *,
    tokens: int = 4096,
    max_step_tokens: int = 1024,
    max_sequences: int = 64,
    max_context: int = 1024,
) -> Engine:
    config = tiny_config(max_context)
    engine_config = EngineConfig(max_step_tokens, min(max_sequences, max_step_tokens))
    cache_config = CacheConfig(
        LayerFormats.parse("bf16"), memory_for(tokens), max_step_tokens=engine_config.max_step_tokens
    )
    cache = KVCache(config.layers, cache_config)
    return Engine(decoder or HashingDecoder(), config, cache, ByteTokenizer().decode, {257}, engine_config)


def request_of(prompt: str | list[int], **params: object) -> Request:
    token_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return Request(token_ids, SamplingParams(**params), requested_at=0.0)  # type: ignore[arg-type]


def some_requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        request_of(
            [rng.randrange(256) for _ in range(rng.choice([1, 2, 7, 40, 130]))],
            max_tokens=rng.randrange(1, 30),
            temperature=rng.choice([0, 1.2]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1, 1.3]),
            seed=i,
        )
        for i in range(count)
    ]


def tokens_of(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    tokens = [completion.token_ids for completion in engine.run(requests)]
    assert engine.cache.used_bytes == 0
    return tokens


def in_threads(*tasks: Callable[[], None]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


ALONE = [tokens_of(engine_of(), [request])[0] for request in some_requests(12)]


@pytest.mark.parametrize(
    ("max_step_tokens", "max_sequences", "tokens"), [(1024, 64, 4096), (1, 1, 4096), (7, 3, 4096), (64, 64, 192)]
)
def test_a_ragged_batch_gives_what_each_gives_alone(max_step_tokens: int, max_sequences: int, tokens: int) -> None:
    """In one go, a token at a time, in small chunks, and waiting for memory."""
    engine = engine_of(max_step_tokens=max_step_tokens, max_sequences=max_sequences, tokens=tokens)
    assert tokens_of(engine, some_requests(12)) == ALONE


def test_a_step_packs_all_sequences_without_padding() -> None:
    decoder = HashingDecoder()
    engine_of(decoder).run([request_of("abc", max_tokens=2), request_of("x", max_tokens=2)])
    first, second = decoder.steps
    assert first.token_ids.tolist() == [*b"x", *b"abc"]  # a single token goes first
    assert first.positions.tolist() == [0, 0, 1, 2]
    assert first.logit_rows.tolist() == [0, 3]
    assert second.positions.tolist() == [3, 1]
    assert second.logit_rows.tolist() == [0, 1]


def test_a_chunk_that_does_not_end_the_prompt_wants_no_logits() -> None:
    decoder = HashingDecoder()
    engine_of(decoder, max_step_tokens=4).run([request_of("abcdefghij", max_tokens=1)])
    assert [step.logit_rows.tolist() for step in decoder.steps] == [[], [], [1]]
    assert [step.token_ids.tolist() for step in decoder.steps] == [[*b"abcd"], [*b"efgh"], [*b"ij"]]


def test_threads_share_steps_and_get_what_each_gets_alone() -> None:
    decoder = HashingDecoder()
    engine = engine_of(decoder)
    requests = some_requests(12)
    results: dict[int, tuple[int, ...]] = {}
    barrier = threading.Barrier(12)

    def task(index: int) -> None:
        barrier.wait()
        if index % 2:
            results[index] = engine.run([requests[index]])[0].token_ids
        else:
            stream = DeltaStream(engine, engine.submit([requests[index]])[0])
            results[index] = tuple(token_id for delta in stream for token_id in delta.token_ids)

    in_threads(*(lambda index=index: task(index) for index in range(12)))
    assert [results[index] for index in range(12)] == ALONE
    assert engine.cache.used_bytes == 0
    assert max(len(step.cache.spans) for step in decoder.steps) > 3
    assert len(decoder.steps) < sum(len(tokens) for tokens in ALONE) / 2


def test_a_thread_that_steps_on_and_on_does_not_starve_another() -> None:
    engine = engine_of(max_context=100_000, tokens=19_968)
    long = DeltaStream(engine, engine.submit([request_of("a", max_tokens=10_000, ignore_eos=True)])[0])
    stop, answered = threading.Event(), threading.Event()

    def drive() -> None:
        for _ in long:
            if stop.is_set():
                break

    def ask() -> None:
        engine.run([request_of("b", max_tokens=5)])
        answered.set()

    driver, asker = threading.Thread(target=drive), threading.Thread(target=ask)
    driver.start()
    asker.start()
    assert answered.wait(timeout=10)
    stop.set()
    driver.join()
    asker.join()


# --- given up and failed ----------------------------------------------------------------------------------------------


def start_stream(engine: Engine, prompt: str = "abc") -> DeltaStream:
    stream = DeltaStream(engine, engine.submit([request_of(prompt, max_tokens=50, ignore_eos=True)])[0])
    next(stream)
    assert engine.cache.used_bytes > 0
    return stream


def test_a_closed_stream_gives_its_memory_back() -> None:
    engine = engine_of()
    stream = start_stream(engine)
    stream.close()
    assert engine.cache.used_bytes == 0
    assert list(stream) == []


def test_a_dropped_stream_gives_its_memory_back() -> None:
    engine = engine_of()
    stream = start_stream(engine)
    del stream
    assert engine.cache.used_bytes == 0


def test_a_stream_that_was_never_read_gives_its_place_back() -> None:
    engine = engine_of()
    DeltaStream(engine, engine.submit([request_of("abc", max_tokens=50)])[0])
    gc.collect()
    assert tokens_of(engine, [request_of("x", max_tokens=1)])


def test_a_stream_closed_by_a_finalizer_during_a_step_does_not_lock_up() -> None:
    decoder = HashingDecoder()
    engine = engine_of(decoder)
    streams = [start_stream(engine)]
    decoder.before_step = lambda inputs: streams.clear()  # the collector may run at any time
    assert len(engine.run([request_of("x", max_tokens=3, ignore_eos=True)])[0].token_ids) == 3
    assert engine.cache.used_bytes == 0


def test_an_error_in_a_step_reaches_all_it_concerns_and_leaves_the_engine_usable() -> None:
    decoder = HashingDecoder()
    engine = engine_of(decoder)
    stream = start_stream(engine)

    def fail(inputs: StepInputs) -> None:
        raise ZeroDivisionError("in the model")

    decoder.before_step = fail
    with pytest.raises(ZeroDivisionError, match="in the model"):
        engine.run([request_of("x")])
    with pytest.raises(ZeroDivisionError, match="in the model"):
        next(stream)
    assert engine.cache.used_bytes == 0
    decoder.before_step = lambda inputs: None
    assert tokens_of(engine, some_requests(12)) == ALONE


def test_an_interrupt_gives_up_its_own_sequences_only() -> None:
    decoder = HashingDecoder()
    engine = engine_of(decoder)
    requests = some_requests(12)
    stream = DeltaStream(engine, engine.submit([requests[3]])[0])
    tokens = list(next(stream).token_ids)

    def interrupt(inputs: StepInputs) -> None:
        raise KeyboardInterrupt

    decoder.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.run([request_of("x")])
    decoder.before_step = lambda inputs: None
    assert [*tokens, *(token_id for delta in stream for token_id in delta.token_ids)] == list(ALONE[3])
    assert engine.cache.used_bytes == 0


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    class Broken(HashingDecoder):
        def _logits(self, inputs: StepInputs, row: int) -> torch.Tensor:
            logits = super()._logits(inputs, row)
            return logits * float("nan") if inputs.token_ids[row] == ord("!") else logits

    engine = engine_of(Broken())
    good = DeltaStream(engine, engine.submit([request_of("abc", max_tokens=5)])[0])
    with pytest.raises(NumericsError, match="not numbers"):
        engine.run([request_of("abc!")])
    assert sum(len(delta.token_ids) for delta in good) == 5
    assert engine.cache.used_bytes == 0


def unchecked(prompt: str, **params: object) -> Request:
    """A request with parameters that `SamplingParams` would refuse: what an error of our own would look like."""
    request = request_of(prompt, temperature=1.0)
    for name, value in params.items():
        object.__setattr__(request.params, name, value)
    return request


@pytest.mark.parametrize("params", [{"top_k": 2.5}, {"logprobs": 2.5}], ids=str)
def test_an_error_that_nobody_expects_fails_its_request_alone(params: dict[str, object]) -> None:
    """Whichever thread takes the step."""
    engine = engine_of()
    good = DeltaStream(engine, engine.submit([request_of("abc", max_tokens=5)])[0])
    (bad,) = engine.submit([unchecked("abc", **params)])
    assert sum(len(delta.token_ids) for delta in good) == 5
    with pytest.raises(TypeError):
        engine.next_delta(bad, 0)
    assert engine.cache.used_bytes == 0


def test_a_completion_that_cannot_be_made_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    bad, good = engine.submit([request_of("abc", max_tokens=2), request_of("x", max_tokens=5, ignore_eos=True)])

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bad, "_timings", fail)
    stream = DeltaStream(engine, good)
    assert sum(len(delta.token_ids) for delta in stream) == 5
    assert isinstance(bad.error, ZeroDivisionError)
    assert engine.cache.used_bytes == 0


def test_an_interrupt_before_a_sequence_waits_leaves_nothing_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()

    def interrupt(sequence: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._scheduler, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.submit([request_of("abc")])
    monkeypatch.undo()
    assert tokens_of(engine, some_requests(12)) == ALONE


def test_a_tokenizer_that_fails_fails_its_request_alone() -> None:
    engine = engine_of()

    def decode(token_ids: object) -> str:
        raise LookupError("no such piece")

    good = DeltaStream(engine, engine.submit([request_of("abc", max_tokens=5)])[0])
    engine._decode = decode
    with pytest.raises(LookupError, match="no such piece"):
        engine.run([request_of("x")])
    assert sum(len(delta.token_ids) for delta in good) == 5
    assert engine.cache.used_bytes == 0


def test_closing_the_engine_fails_what_runs_and_refuses_what_comes() -> None:
    engine = engine_of()
    stream = start_stream(engine)
    room = engine.open_room()
    engine.close()
    assert engine.cache.used_bytes == 0
    engine.close_room(room)  # a session that outlives it
    with pytest.raises(StateError, match="the LLM was closed"):
        next(stream)
    with pytest.raises(StateError, match="closed"):
        engine.run([request_of("x")])


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5, -1], "the prompt holds token -1: the model knows 0 to 261"),
        ([262], "the prompt holds token 262"),
        ([1] * 100, "the prompt has 100 tokens, and the model's context of 100 must hold at least one more"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(prompt: list[int], message: str) -> None:
    engine = engine_of(max_context=100)
    with pytest.raises(PromptError, match=message):
        engine.run([request_of(prompt)])
    with pytest.raises(PromptError, match=f"^prompt 2 of 2: {message}"):
        engine.run([request_of("good"), request_of(prompt)])
    assert tokens_of(engine, [request_of("good", max_tokens=1)])


def test_the_context_ends_the_text() -> None:
    (completion,) = engine_of(max_context=100).run([request_of([1] * 99, max_tokens=50)])
    assert (completion.finish_reason, completion.completion_tokens) == ("length", 1)


def test_a_request_that_can_never_fit_is_refused_at_once_and_says_what_would() -> None:
    engine = engine_of(tokens=128)
    with pytest.raises(CacheFullError) as caught:
        engine.run([request_of([1] * 60, max_tokens=70)])
    assert str(caught.value) == (
        "the request needs room for 130 tokens (24.0 KiB), 60 of the prompt and 70 to generate, but the cache holds "
        "128 tokens (16.0 KiB): shorten the prompt, lower max_tokens or raise kv_memory"
    )
    assert len(tokens_of(engine, [request_of([1] * 60, max_tokens=68, ignore_eos=True)])[0]) == 68


def test_room_is_reserved_for_no_more_than_the_context() -> None:
    engine = engine_of(tokens=128, max_context=100)
    assert len(engine.run([request_of("abc", max_tokens=10**9, ignore_eos=True)])[0].token_ids) == 97
