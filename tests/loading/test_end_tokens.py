"""The tokens that end a text are found wherever a model says them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvist.errors import ModelFileError
from kvist.loading.end_tokens import END_TOKENS, end_token_ids, gguf_generation_config
from kvist.loading.gguf_tokenizer_vocabulary import TokenType, read_vocabulary


def ends(tokens: list[str], **ids: int) -> object:
    metadata: dict[str, object] = {"tokenizer.ggml.tokens": tokens}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    return gguf_generation_config(metadata)["eos_token_id"]


def test_a_gguf_files_end_token_is_joined_by_those_known_by_name() -> None:
    assert ends(["<pad>", "<eos>", "<bos>", "<end_of_turn>"], eos=1) == [1, 3]
    assert ends(["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], eos=2) == [1, 2, 3]
    assert ends(["a", "b", "c"], eos=0, eot=1, eom=2) == [0, 1, 2]


def test_the_end_of_a_document_counts_unless_it_is_the_unknown_token() -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert ends(tokens, eos=2, bos=0, padding=0) == [0, 2]
    assert ends(tokens, eos=2, bos=1, unknown=0) == [2]


def test_an_end_token_that_is_listed_as_plain_is_mended_and_every_name_is_known_in_one_place() -> None:
    metadata: dict[str, object] = {"tokenizer.ggml.tokens": ["a", *sorted(END_TOKENS)]}
    types = read_vocabulary(metadata).types
    assert types[0] is TokenType.NORMAL
    assert set(types[1:]) == {TokenType.CONTROL}
    # Those that end a text only where the file says so are not taken for ends by their name.
    found = gguf_generation_config(metadata)["eos_token_id"]
    assert isinstance(found, list)
    assert END_TOKENS - {["a", *sorted(END_TOKENS)][i] for i in found} == {
        "<eos>",
        "</s>",
        "<\uff5cend▁of▁sentence\uff5c>",
    }


def test_an_end_token_beyond_the_vocabulary_is_left_out() -> None:
    assert ends(["a", "b"], eos=7, eot=1) == [1]


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value))


def test_a_directorys_generation_config_comes_first_then_its_config_then_its_tokenizer(tmp_path: Path) -> None:
    assert end_token_ids(tmp_path, {}, None) == frozenset()
    assert end_token_ids(tmp_path, {}, 9) == {9}
    assert end_token_ids(tmp_path, {"eos_token_id": 4}, 9) == {4}
    assert end_token_ids(tmp_path, {"eos_token_id": 4, "text_config": {"eos_token_id": [5, 6]}}, 9) == {5, 6}
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    assert end_token_ids(tmp_path, {"eos_token_id": 4}, 9) == {1, 2}
    write(tmp_path, "generation_config.json", {"temperature": 1})
    assert end_token_ids(tmp_path, {"eos_token_id": 4}, 9) == {4}


@pytest.mark.parametrize("value", ["</s>", [1, "2"], {"a": 1}, 1.5])
def test_an_end_token_that_is_no_id_is_refused(value: Any, tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ModelFileError, match="it must be a token id or a list"):
        end_token_ids(tmp_path, {}, None)
