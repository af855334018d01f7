"""What goes into messages: short, on one line, and with the nearest known name."""

from __future__ import annotations

import numpy as np

from kvist.errors import did_you_mean, shown


def test_values_are_shown_on_one_line_and_short() -> None:
    assert shown("blk.0.attn_q.weight") == "'blk.0.attn_q.weight'"
    assert shown("two\nlines \x1b[31m") == r"'two\nlines \x1b[31m'"
    assert shown(None) == "None"
    assert "\n" not in shown(np.arange(1000).reshape(10, 100))
    assert len(shown("x" * 1_000_000)) < 100


def test_the_nearest_name_is_suggested_and_all_are_listed() -> None:
    assert did_you_mean("BF61", ["bf16", "fp32"]) == "did you mean 'bf16'? known: bf16, fp32"
    assert did_you_mean("zzz", ["bf16", "fp32"]) == "known: bf16, fp32"
