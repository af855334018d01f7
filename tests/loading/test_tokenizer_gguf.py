from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from kvist.errors import KvistError, ModelFileError, UnsupportedModelError
from kvist.loading.gguf_tokenizer import write_tokenizer
from kvist.loading.gguf_tokenizer_merges import listed_merges, merge_entries, merges_from_scores
from kvist.loading.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary: tokens 0 to 7, the last two control."""
    tokens = ["a", "b", "\u0120", "ab", "abab", "<think>", "<s>", "</s>"]
    return _metadata(
        {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_type": np.array([1, 1, 1, 1, 1, 4, 3, 3], np.int32),
            "merges": ["a b", "ab ab"],
            "bos_token_id": 6,
            "eos_token_id": 7,
        },
        changes,
    )


def sentencepiece(**changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary with all bytes, user-defined newlines and two ways to `abc`."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "\n\n", "▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "  "]
    scores = np.zeros(len(tokens), np.float32)
    for token, score in {"ab": -1, "bc": -2, "abc": -3, "▁a": -4}.items():
        scores[tokens.index(token)] = score
    return _metadata(
        {
            "model": "llama",
            "tokens": tokens,
            "token_type": np.array([2, 3, 3, *[6] * 256, 4, *[1] * 8, 4], np.int32),
            "scores": scores,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        },
        changes,
    )


def _metadata(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    merged = {key: value for key, value in (base | changes).items() if value is not None}
    return {f"tokenizer.ggml.{key}" if key != "chat_template" else f"tokenizer.{key}": merged[key] for key in merged}


def convert(metadata: dict[str, object], directory: Path) -> Tokenizer:
    write_tokenizer(metadata, directory)
    return Tokenizer.from_directory(directory)


def pieces(tokenizer: Tokenizer, metadata: dict[str, object], text: str) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return [tokens[index] for index in tokenizer.encode(text, add_special_tokens=False)]


def test_special_and_user_defined_tokens_are_found_in_text_and_only_the_former_is_skipped(tmp_path: Path) -> None:
    metadata = byte_level()
    tokenizer = convert(metadata, tmp_path)
    assert pieces(tokenizer, metadata, "ab<think>abab</s>") == ["ab", "<think>", "abab", "</s>"]
    ids = tokenizer.encode("ab<think>abab</s>")
    assert tokenizer.decode(ids) == "ab<think>abab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<think>abab</s>"


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    assert convert(byte_level(), tmp_path).encode("ab") == [3]
    assert convert(byte_level(pre="llama-bpe"), tmp_path).encode("ab") == [6, 3]
    assert convert(byte_level(pre="llama-bpe", add_bos_token=False), tmp_path).encode("ab") == [3]
    both = convert(byte_level(add_bos_token=True, add_eos_token=np.bool_(True)), tmp_path)
    assert both.encode("ab") == [6, 3, 7]
    assert both.encode("") == [6, 7]
    assert both.encode("ab", add_special_tokens=False) == [3]
    assert (both.bos_token_id, both.eos_token_id, both.vocab_size) == (6, 7, 8)


def test_a_plain_end_token_is_mended_but_a_plain_padding_token_stays_text(tmp_path: Path) -> None:
    metadata = byte_level(token_type=np.array([1, 1, 1, 1, 1, 4, 1, 1], np.int32), padding_token_id=0)
    tokenizer = convert(metadata, tmp_path)
    assert tokenizer.decode(tokenizer.encode("a</s>")) == "a"
    assert "pad_token" not in json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    metadata = sentencepiece(add_space_prefix=False)
    tokenizer = convert(metadata, tmp_path)
    assert pieces(tokenizer, metadata, "abc") == ["abc"]
    assert pieces(tokenizer, metadata, "bc") == ["bc"]
    assert pieces(tokenizer, metadata, "a\n\nb  c a") == ["a", "\n\n", "b", "  ", "c", "▁a"]
    assert pieces(tokenizer, metadata, "é<0x0A>")[:2] == ["<0xC3>", "<0xA9>"]
    assert "<0x0A>" not in pieces(tokenizer, metadata, "é<0x0A>")
    assert tokenizer.decode(tokenizer.encode("é<0x0A>\n\n")) == "é<0x0A>\n\n"
    assert tokenizer.encode("a") == [1, 261]


def test_sentencepiece_puts_a_space_before_each_stretch_of_text(tmp_path: Path) -> None:
    metadata = sentencepiece()
    tokenizer = convert(metadata, tmp_path)
    assert pieces(tokenizer, metadata, "a</s>a") == ["▁a", "</s>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert tokenizer.encode("") == [1]


def test_no_merge_makes_a_byte_or_special_token(tmp_path: Path) -> None:
    base = sentencepiece()
    tokens, types = base["tokenizer.ggml.tokens"], base["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    extra = ["<0x0A", ">", "</s", "<s", "\n", "b\n"]
    metadata = sentencepiece(
        tokens=[*tokens, *extra],
        token_type=np.append(types, np.ones(len(extra), np.int32)),
        scores=np.zeros(len(tokens) + len(extra), np.float32),
    )
    write_tokenizer(metadata, tmp_path)
    merges = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    assert "b \n" in merges
    assert not {"<0x0A >", "</s >", "<s >", "\n \n", "▁ ▁"} & set(merges)


def merged_slowly(text: str, rank: dict[str, int]) -> list[str]:
    """SentencePiece's BPE as it is defined: the best-ranked neighbours first, the leftmost of equals."""
    parts = list(text)
    while candidates := [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        _, at = min(candidates)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_merges_from_scores_tokenize_as_merging_by_score_does() -> None:
    rng = random.Random(0)
    for _ in range(150):
        alphabet = rng.choice(["ab", "abc"])
        words = {"".join(rng.choices(alphabet, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 60))}
        tokens = [*alphabet, *sorted(words)]
        scores = np.array(rng.sample(range(1000), len(tokens)), np.float32)
        merges = merges_from_scores(tokens, scores, [len(token) > 1 for token in tokens])
        assert len({left + right for left, right in merges}) == len(merges)
        model = tokenizers.models.BPE({token: index for index, token in enumerate(tokens)}, merges)
        rank = {token: -int(score) for token, score in zip(tokens, scores, strict=True) if len(token) > 1}
        for _ in range(10):
            text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
            assert tokenizers.Tokenizer(model).encode(text).tokens == merged_slowly(text, rank), (tokens, scores, text)


def test_merges_are_written_as_strings_unless_that_is_ambiguous() -> None:
    assert merge_entries([("a", "b"), ("#", "c")]) == ["a b", "# c"]
    assert merge_entries([("a", " b")]) == [("a", " b")]
    assert merge_entries([("#version", "b")]) == [("#version", "b")]


def test_a_merge_listed_twice_keeps_its_first_rank() -> None:
    assert listed_merges(["a b", "b a", "a b"], {"a", "b", "ab", "ba"}) == [("a", "b"), ("b", "a")]


BROKEN = {
    "no tokenizer": (byte_level(model=None), ModelFileError, "holds no tokenizer"),
    "another kind": (byte_level(model="bert"), UnsupportedModelError, "'bert': known: gpt2, llama"),
    "a kind that is no text": (byte_level(model=3), ModelFileError, "type int, not str"),
    "no rule": (byte_level(pre=None), UnsupportedModelError, "does not name its word-splitting rule"),
    "unknown rule": (byte_level(pre="qwen-2"), UnsupportedModelError, "did you mean 'qwen2'"),
    "no tokens": (byte_level(tokens=None), ModelFileError, "has no tokenizer.ggml.tokens"),
    "empty tokens": (byte_level(tokens=[]), ModelFileError, "has no tokens"),
    "tokens of bytes": (byte_level(tokens=[b"a"] * 8), ModelFileError, "not a list of strings"),
    "no merges": (byte_level(merges=None), ModelFileError, "has no tokenizer.ggml.merges"),
    "half a merge": (byte_level(merges=["a "]), ModelFileError, "is not two tokens"),
    "no merge": (byte_level(merges=["ab"]), ModelFileError, "is not two tokens"),
    "an empty merge": (byte_level(merges=[""]), ModelFileError, "is not two tokens"),
    "merge of no token": (byte_level(merges=["a x"]), ModelFileError, "needs the token 'x'"),
    "merge into no token": (byte_level(merges=["b a"]), ModelFileError, "needs the token 'ba'"),
    "too few types": (byte_level(token_type=np.ones(7, np.int32)), ModelFileError, "8 tokens, but 7 entries"),
    "types that are no numbers": (byte_level(token_type=["1"] * 8), ModelFileError, "not a list of numbers"),
    "types that are fractions": (
        byte_level(token_type=np.ones(8, np.float32)),
        ModelFileError,
        "not a list of numbers",
    ),
    "bos beyond": (byte_level(bos_token_id=8), ModelFileError, "bos token is 8, beyond its 8 tokens"),
    "negative eos": (byte_level(eos_token_id=-1), ModelFileError, "eos token is -1"),
    "bos that is a flag": (byte_level(bos_token_id=True), ModelFileError, "type bool, not int"),
    "flag that is a number": (byte_level(add_bos_token=1), ModelFileError, "type int, not bool"),
    "bos that is not named": (
        byte_level(bos_token_id=None, add_bos_token=True),
        ModelFileError,
        "adds a BOS token, but the file does not say which",
    ),
    "twice the same": (
        byte_level(tokens=["a", "b", "\u0120", "ab", "ab", "<think>", "<s>", "</s>"]),
        ModelFileError,
        "tokens 3 and 4 are both 'ab'",
    ),
    "half a surrogate": (
        byte_level(tokens=["a", "b", "\ud800", "ab", "abab", "<think>", "<s>", "</s>"]),
        ModelFileError,
        "not valid Unicode",
    ),
    "a template that is no text": (byte_level(chat_template=["x"]), ModelFileError, "chat_template is of type list"),
    "no scores": (sentencepiece(scores=None), ModelFileError, "no tokenizer.ggml.scores"),
    "no types": (sentencepiece(token_type=None), ModelFileError, "no tokenizer.ggml.token_type"),
    "scores that are no numbers": (
        sentencepiece(scores=np.full(269, np.nan, np.float32)),
        ModelFileError,
        "scores are not all numbers",
    ),
    "too many scores": (sentencepiece(scores=np.zeros(300, np.float32)), ModelFileError, "269 tokens, but 300"),
    "a token as long as a page": (
        sentencepiece(
            tokens=["<unk>", "<s>", "</s>", *BYTES, "\n\n", *"▁abcdefg", "x" * 600],
            token_type=np.array([2, 3, 3, *[6] * 256, 4, *[1] * 9], np.int32),
        ),
        ModelFileError,
        "600 characters long",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_metadata_is_refused_in_one_line_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    metadata, error, message = BROKEN[case]
    with pytest.raises(KvistError) as raised:
        write_tokenizer(metadata, tmp_path / "out")
    assert type(raised.value) is error
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes", [{"merges": ["x" * 9999]}, {"merges": [f"{'x' * 9999} b"]}, {"tokens": ["a", "x" * 9999, "x" * 9999]}]
)
def test_values_of_the_file_are_shown_short(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'xxx.*\.\.\..*the file is damaged, fetch it again") as raised:
        convert(byte_level(**changes), tmp_path)
    assert len(str(raised.value)) < 300
