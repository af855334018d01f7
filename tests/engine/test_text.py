from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvist.engine.text import Decode, Detokenizer, GeneratedText, StopStrings, text_after

SAMPLE = "Alice was beginning to get very tired, 爱丽丝 kvist på gren — 🌿👩‍👩‍👧 naïve Ω "


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
    )
    tokenizer.train_from_iterator([SAMPLE] * 3, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Words with their leading space, bytes for what no word covers; the space before the first word is dropped."""
    pieces = ["<unk>", "▁", "▁Hello", "▁a", "world", "b", ",", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = byte_level_bpe()
SENTENCEPIECE = sentencepiece_like()


def decoder(tokenizer: Tokenizer) -> Decode:
    def decode(token_ids: Sequence[int], /) -> str:
        return str(tokenizer.decode(list(token_ids)))

    return decode


def in_pieces(decode: Decode, prompt: Sequence[int], generated: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode, prompt)
    return [*(detokenizer.push(token_id) for token_id in generated), detokenizer.finish()]


def bytes_of(text: str) -> list[int]:
    return [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


any_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30)


@given(any_ids, any_ids)
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_byte_level_tokens_join_to_the_whole(prompt: list[int], generated: list[int]) -> None:
    decode = decoder(BYTE_LEVEL)
    before = decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}")
    assert before + "".join(in_pieces(decode, prompt, generated)) == decode(prompt + generated)


@given(st.text(max_size=30), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_pieces_of_text_never_show_half_a_character(text: str, split: int) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    prompt, generated = ids[:split], ids[split:]
    decode = decoder(BYTE_LEVEL)
    before = decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}")
    pieces = in_pieces(decode, prompt, generated)
    assert before + "".join(pieces) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


word_or_character = st.one_of(
    st.sampled_from(["▁", "▁Hello", "▁a", "world", "b", ",", "<end>"]).map(
        lambda piece: [SENTENCEPIECE.token_to_id(piece)]
    ),
    st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}").map(bytes_of),
)
sentence = st.lists(word_or_character, max_size=12).map(lambda pieces: [i for piece in pieces for i in piece])


@given(sentence, sentence)
@settings(max_examples=300, deadline=None)
def test_pieces_of_sentencepiece_tokens_join_to_the_whole(prompt: list[int], generated: list[int]) -> None:
    decode = decoder(SENTENCEPIECE)
    pieces = in_pieces(decode, prompt, generated)
    assert decode(prompt) + "".join(pieces) == decode(prompt + generated)
    assert text_after(decode, prompt, generated) == "".join(pieces)


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    hello, a, end = (SENTENCEPIECE.token_to_id(piece) for piece in ("▁Hello", "▁a", "<end>"))
    decode = decoder(SENTENCEPIECE)
    assert in_pieces(decode, [hello], [a, a]) == [" a", " a", ""]
    assert in_pieces(decode, [], [a, a]) == ["a", " a", ""]
    assert in_pieces(decode, [hello], [end, a]) == ["", " a", ""]
    assert in_pieces(decode, [hello] + [end] * 40, [a]) == [" a", ""]


def test_a_character_in_byte_pieces_comes_when_it_is_whole() -> None:
    assert in_pieces(decoder(SENTENCEPIECE), bytes_of("🌿" * 5), bytes_of("你a")) == ["", "", "你", "a", ""]


def test_bytes_that_make_no_character_come_as_replacements() -> None:
    broken = bytes_of("你")[:2]
    assert "".join(in_pieces(decoder(SENTENCEPIECE), bytes_of("a"), bytes_of("b"))) == "b"
    assert in_pieces(decoder(SENTENCEPIECE), [], broken)[-1] == "\N{REPLACEMENT CHARACTER}" * 2
    # The decoder would replace the first character too, which has been given out.
    assert (
        "".join(in_pieces(decoder(SENTENCEPIECE), [], bytes_of("好") + broken))
        == "好" + "\N{REPLACEMENT CHARACTER}" * 2
    )


def test_endless_rubbish_is_not_held_back() -> None:
    rubbish = SENTENCEPIECE.token_to_id("<0xFF>")
    pieces = in_pieces(decoder(SENTENCEPIECE), [], [rubbish] * 12)
    assert len("".join(pieces)) == 12
    assert len("".join(pieces[:8])) >= 6


# --- stop strings -----------------------------------------------------------------------------------------------------

letters = st.text("abc", max_size=25)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 25), max_size=25))
@settings(max_examples=500, deadline=None)
def test_text_ends_before_the_first_stop_string_however_it_is_split(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    first = min((text.find(one) for one in stop if one in text), default=None)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stops = StopStrings(stop)
    shown = ""
    for start, end in pairwise(bounds):
        shown += stops.push(text[start:end])
        assert (text if first is None else text[:first]).startswith(shown)
    shown += stops.finish()
    assert shown == (text if first is None else text[:first])
    assert stops.found == (first is not None)


def test_text_is_held_only_while_a_stop_string_may_have_begun() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert [stops.push(piece) for piece in ("on", "e E", "N", "d", "\n", "two", "EN", "D three")] == [
        "one"[:2], "e ", "", "ENd", "", "\ntwo", "", "",
    ]  # fmt: skip
    assert stops.found
    assert stops.push("more") == stops.finish() == ""


def test_the_match_that_begins_first_wins() -> None:
    stops = StopStrings(["bc", "abcd"])
    assert stops.push("xabc") == "x"
    assert not stops.found
    assert stops.push("d") == ""
    assert stops.found
    other = StopStrings(["bc", "abcd"])
    assert other.push("xabc") + other.push("e") == "xa"
    assert other.found


def test_generated_text_stops_within_a_token() -> None:
    ids = BYTE_LEVEL.encode("beginning").ids
    text = GeneratedText(decoder(BYTE_LEVEL), [], ["nni"])
    shown = "".join(text.push(token_id) for token_id in ids)
    assert (shown, text.stopped, text.finish()) == ("begi", True, "")


@pytest.mark.parametrize("stop", [[], ["xyz"]])
def test_finish_gives_out_what_was_held(stop: list[str]) -> None:
    text = GeneratedText(decoder(BYTE_LEVEL), [], stop)
    ids = BYTE_LEVEL.encode("a xy").ids
    assert "".join(text.push(token_id) for token_id in ids) + text.finish() == "a xy"
    assert not text.stopped
