"""Prompts of any length from a real text."""

from __future__ import annotations

from pathlib import Path

import kvist.loading
from kvist.loading.tokenizer import Tokenizer

SHIPPED_TEXT = Path(kvist.loading.__file__).with_name("calibration_text.txt")
"""A text that comes with Kvist: the beginning of Shakespeare's Coriolanus."""

# Far enough apart that no two prompts begin alike.
_STRIDE_TOKENS = 97


class Prompts:
    """The tokens of a text, over and over.

    Args:
        tokenizer: the model's. Where it puts a BOS token before a text, every prompt begins with it.
        text: not empty.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._ids = tokenizer.encode(text, add_special_tokens=False)
        bos = tokenizer.bos_token_id
        begins_with_bos = bos is not None and tokenizer.encode(text)[:1] == [bos] != self._ids[:1]
        self._lead = [bos] if begins_with_bos and bos is not None else []

    def of(self, num_tokens: int, index: int = 0) -> list[int]:
        """A prompt of so many tokens. Those of different `index` begin at different places of the text."""
        wanted, first = num_tokens - len(self._lead), index * _STRIDE_TOKENS % len(self._ids)
        ids = self._ids[first:] + self._ids[:first]
        return (self._lead + ids * (1 + max(0, wanted) // len(ids)))[:num_tokens]
