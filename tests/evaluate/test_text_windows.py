"""A text becomes windows of tokens, or a reason why not and what would do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvist.config import ModelConfig
from kvist.errors import ContextFullError, OptionError, PromptError
from kvist.evaluate.eval_config import EvalConfig
from kvist.evaluate.text_windows import EvaluationText, holds_part_of, text_windows
from kvist.kv_format import LayerFormats

BOS = 1
INT8 = LayerFormats.parse("int8")


class CharacterTokenizer:
    """A token for each character; `<image>`, written out, is one that text models do not have."""

    def __init__(self, bos_token_id: int | None = None, *, puts_it_first: bool = True) -> None:
        self.bos_token_id = bos_token_id
        self._first = [bos_token_id] if bos_token_id is not None and puts_it_first else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        characters = map(ord, text.replace("<image>", chr(9999)))
        return (self._first if add_special_tokens else []) + list(characters)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("<image>" if token == 9999 else chr(token) for token in ids)


MODEL = ModelConfig(
    model_type="llama", vocab_size=999, embed_dim=8, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8,
    max_context=32, rms_norm_eps=1e-6, tie_embeddings=True, windows=(None,),
)  # fmt: skip


def windows(text: str, tokenizer: CharacterTokenizer | None = None, **numbers: int) -> list[list[int]]:
    return text_windows(tokenizer or CharacterTokenizer(), MODEL, text, EvalConfig((INT8,), **numbers))  # type: ignore[arg-type]


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    return path


# --- windows ----------------------------------------------------------------------------------------------------------


def test_windows_follow_one_another_from_the_beginning():
    assert windows("abcdefgh", window=3, windows=2) == [[*b"abc"], [*b"def"]]


@pytest.mark.parametrize("text", ["abcdef", "abcdefg"])
def test_a_bos_token_begins_each_window_and_takes_one_place(text):
    found = windows(text, CharacterTokenizer(BOS), window=4, windows=2)
    assert found == [[BOS, *b"abc"], [BOS, *b"def"]]


def test_a_bos_token_that_the_tokenizer_puts_nowhere_is_left_out():
    assert windows("abcd", CharacterTokenizer(BOS, puts_it_first=False), window=2, windows=2) == [[*b"ab"], [*b"cd"]]


@pytest.mark.parametrize(
    ("tokens", "bos", "window", "number", "advice"),
    [
        (20, None, 9, 3, "20 tokens, too few for 3 windows of 9: take 2 windows of them, a window of 6 or give"),
        (20, BOS, 9, 3, "20 tokens, too few for 3 windows of 9: take 2 windows of them, a window of 7 or give"),
        (8, None, 9, 1, "8 tokens, too few for 1 window of 9: take a window of 8 tokens at most or give a longer"),
        (1, None, 9, 1, "1 tokens, too few for 1 window of 9: give a longer text"),
    ],
)
def test_a_text_that_is_too_short_says_what_would_fit(tokens, bos, window, number, advice):
    tokenizer = CharacterTokenizer(bos)
    with pytest.raises(PromptError) as refused:
        windows("x" * tokens, tokenizer, window=window, windows=number)
    assert advice in str(refused.value)


def test_the_advice_of_a_text_that_is_too_short_holds():
    assert len(windows("x" * 20, CharacterTokenizer(BOS), window=9, windows=2)) == 2
    assert len(windows("x" * 20, CharacterTokenizer(BOS), window=7, windows=3)) == 3
    with pytest.raises(PromptError):
        windows("x" * 20, CharacterTokenizer(BOS), window=8, windows=3)


def test_a_window_is_at_most_the_context():
    assert len(windows("x" * 32, window=32, windows=1)[0]) == 32
    with pytest.raises(ContextFullError, match="context of 32"):
        windows("x" * 33, window=33, windows=1)


def test_a_token_that_the_model_does_not_have_is_named():
    with pytest.raises(PromptError, match="'<image>'"):
        windows("ab<image>", window=3, windows=1)
    assert windows("ab<image>", window=2, windows=1) == [[*b"ab"]]


def test_a_passage_of_another_text_is_found_wherever_it_stands():
    other = list(range(1000))
    assert holds_part_of([[5] * 90, [7, *other[:32]]], other)
    assert holds_part_of([[*other[77:170]]], other)
    assert not holds_part_of([[*other[:31], *other[900:931]]], other)
    assert not holds_part_of([[7] * 100], other)
    assert not holds_part_of([[7] * 100], [7] * 31)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"window": 1}, "window is 1"),
        ({"windows": 0}, "windows is 0"),
        ({"every": 0}, "every is 0"),
        ({"weights_format": "bf17"}, "did you mean 'bf16'"),
        ({"formats": ()}, "no kv_format"),
        ({"formats": (INT8, LayerFormats.parse("k=int8,v=int8"))}, "int8 is there twice"),
        ({"formats": (INT8, LayerFormats.parse("int8/0:int8"))}, "int8 is there twice"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(numbers, message):
    with pytest.raises(OptionError, match=message):
        EvalConfig(**{"formats": (INT8,), **numbers})


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_text_is_read_as_it_is_and_known_by_its_bytes(tmp_path):
    data = "Öl\r\nund Brot\n".encode()
    text = EvaluationText.read(written(tmp_path, data))
    assert (text.name, text.text) == ("text.txt", "Öl\r\nund Brot\n")
    assert text.sha256 == hashlib.sha256(data).hexdigest()


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    assert EvaluationText.read(written(tmp_path, b"\xef\xbb\xbfone")).text == "one"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xff\xfe1\x002\x00", "not a text in UTF-8"),
        (b"GGUF\x03\0\0\0", "zero bytes"),
        ("Käse".encode("latin-1"), "iconv"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, data, message):
    with pytest.raises(PromptError, match=message) as refused:
        EvaluationText.read(written(tmp_path, data))
    assert "text.txt" in str(refused.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(PromptError, match="No such file"):
        EvaluationText.read(tmp_path / "nowhere.txt")
    with pytest.raises(PromptError, match="directory"):
        EvaluationText.read(tmp_path)


def test_a_text_without_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kvist.evaluate.text_windows._MOST_BYTES", 1 << 20)
    with pytest.raises(PromptError, match="the text /dev/zero is larger than 1 MiB: give a part of it"):
        EvaluationText.read("/dev/zero")
