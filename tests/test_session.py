"""A session computes only what is new, and says what a cold run would say."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from engine_fakes import AnsweringDecoder, ByteTokenizer, HashingDecoder, echo, fake_llm, memory_for
from kvist import Completion, SamplingParams, Session
from kvist.errors import CacheFullError, ContextFullError, PromptError, StateError
from kvist.models.step_inputs import StepInputs

SHORT = SamplingParams(max_tokens=6)


def computed(decoder: HashingDecoder) -> int:
    """Tokens that went through the model since the last call."""
    steps, decoder.steps = decoder.steps, []
    return sum(len(step.token_ids) for step in steps)


def prompt_of(session: Session, completion: Completion) -> list[int]:
    """The tokens that the model had before it answered."""
    return list(session._history.token_ids[: completion.prompt_tokens])


def cold(token_ids: list[int], params: SamplingParams = SHORT) -> tuple[int, ...]:
    return fake_llm().generate(token_ids, params).token_ids


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_computes_only_what_is_new(ended: bool) -> None:
    """With answers that end by themselves, and with answers that are cut off."""
    decoder = AnsweringDecoder(echo)
    llm = fake_llm(decoder)
    session = llm.session(system="be short")
    for text in ["hello", "and now?", "ünï 🌿", "x" * 40]:
        known = session.length
        completion = session.chat(text, SamplingParams(max_tokens=100 if ended else 3))
        assert completion.text == (text if ended else completion.text)
        assert completion.finish_reason == ("stop" if ended else "length")
        # Everything is reused but the last token before a cut, which was drawn and not computed.
        assert completion.cached_tokens == max(0, known - (not ended))
        new = completion.prompt_tokens - completion.cached_tokens + completion.completion_tokens - 1
        assert computed(decoder) == new
        rendered = llm.tokenizer.render_chat(session.messages[:-1])
        assert prompt_of(session, completion) == llm.tokenizer.encode(rendered, add_special_tokens=False)
        assert session.length == completion.prompt_tokens + completion.completion_tokens - ended
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 4]


@pytest.mark.parametrize("seed", range(15))
def test_random_turns_give_what_a_cold_run_gives(seed: int) -> None:
    """Turns with stop strings, edits of the conversation, abandoned streams and other requests between."""
    rng = random.Random(seed)
    llm = fake_llm()
    session = llm.session()
    for _ in range(8):
        params = SamplingParams(max_tokens=rng.randrange(1, 25), stop=("e", "a b") if rng.random() < 0.5 else ())
        if rng.random() < 0.2 and session.messages:
            session.messages[rng.randrange(len(session.messages))]["content"] += "edited"
        if rng.random() < 0.3:
            for index, _ in enumerate(session.stream_chat("dropped", params)):
                if index == rng.randrange(3):
                    break
        if rng.random() < 0.3:
            llm.generate("something else", SHORT)
        before = llm.tokenizer.render_chat([*session.messages, {"role": "user", "content": "go"}])
        completion = session.chat("go", params)
        assert completion.token_ids == cold(prompt_of(session, completion), params)
        assert llm.tokenizer.decode(prompt_of(session, completion), skip_special_tokens=False) == before
    session.close()
    assert llm.kv_used_bytes == 0


def test_a_stop_string_is_not_in_the_history() -> None:
    decoder = AnsweringDecoder(echo)
    llm = fake_llm(decoder)
    session = llm.session()
    completion = session.chat("one STOP two", SamplingParams(stop=("STOP",)))
    assert session.messages[-1] == {"role": "assistant", "content": "one "}
    assert session.length == completion.prompt_tokens + len("one ")
    completion = session.chat("more")
    assert b"STOP" not in bytes(i for i in prompt_of(session, completion)[completion.cached_tokens - 1 :] if i < 256)
    assert completion.cached_tokens == 1 + 1 + len("one STOP two") + 2 + len("one ")


def test_an_edited_conversation_is_computed_from_the_edit_on() -> None:
    llm = fake_llm(AnsweringDecoder(echo))
    session = llm.session()
    session.chat("hello")
    session.chat("again")
    session.messages[2]["content"] = "a new question"
    completion = session.chat("last")
    kept = llm.tokenizer.render_chat(session.messages[:2], add_generation_prompt=False) + "<user>a"
    assert completion.cached_tokens == len(llm.tokenizer.encode(kept, add_special_tokens=False))


def test_a_template_that_rewrites_what_was_said_is_followed() -> None:
    class Trimming(ByteTokenizer):
        def render_chat(self, messages, *, add_generation_prompt=True):  # type: ignore[no-untyped-def]
            trimmed = [{**message, "content": message["content"].strip()} for message in messages]
            return super().render_chat(trimmed, add_generation_prompt=add_generation_prompt)

    llm = fake_llm(tokenizer=Trimming())
    session = llm.session()
    spaced = SamplingParams(max_tokens=1, logit_bias={32: 100.0})  # answers " "
    session.chat("hello", spaced)
    completion = session.chat("again", spaced)
    rendered = llm.tokenizer.render_chat(session.messages[:-1])
    assert prompt_of(session, completion) == llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert completion.cached_tokens == len(
        llm.tokenizer.encode("<bos><user>hello<end><model>", add_special_tokens=False)
    )


def test_a_tokenizer_that_adds_a_space_gets_whole_texts() -> None:
    class Spacing(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):  # type: ignore[no-untyped-def]
            ids = super().encode(text, add_special_tokens=False)
            return ([256] if add_special_tokens else []) + ([32] if text[0] != "<" else []) + ids

    llm = fake_llm(tokenizer=Spacing())
    session = llm.session()
    first = session.generate("once", SHORT)
    second = session.generate("upon", SHORT)
    assert prompt_of(session, second) == llm.tokenizer.encode(f"once{first.text}upon")


def test_a_token_that_a_stop_string_cuts_is_said_in_part() -> None:
    class Wordy(ByteTokenizer):
        def decode(self, ids, *, skip_special_tokens=True):  # type: ignore[no-untyped-def]
            words = [byte for i in ids for byte in (b"so END of" if i == 7 else [i])]
            return super().decode(words, skip_special_tokens=skip_special_tokens)

    llm = fake_llm(AnsweringDecoder(lambda tokens: 7), tokenizer=Wordy())
    session = llm.session()
    assert session.chat("hello", SamplingParams(stop=("END",))).text == "so "
    completion = session.chat("again", SamplingParams(stop=("END",)))
    assert prompt_of(session, completion) == llm.tokenizer.encode(
        "<bos><user>hello<end><model>so <end><user>again<end><model>", add_special_tokens=False
    )


# --- plain text -------------------------------------------------------------------------------------------------------


def test_text_and_ids_are_appended_as_they_are() -> None:
    decoder = HashingDecoder()
    session = fake_llm(decoder).session()
    first = session.generate("once", SHORT)
    second = session.generate(" upon", SHORT)
    third = session.generate([1, 2, 3], SHORT)
    fourth = session.generate(" a time", SHORT)
    tokens = [256, *b"once", *first.token_ids, *b" upon", *second.token_ids, 1, 2, 3, *third.token_ids, *b" a time"]
    assert prompt_of(session, fourth) == tokens
    assert fourth.token_ids == cold(tokens)
    assert fourth.cached_tokens == len(tokens) - len(" a time") - 1
    assert computed(decoder) == session.length - 1


def test_an_empty_text_goes_on() -> None:
    session = fake_llm().session()
    with pytest.raises(PromptError, match="the prompt is empty"):
        session.generate("")
    whole = fake_llm().generate("once", SamplingParams(max_tokens=12)).token_ids
    first, second = session.generate("once", SHORT), session.generate("", SHORT)
    assert first.token_ids + second.token_ids == whole
    assert second.cached_tokens == second.prompt_tokens - 1


def test_text_after_a_chat_belongs_to_the_last_answer() -> None:
    llm = fake_llm(AnsweringDecoder(echo))
    session = llm.session()
    assert session.chat("abcdef", SamplingParams(max_tokens=3)).text == "abc"
    assert session.generate("").text == "def"
    assert session.messages[-1]["content"] == "abcdef"
    known = session.length
    assert session.chat("next").cached_tokens == known


def test_a_chat_after_plain_text_is_refused_until_a_reset() -> None:
    session = fake_llm(AnsweringDecoder(lambda tokens: 65)).session()
    session.generate("once", SHORT)
    with pytest.raises(PromptError, match=r"reset\(\)"):
        session.chat("hello")
    session.reset()
    assert session.chat("hello", SHORT).cached_tokens == 0


# --- interrupted, failed, refused -------------------------------------------------------------------------------------


def test_an_abandoned_stream_keeps_what_was_said() -> None:
    decoder = AnsweringDecoder(echo)
    llm = fake_llm(decoder)
    session = llm.session()
    for delta in session.stream_chat("abcdef"):
        if delta.text == "c":
            break
    assert session.messages == [{"role": "user", "content": "abcdef"}, {"role": "assistant", "content": "abc"}]
    length = session.length
    completion = session.chat("next")
    assert completion.text == "next"
    assert length - 1 <= completion.cached_tokens <= length


def test_a_stream_that_is_still_open_is_ended_by_the_next_call() -> None:
    session = fake_llm(AnsweringDecoder(echo)).session()
    stream = session.stream_chat("abcdef")
    assert next(stream).text == "a"
    assert session.chat("next").text == "next"
    assert [message["content"] for message in session.messages] == ["abcdef", "a", "next", "next"]
    with pytest.raises(StateError, match="a later call on its session has ended this stream"):
        next(stream)


def test_a_character_in_the_middle_of_which_a_stream_ends_is_not_said() -> None:
    session = fake_llm(AnsweringDecoder(echo)).session()
    stream = session.stream_chat("a🌿b")
    assert [next(stream).text for _ in range(3)] == ["a", "", ""]
    stream.close()
    assert session.messages[-1]["content"] == "a"
    assert session.chat("next").text == "next"


@pytest.mark.parametrize("ended", [True, False])
def test_what_other_threads_computed_and_no_reader_saw_is_not_said(ended: bool) -> None:
    """Their steps bring a stream further than its reader is, up to the end of its text."""
    llm = fake_llm(AnsweringDecoder(echo))
    session = llm.session()
    stream = session.stream_chat("abcdef")
    assert next(stream).text == "a"
    other = llm.session()
    other.chat("elsewhere" if ended else "xyz")  # in steps that this stream has its part in
    assert (stream._sequence.num_generated == 7) == ended
    assert stream._sequence.num_generated > 1
    stream.close()
    assert session.messages == [{"role": "user", "content": "abcdef"}, {"role": "assistant", "content": "a"}]
    prompt = llm.tokenizer.encode("<bos><user>abcdef<end><model>", add_special_tokens=False)
    assert session._history.token_ids == [*prompt, *b"a"]
    completion = session.chat("next")
    assert completion.text == "next"
    assert prompt_of(session, completion) == llm.tokenizer.encode(
        "<bos><user>abcdef<end><model>a<end><user>next<end><model>", add_special_tokens=False
    )


def test_plain_text_that_no_reader_saw_is_not_kept_either() -> None:
    llm = fake_llm()
    session = llm.session()
    stream = session.stream("once", SamplingParams(max_tokens=50, ignore_eos=True))
    seen = [*next(stream).token_ids, *next(stream).token_ids]
    llm.generate("other", SHORT)
    stream.close()
    assert session._history.token_ids == [256, *b"once", *seen]
    follows = session.generate("", SHORT)
    assert follows.token_ids == cold([256, *b"once", *seen])


def test_a_stream_that_failed_behind_its_reader_keeps_what_was_read_when_it_is_closed() -> None:
    decoder = AnsweringDecoder(echo)
    llm = fake_llm(decoder)
    session = llm.session()
    stream = session.stream_chat("abcdef")
    assert next(stream).text == "a"

    def fail(inputs: StepInputs) -> None:
        raise ZeroDivisionError

    decoder.before_step = fail
    with pytest.raises(ZeroDivisionError):
        llm.generate("other", SHORT)
    decoder.before_step = lambda inputs: None
    stream.close()
    assert session.messages[-1] == {"role": "assistant", "content": "a"}
    assert session.chat("next").text == "next"


def test_ids_that_are_changed_later_are_kept_as_they_were() -> None:
    session = fake_llm(AnsweringDecoder(echo)).session()
    session.chat("abcdef", SamplingParams(max_tokens=3))
    ids = [*b"d"]
    stream = session.stream(ids, SamplingParams(max_tokens=1))
    ids[:] = b"zzz"
    assert "".join(delta.text for delta in stream) == "e"
    assert session.messages[-1]["content"] == "abcde"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_error_leaves_the_session_usable(error: type[BaseException], steps: int) -> None:
    """A failure leaves it as it was; an interrupt keeps what was said up to then."""
    decoder = AnsweringDecoder(echo)
    llm = fake_llm(decoder)
    session = llm.session()
    session.chat("hello")
    messages, length = list(session.messages), session.length

    def fail(inputs: StepInputs) -> None:
        if len(decoder.steps) == steps:
            raise error

    decoder.steps = []
    decoder.before_step = fail
    with pytest.raises(error):
        session.chat("abcdef")
    decoder.before_step = lambda inputs: None
    if error is KeyboardInterrupt and steps:
        assert session.messages == [
            *messages,
            {"role": "user", "content": "abcdef"},
            {"role": "assistant", "content": "abcdef"[:steps]},
        ]
    else:
        assert (session.messages, session.length) == (messages, length)
    completion = session.chat("next")
    assert completion.text == "next"
    assert completion.cached_tokens >= length
    rendered = llm.tokenizer.render_chat(session.messages[:-1])
    assert prompt_of(session, completion) == llm.tokenizer.encode(rendered, add_special_tokens=False)


def test_a_context_that_is_full_says_what_is_left() -> None:
    session = fake_llm(AnsweringDecoder(echo), max_context=50).session()
    session.chat("x" * 10)
    messages, length = list(session.messages), session.length
    with pytest.raises(ContextFullError) as caught:
        session.chat("y" * 30)
    assert str(caught.value) == (
        "with the new text the session has 58 tokens, and its history of 24 leaves 26 of the context of 50: shorten "
        "the text, or reset() the session"
    )
    assert (session.messages, session.length) == (messages, length)
    assert session.chat("z").text == "z"


def test_a_cache_that_is_full_leaves_the_session_as_it_was() -> None:
    llm = fake_llm(AnsweringDecoder(echo), kv_memory=memory_for(192))
    session, other = llm.session(), llm.session()
    session.chat("hello", SamplingParams(max_tokens=10))
    other.chat("there", SamplingParams(max_tokens=40))
    messages, length = list(session.messages), session.length
    with pytest.raises(CacheFullError) as caught:
        session.chat("x", SamplingParams(max_tokens=130))
    assert str(caught.value).startswith(
        "the request needs room for 149 tokens (24.0 KiB), but open sessions hold 8.0 KiB of the cache and leave "
        "16.0 KiB: close or reset a session"
    )
    with pytest.raises(CacheFullError, match="the cache holds 192 tokens"):
        session.chat("x", SamplingParams(max_tokens=190))
    assert (session.messages, session.length) == (messages, length)
    assert session.chat("y", SamplingParams(max_tokens=3)).cached_tokens == length
    other.close()
    assert session.chat("x", SamplingParams(max_tokens=130)).text == "x"


def test_a_session_keeps_its_tokens_and_no_room_for_more() -> None:
    llm = fake_llm(AnsweringDecoder(echo))
    session = llm.session()
    session.chat("hello", SamplingParams(max_tokens=500))
    assert llm.kv_used_bytes == memory_for(64)


def test_two_threads_do_not_share_a_session() -> None:
    decoder = HashingDecoder()
    session = fake_llm(decoder).session()
    inside, leave = threading.Event(), threading.Event()

    def hold(inputs: StepInputs) -> None:
        inside.set()
        leave.wait(timeout=10)

    decoder.before_step = hold
    thread = threading.Thread(target=session.generate, args=("abc", SHORT))
    thread.start()
    assert inside.wait(timeout=10)
    with pytest.raises(StateError, match="another thread"):
        session.generate("x")
    leave.set()
    thread.join()
    assert session.length > 0


# --- its life ---------------------------------------------------------------------------------------------------------


def test_reset_keeps_the_system_message_alone() -> None:
    llm = fake_llm(AnsweringDecoder(echo))
    session = llm.session(system="be short")
    first = session.chat("hello")
    session.reset()
    assert (session.messages, session.length, llm.kv_used_bytes) == ([{"role": "system", "content": "be short"}], 0, 0)
    again = session.chat("hello")
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)


def test_reset_ends_an_open_stream() -> None:
    llm = fake_llm(AnsweringDecoder(echo))
    session = llm.session()
    stream = session.stream_chat("abcdef")
    next(stream)
    session.reset()
    assert (session.messages, llm.kv_used_bytes) == ([], 0)
    with pytest.raises(StateError, match="ended this stream"):
        next(stream)
    assert session.chat("hello").text == "hello"


def test_closing_or_dropping_a_session_gives_its_memory_back() -> None:
    llm = fake_llm()
    with llm.session() as session:
        session.generate("abc", SHORT)
        assert llm.kv_used_bytes > 0
    assert llm.kv_used_bytes == 0
    with pytest.raises(StateError, match="closed"):
        session.generate("abc")
    session.close()

    dropped = llm.session()
    dropped.generate("abc", SHORT)
    next(dropped.stream("x"))
    del dropped
    gc.collect()
    assert llm.kv_used_bytes == 0


def test_a_session_may_outlive_its_llm() -> None:
    llm = fake_llm()
    session = llm.session()
    session.generate("abc", SHORT)
    llm.close()
    assert llm.kv_used_bytes == 0
    with pytest.raises(StateError, match="closed"):
        session.generate("x")
    session.close()
