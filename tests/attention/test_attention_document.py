"""docs/attention.md is run: each block of code prints what stands under it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "attention.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", flags=re.MULTILINE | re.DOTALL)


def test_the_code_of_the_document_prints_what_it_says() -> None:
    blocks = BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert sum(bool(expected) for _, expected in blocks) >= 9
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        for code, expected in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(DOCUMENT), "exec"), names)
            assert printed.getvalue() == expected
