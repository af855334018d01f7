"""Which tokens end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvist.errors import ModelFileError, shown
from kvist.loading.untrusted_file import read_json

# Tokens that end a turn or a text in every model that has them; llama.cpp goes by the same names.
_END_OF_TURN = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>"))
_END_OF_DOCUMENT = "<|endoftext|>"

# All names that mean an end, those included that end a text only where the file says so.
END_TOKENS = _END_OF_TURN | {_END_OF_DOCUMENT, "<eos>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}


def gguf_generation_config(metadata: Mapping[str, object]) -> dict[str, object]:
    """The `generation_config.json` for a GGUF file: its begin token and all tokens that end a text.

    The file names one end token where its Hugging Face original lists several. `<|endoftext|>`, which ends a document,
    counts besides the end of a turn, as in Qwen's own list, but not where it is the file's unknown token, as in
    SmolLM2, whose own list leaves it out.
    """
    named = [_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    ends = {token_id for token_id in named if token_id is not None}
    unknown = _token_id(metadata, "unknown")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        names = _END_OF_TURN | ({_END_OF_DOCUMENT} if _text(tokens, unknown) != _END_OF_DOCUMENT else set())
        ends |= {token_id for token_id, text in enumerate(tokens) if text in names}
        ends = {token_id for token_id in ends if token_id < len(tokens)}
    config: dict[str, object] = {"eos_token_id": sorted(ends)}
    begin = _token_id(metadata, "bos")
    return config if begin is None else config | {"bos_token_id": begin}


def end_token_ids(directory: Path, config: Mapping[str, object], tokenizer_eos: int | None) -> frozenset[int]:
    """The end tokens of a model in Hugging Face format: of its generation_config.json, else of its config.json (its
    text part first), else of its tokenizer.
    """
    sources: list[tuple[str, object]] = []
    if (directory / "generation_config.json").is_file():
        sources.append(("generation_config.json", read_json(directory / "generation_config.json").get("eos_token_id")))
    text = config.get("text_config")
    for section in (text if isinstance(text, Mapping) else {}, config):
        sources.append(("config.json", section.get("eos_token_id")))
    for file, value in sources:
        ids = [value] if isinstance(value, int) else value
        if ids is None or ids == []:
            continue
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelFileError(f"{directory / file}: eos_token_id is {shown(value)}: it must be a token id or a list")
        return frozenset(ids)
    return frozenset(() if tokenizer_eos is None else (tokenizer_eos,))


def _token_id(metadata: Mapping[str, object], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(tokens: list[str], token_id: int | None) -> str | None:
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None
