"""Small helpers for files that someone else wrote: what kind they are, and JSON that may be damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvist.errors import ModelFileError, UnsupportedModelError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# What to do about a file that contradicts itself: how messages end.
FETCH_AGAIN = "fetch it again"
DAMAGED = f"the file is damaged, {FETCH_AGAIN}"

_STARTS = (
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"),
    (b"PK\x03\x04", "a ZIP archive (a wheel, or a PyTorch checkpoint)"),
    (b"\x80", "a Python pickle, which can run code when it is read"),
    (b"lmgg", "a GGML file from before GGUF: convert it again with a current llama.cpp"),
    (b"tjgg", "a GGML file from before GGUF: convert it again with a current llama.cpp"),
    (b"fmgg", "a GGML file from before GGUF: convert it again with a current llama.cpp"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
)


# Far more than any configuration, index or tokenizer takes.
_MOST_JSON_BYTES = 256 << 20


def describe_start(path: Path) -> str:
    """What a file looks like from its first bytes, as the end of a sentence: `it is ...`."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        return "it is empty"
    for magic, kind in _STARTS:
        if start.startswith(magic):
            return f"it is {kind}"
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page: the download gave a page instead of the file"
    if start[8:9] == b"{" and start[5:8] == b"\0\0\0":
        return "it is a safetensors file"
    if text.startswith((b"{", b"[")):
        return "it is a JSON file"
    return f"it starts with the bytes {start[:4].hex(' ')}"


def require_gguf(path: Path) -> None:
    """Refuse a file of another kind by its first bytes, whatever its size."""
    try:
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return
        raise ModelFileError(f"{path} is not a GGUF file: {describe_start(path)}")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; `ModelFileError` if it is missing, unreadable or holds anything else."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_JSON_BYTES + 1)
        if len(text) > _MOST_JSON_BYTES:
            raise ModelFileError(f"{path} is larger than any file of its kind: {FETCH_AGAIN}")
        parsed = json.loads(text)
    except FileNotFoundError:
        raise ModelFileError(f"{path.name} is missing in {path.parent}: {FETCH_AGAIN}") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ModelFileError(f"{path} is not valid JSON (it is nested too deeply): {FETCH_AGAIN}") from error
    except ValueError as error:
        raise ModelFileError(f"{path} is not valid JSON ({describe_start(path)}): {FETCH_AGAIN}") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{path} holds no JSON object: {FETCH_AGAIN}")
    return parsed


@contextmanager
def errors_about(path: Path) -> Iterator[None]:
    """Begin the message of what is refused inside with the file that it is about."""
    try:
        yield
    except (ModelFileError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from error


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """The other direction, for a person to read too."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def pickle_refusal(path: Path) -> ModelFileError:
    """The refusal of a pickled checkpoint, with the reason and the way out."""
    return ModelFileError(
        f"{path} is a pickled PyTorch checkpoint, which can run any code when it is read, so it is never opened: "
        "use the model's .safetensors files, or convert them where you trust them with transformers' save_pretrained"
    )
