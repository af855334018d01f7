"""Which files of a folder belong to a model: what is carried to a converted one, and what may be replaced with it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from kvist.convert.record import CONVERSION_FILE, RECORD_ASIDE
from kvist.convert.uptrain_checkpoint import FOLDER_LEAVING
from kvist.convert.uptrain_curve import CURVE_ASIDE, CURVE_FILE

WEIGHTS_ASIDE = ".trained.partial"
"""Where a training's weights are made."""

# What belongs to a model beside its weights: configurations, tokenizers, templates, licences. Copied as they are.
_CARRIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".md", ".tiktoken")
_CARRIED_NAMES = ("LICENSE", "LICENCE", "NOTICE")
_NOT_CARRIED = ("config.json", "prepared.json", "adapter_config.json", CONVERSION_FILE)
_INDEX_SUFFIX = ".index.json"  # of weights in one format or another, which are not copied

# What a conversion and a training write, what transformers' `save_pretrained` does, and what the Hub adds to it.
_KNOWN = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", CONVERSION_FILE, CURVE_FILE,
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*vocab.json",
    "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "audio_tokenizer_config.json", "modelcard.json", "README.md", "LICENSE*", "LICENCE*", "NOTICE*", ".gitattributes",
)  # fmt: skip
# The same of folders, and of both what is left where one of them was killed.
_KNOWN_FOLDERS = ("additional_chat_templates", WEIGHTS_ASIDE, FOLDER_LEAVING)
_LEFT_OVER = (RECORD_ASIDE, CURVE_ASIDE)


def carried_files(source: Path) -> list[Path]:
    """The files of a model's folder that a conversion copies."""
    return [file for file in sorted(source.iterdir()) if _is_carried(file)]


def foreign_file(folder: Path, known: frozenset[str]) -> Path | None:
    """The first file or folder that is no part of a model; None where all is.

    Args:
        folder: a model's.
        known: further names that belong to it.
    """
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            belongs = child.name in _KNOWN_FOLDERS
        else:
            belongs = child.name in known or child.name in _LEFT_OVER or any(fnmatchcase(child.name, p) for p in _KNOWN)
        if not belongs:
            return child
    return None


def _is_carried(file: Path) -> bool:
    name = file.name
    if name in _NOT_CARRIED or name.startswith(".") or name.endswith(_INDEX_SUFFIX):
        return False
    return (file.suffix in _CARRIED_SUFFIXES or name.startswith(_CARRIED_NAMES)) and file.is_file()
