"""The tokenizer that a GGUF file describes, written as `tokenizer.json` and `tokenizer_config.json`.

A GGUF holds a vocabulary and names or flags for the rest, by llama.cpp's conventions. The two files say the same in
the format of the `tokenizers` library, which runs it from then on; transformers reads them too.

They are built here rather than by transformers' own converter because that one leaves out some of what decides the ids:
it knows few word-splitting rules and falls back to GPT-2's in silence (SmolLM2's digits, for one), and lists merges
that SentencePiece would never make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvist.errors import ModelFileError, UnsupportedModelError, shown
from kvist.loading.gguf_tokenizer_merges import listed_merges, merge_entries, merges_from_scores
from kvist.loading.gguf_tokenizer_splits import word_split
from kvist.loading.gguf_tokenizer_vocabulary import (
    MATCHED_WHOLE,
    PREFIX,
    TokenType,
    Vocabulary,
    read_numbers,
    read_strings,
    read_value,
    read_vocabulary,
)
from kvist.loading.untrusted_file import DAMAGED


def write_tokenizer(metadata: Mapping[str, object], directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`, which is created if need be.

    Args:
        metadata: the key-value pairs of the GGUF: arrays of strings as lists, arrays of numbers as numpy arrays.
        directory: files of these names in it are replaced. Nothing is written if the metadata is refused.

    Raises:
        ModelFileError: the metadata lacks something or contradicts itself.
        UnsupportedModelError: a kind of tokenizer, or a word-splitting rule, that is not known here.
    """
    kind = read_value(metadata, PREFIX + "model", str)
    if kind is None:
        raise ModelFileError("the GGUF file holds no tokenizer (tokenizer.ggml.model): take a file that does")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"the GGUF file has a tokenizer of kind {shown(kind)}: known: gpt2, llama")
    vocabulary = read_vocabulary(metadata)
    if kind == "gpt2":
        pipeline, adds_bos = _byte_level_bpe(metadata, vocabulary)
    else:
        pipeline, adds_bos = _sentencepiece_bpe(metadata, vocabulary)
    config = _tokenizer_config(metadata, vocabulary, adds_bos)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary, config),
        **pipeline,
    }
    # Compact, since it is parsed at every start; encoded before the first byte is written.
    files = {
        "tokenizer.json": _encoded(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))),
        "tokenizer_config.json": _encoded(json.dumps(config, ensure_ascii=False, indent=2)),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)


def _byte_level_bpe(metadata: Mapping[str, object], vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """Parts of a `tokenizer.json` for BPE over bytes (GPT-2), and whether it adds a BOS unless told otherwise."""
    name = read_value(metadata, PREFIX + "pre", str)
    if name is None:
        raise UnsupportedModelError(
            "the GGUF file does not name its word-splitting rule (tokenizer.ggml.pre), so its ids would be a guess: "
            "take a file converted by llama.cpp of May 2024 or later"
        )
    split = word_split(name)
    merges = listed_merges(read_strings(metadata, "merges"), vocabulary.ids)
    pipeline = {
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": split.pre_tokenizer(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merge_entries(merges), ignore_merges=split.ignore_merges),
    }
    return pipeline, split.adds_bos


def _sentencepiece_bpe(metadata: Mapping[str, object], vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """The same for SentencePiece's BPE over characters, with bytes for what the vocabulary lacks."""
    scores = read_numbers(metadata, "scores", len(vocabulary.tokens), "f")
    if scores is None or PREFIX + "token_type" not in metadata:
        lacking = "scores" if scores is None else "token_type"
        raise ModelFileError(f"the GGUF file has no tokenizer.ggml.{lacking}, which its tokenizer needs: {DAMAGED}")
    if np.isnan(scores).any():
        raise ModelFileError(f"the GGUF file's token scores are not all numbers: {DAMAGED}")
    prefixes_space = read_value(metadata, PREFIX + "add_space_prefix", bool)

    # No text has a space left when merges run, so a token with one is matched whole or not at all.
    mergeable = [
        kind not in MATCHED_WHOLE and kind is not TokenType.BYTE and " " not in token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    unknown = vocabulary.special_ids.get("unknown")
    model = _bpe(
        vocabulary,
        merge_entries(merges_from_scores(vocabulary.tokens, scores, mergeable)),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in vocabulary.types,
    )
    escape: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = escape
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixes_space is None or prefixes_space:
        # Each stretch of text after a special token gets one, as in llama.cpp and the original Llama 2.
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, escape]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    pipeline = {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    return pipeline, True


def _bpe(vocabulary: Vocabulary, merges: object, **options: object) -> dict[str, Any]:
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary.ids, "merges": merges}


# --- special tokens ---------------------------------------------------------------------------------------------------


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    as_written = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        # Decoding leaves special tokens out; user-defined ones are text, such as Gemma's runs of newlines.
        {"id": index, "content": token, **as_written, "special": kind is not TokenType.USER_DEFINED}
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in MATCHED_WHOLE
    ]


def _tokenizer_config(metadata: Mapping[str, object], vocabulary: Vocabulary, adds_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = vocabulary.special_ids.get(role)
        # transformers makes each token named here a special one, which decoding leaves out.
        if index is not None and vocabulary.types[index] in MATCHED_WHOLE:
            config[f"{name}_token"] = vocabulary.tokens[index]
    for role, default in (("bos", adds_bos), ("eos", False)):
        adds = read_value(metadata, f"{PREFIX}add_{role}_token", bool)
        config[f"add_{role}_token"] = default if adds is None else adds
        if config[f"add_{role}_token"] and f"{role}_token" not in config:
            raise ModelFileError(
                f"the GGUF file's tokenizer adds a {role.upper()} token, but the file does not say which "
                f"(tokenizer.ggml.{role}_token_id): {DAMAGED}"
            )
    template = read_value(metadata, "tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    return config


def _post_processor(vocabulary: Vocabulary, config: Mapping[str, Any]) -> dict[str, Any] | None:
    bos, eos = (config[f"{role}_token"] if config[f"add_{role}_token"] else None for role in ("bos", "eos"))
    added = [token for token in (bos, eos) if token is not None]
    if not added:
        return None

    def framed(sequence: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": token, "type_id": type_id}}] if token is not None else [] for token in (bos, eos)
        )
        return [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": {token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]} for token in added},
    }


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"the GGUF file's tokens are not valid Unicode: {DAMAGED}") from error
