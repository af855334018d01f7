"""Token ids against llama.cpp's for the same GGUF files (`data/make_tokenizer_ids.py`)."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from kvist.loading.gguf_file import GgufFile
from kvist.loading.gguf_tokenizer import write_tokenizer
from kvist.loading.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"


def read(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


TEXTS: list[str] = read("tokenizer_texts.json")
RULES = read("split_rules.json")
PIECES = read("sentencepiece_vocabulary.json")
FEW = [TEXTS[index] for index in RULES["texts"]]


@pytest.fixture(scope="module")
def smollm2_directory(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(GgufFile(smollm2_gguf).metadata, directory)
    return directory


@pytest.fixture(scope="module")
def gemma3_directory(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma3")
    write_tokenizer(GgufFile(gemma3_gguf).metadata, directory)
    return directory


@cache
def loaded(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def synthetic(rule: str, directory: Path) -> Tokenizer:
    """The byte-level vocabulary of `split_rules.json` under a word-splitting rule."""
    tokens = [*RULES["alphabet"], *(merge.replace(" ", "") for merge in RULES["merges"]), "\u0120jumps", "<|end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 1) + [3], np.int32),
        "tokenizer.ggml.merges": RULES["merges"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    write_tokenizer(metadata, directory)
    return Tokenizer.from_directory(directory)


def assert_same_ids(tokenizer: Tokenizer, texts: list[str], expected: list[list[int]], added: list[int]) -> None:
    assert len(texts) == len(expected)
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == added + ids, text


def test_smollm2_has_the_ids_of_llama_cpp(smollm2_directory: Path) -> None:
    expected = read("smollm2_ids.json")
    assert expected["added"] == []
    assert_same_ids(loaded(smollm2_directory), TEXTS, expected["ids"], expected["added"])


def test_gemma3_has_the_ids_of_llama_cpp(gemma3_directory: Path) -> None:
    expected = read("gemma3_ids.json")
    assert expected["added"] == [2]
    assert_same_ids(loaded(gemma3_directory), TEXTS, expected["ids"], expected["added"])


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_sentencepiece_vocabulary_has_the_ids_of_llama_cpp(prefixed: bool, tmp_path: Path) -> None:
    merged, characters = PIECES["merged tokens"], PIECES["characters"]
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    num_scored = len(merged) + len(characters)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *byte_tokens, "\n\n", *merged, *characters],
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, 4, *[1] * num_scored], np.int32),
        "tokenizer.ggml.scores": np.concatenate([np.zeros(260), -np.arange(num_scored)]).astype(np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }
    write_tokenizer(metadata, tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert_same_ids(tokenizer, FEW, PIECES["ids with space prefix" if prefixed else "ids"], [1])
    assert tokenizer.decode(tokenizer.encode("Hello, 世界!")) == "Hello, 世界!"


@pytest.mark.parametrize("rule", sorted(RULES["ids"]))
def test_each_word_splitting_rule_gives_the_ids_of_llama_cpp(rule: str, tmp_path: Path) -> None:
    texts, expected = FEW, RULES["ids"][rule]
    if rule == "qwen2":
        # llama.cpp leaves out the normalisation to form C that Qwen's own tokenizer begins with.
        kept = [index for index, text in enumerate(FEW) if unicodedata.is_normalized("NFC", text)]
        assert len(kept) == len(FEW) - 1
        texts, expected = [FEW[index] for index in kept], [expected[index] for index in kept]
    assert_same_ids(synthetic(rule, tmp_path), texts, expected, RULES["added"][rule])


def test_qwen2_composes_characters_as_the_original_does(tmp_path: Path) -> None:
    tokenizer = synthetic("qwen2", tmp_path)
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


def test_tekken_keeps_combining_marks_in_words_as_the_original_does(tmp_path: Path) -> None:
    # llama.cpp's pattern for this rule has no marks, so it cuts words of Thai or Hindi; hence none in the texts above.
    synthetic("tekken", tmp_path)
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [span for _, span in written.pre_tokenizer.pre_tokenize_str("हिन्दी ไทย")] == [(0, 6), (6, 10)]


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_transformers_reads_what_was_written(model: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoTokenizer

    directory: Path = request.getfixturevalue(f"{model}_directory")
    theirs, ours = AutoTokenizer.from_pretrained(directory), loaded(directory)
    assert len(theirs) == ours.vocab_size
    assert theirs.bos_token_id == ours.bos_token_id
    assert theirs.eos_token_id == ours.eos_token_id
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids, text
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False), text
    if model == "smollm2":
        chat = [{"role": "user", "content": "Hi"}]
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == rendered
        assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert not ours.has_chat_template


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_appending_ids_changes_only_what_ends_in_replacement_characters(
    model: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = loaded(request.getfixturevalue(f"{model}_directory"))
    for text in (TEXTS[45], TEXTS[92], "𝔘𝔫𐍈 中文 🫠"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown = ""
        for count in range(1, len(ids) + 1):
            decoded = tokenizer.decode(ids[:count])
            if not decoded.endswith("\ufffd"):
                assert decoded.startswith(shown)
                shown = decoded
        assert shown == text
