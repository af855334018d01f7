"""What a user may say about the cache, and what it means."""

from __future__ import annotations

import pytest

from kvist import config
from kvist.config import STORAGE_FORMATS, KVFormat
from kvist.errors import OptionError


@pytest.mark.parametrize(
    ("text", "expected", "shortest"),
    [
        ("bf16", KVFormat("bf16", "bf16"), "bf16"),
        (" fp32 ", KVFormat("fp32", "fp32"), "fp32"),
        ("k=bf16,v=fp32", KVFormat("bf16", "fp32"), "k=bf16,v=fp32"),
        ("v=bf16, k=fp32", KVFormat("fp32", "bf16"), "k=fp32,v=bf16"),
        ("k = bf16 , v = bf16", KVFormat("bf16", "bf16"), "bf16"),
    ],
)
def test_a_kv_format_is_read_and_written(text: str, expected: KVFormat, shortest: str) -> None:
    kv_format = KVFormat.parse(text)
    assert kv_format == expected
    assert str(kv_format) == shortest
    assert KVFormat.parse(shortest) == kv_format


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf61", "unknown kv_format 'bf61': did you mean 'bf16'? known: "),
        ("", "unknown kv_format '': known: "),
        ("k=bf61,v=bf16", "unknown kv_format 'bf61': did you mean 'bf16'? known: "),
        ("k=,v=bf16", "unknown kv_format '': known: "),
        ("k=bf16", "kv_format 'k=bf16' gives no format for the values: add v=FORMAT"),
        ("v=bf16", "kv_format 'v=bf16' gives no format for the keys: add k=FORMAT"),
        ("k=bf16,k=fp32", "kv_format 'k=bf16,k=fp32' gives a format for the keys twice: keep one"),
        ("k=bf16,v=bf16,v=bf16", "kv_format 'k=bf16,v=bf16,v=bf16' gives a format for the values twice: keep one"),
        (
            "keys=bf16,v=bf16",
            "kv_format 'keys=bf16,v=bf16': 'keys=bf16' is neither k=FORMAT nor v=FORMAT; write it like ",
        ),
        ("k=bf16,bf16", "kv_format 'k=bf16,bf16': 'bf16' is neither k=FORMAT nor v=FORMAT; write it like "),
    ],
)
def test_a_kv_format_that_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        KVFormat.parse(text)
    assert str(error.value).startswith(message)


def test_what_users_may_ask_for_can_be_stored() -> None:
    assert set(config.KV_FORMATS) <= set(STORAGE_FORMATS)
    with pytest.raises(OptionError, match="unknown kv_format 'int9'"):
        KVFormat("int9", "bf16")
