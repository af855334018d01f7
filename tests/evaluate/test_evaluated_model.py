"""The model twice, and what is refused before either costs time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_files import write_tiny_directory

from kvist.errors import CacheFullError, KvistError, OptionError
from kvist.evaluate import evaluated_model, evaluation
from kvist.evaluate.eval_config import EvalConfig
from kvist.evaluate.evaluated_model import EvaluatedModel
from kvist.kv_format import LayerFormats
from kvist.loading import load
from kvist.loading.fingerprint import statics_hash


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    return write_tiny_directory(tmp_path / "model")


def config(*formats: str, weights_format: str = "fp32") -> EvalConfig:
    return EvalConfig(tuple(map(LayerFormats.parse, formats)), weights_format, window=100, windows=1)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_statics_are_those_of_the_model_that_is_tested(directory: Path, compute: str) -> None:
    asked = config("bf16", "int8", weights_format=compute)
    evaluated = EvaluatedModel.load(directory, asked)
    assert evaluated.tested.decoder.embed_tokens.weight.dtype == (
        torch.float32 if compute == "fp32" else torch.bfloat16
    )
    assert evaluated.reference.decoder.embed_tokens.weight.dtype == torch.float32
    found = evaluated.key_statics(asked)
    assert found is not None
    of_formats = {name: statics_hash(load(directory, name).key_statics()) for name in ("fp32", "bf16")}
    assert of_formats["fp32"] != of_formats["bf16"]
    assert statics_hash(found) == of_formats[compute]


def test_plain_keys_need_no_statics(directory: Path) -> None:
    asked = config("bf16", "k=fp32,v=int4")
    assert EvaluatedModel.load(directory, asked).key_statics(asked) is None


@pytest.mark.parametrize(
    ("formats", "free_bytes", "error", "message"),
    [
        (("int8", "int8/7:int4"), 1 << 30, OptionError, "names layer 7"),
        (("int4",), 150_000, CacheFullError, "a window of 100 tokens takes 192.0 KiB in fp32"),
        (("bf16", "int8"), 1000, CacheFullError, "in bf16, and 1,000 bytes are free: take a shorter window"),
    ],
)
def test_what_the_caches_refuse_is_refused_before_the_model_is_loaded_again(
    directory: Path,
    formats: tuple[str, ...],
    free_bytes: int,
    error: type[KvistError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []

    def counted(model: Path, weights_format: str, **options: object) -> object:
        loaded.append(weights_format)
        return load(model, weights_format)

    monkeypatch.setattr(evaluated_model, "load", counted)
    monkeypatch.setattr(evaluation, "available_bytes", lambda: free_bytes)
    with pytest.raises(error, match=message):
        EvaluatedModel.load(directory, config(*formats, weights_format="bf16"))
    assert loaded == ["fp32"]
