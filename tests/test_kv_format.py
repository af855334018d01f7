"""What a user may say about the cache, and what it means."""

from __future__ import annotations

import pytest

from kvist.errors import OptionError
from kvist.kv_format import KVFormat, LayerFormats, check_distinct


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
        ("Q8_0", "unknown kv_format 'Q8_0': did you mean 'int8'? known: bf16, fp32, int8, int4"),
        ("q4_0", "unknown kv_format 'q4_0': did you mean 'int4'? known: "),
        ("k=fp8,v=int4", "unknown kv_format 'fp8': did you mean 'int8'? known: "),
        ("f16", "unknown kv_format 'f16': did you mean 'bf16'? known: "),
        ("fp16", "unknown kv_format 'fp16': did you mean 'bf16'? known: "),
        ("auto", "unknown kv_format 'auto': did you mean 'bf16'? known: "),
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
        (
            "k=int8;v=int4",
            "kv_format 'k=int8;v=int4': a comma separates the sides, not ';'; write it like k=int8,v=int4",
        ),
        ("k=bf16,bf16", "kv_format 'k=bf16,bf16': 'bf16' is neither k=FORMAT nor v=FORMAT; write it like "),
    ],
)
def test_a_kv_format_that_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        KVFormat.parse(text)
    assert str(error.value).startswith(message)


def test_a_format_is_checked_however_it_is_made() -> None:
    with pytest.raises(OptionError, match="unknown kv_format 'int9'"):
        KVFormat("int9", "bf16")


# --- formats by layer -------------------------------------------------------------------------------------------------

INT4, INT8, APART = KVFormat("int4", "int4"), KVFormat("int8", "int8"), KVFormat("int8", "int4")


@pytest.mark.parametrize(
    ("text", "formats", "shortest"),
    [
        ("int4", [INT4, INT4, INT4, INT4], "int4"),
        ("k=int8,v=int4", [APART] * 4, "k=int8,v=int4"),
        ("int4/0:int8", [INT8, INT4, INT4, INT4], "int4/0:int8"),
        ("int4/0,1,3:int8", [INT8, INT8, INT4, INT8], "int4/0-1,3:int8"),
        ("int4 / 3 : int8 / 0 - 1 : k=int8,v=int4", [APART, APART, INT4, INT8], "int4/0-1:k=int8,v=int4/3:int8"),
        ("int4/1:int4", [INT4] * 4, "int4"),
    ],
)
def test_formats_by_layer_are_read_and_written(text: str, formats: list[KVFormat], shortest: str) -> None:
    by_layer = LayerFormats.parse(text)
    assert list(by_layer.of(4)) == formats
    assert str(by_layer) == shortest
    assert LayerFormats.parse(shortest).of(4) == by_layer.of(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "unknown kv_format 'int5': did you mean"),
        ("int4/int8", "'int8' is not LAYERS:FORMAT; write it like int4/0-1,29:int8"),
        ("int4/", "'' is not LAYERS:FORMAT"),
        ("/0:int8", "unknown kv_format ''"),
        ("int4/0:int9", "unknown kv_format 'int9'"),
        ("int4/:int8", "'' is no layer"),
        ("int4/-1:int8", "'-1' is no layer"),
        ("int4/first:int8", "'first' is no layer"),
        ("int4/3-1:int8", "'3-1' is no run of layers"),
        ("int4/0-999999999:int8", "'0-999999999' is no run of layers"),
        ("int4/0-2:int8/2:bf16", "gives a format for layer 2 twice: keep one"),
        (8, "kv_format is 8: it must be a text like 'int8'"),
    ],
)
def test_formats_by_layer_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        LayerFormats.parse(text)
    assert message in str(error.value)


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(OptionError, match="names layer 4: the model has 4 layers, 0 to 3"):
        LayerFormats.parse("int4/4:int8").of(4)
    with pytest.raises(OptionError, match="kv_format 'int8/4:int8' names layer 4: the model has 4 layers"):
        LayerFormats.parse("int8/4:int8").of(4)


@pytest.mark.parametrize(
    ("text", "quantised"),
    [("bf16", False), ("int8", True), ("k=bf16,v=int4", False), ("k=int4,v=bf16", True), ("bf16/1:int8", True)],
)
def test_who_needs_statics_says_so(text: str, quantised: bool) -> None:
    assert LayerFormats.parse(text).quantised_keys is quantised


def test_formats_are_told_apart_by_what_they_mean() -> None:
    formats = tuple(map(LayerFormats.parse, ("int8", "int4", "int8/0:int4")))
    assert check_distinct(formats) == formats
    for same in ("int8", " int8 ", "k=int8,v=int8", "int8/3:int8"):
        with pytest.raises(OptionError, match="kv_format int8 is there twice: keep one"):
            check_distinct([*formats, LayerFormats.parse(same)])
