"""Stored blocks decode to the values that ggml itself gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvist.errors import ModelFileError, UnsupportedModelError
from kvist.loading.gguf_blocks import READABLE_TYPES, block_type, dequantise

# Random blocks of two rows, and what ggml's C code (llama.cpp, 2026) decodes them to.
GGML = np.load(Path(__file__).parent / "data" / "ggml_blocks.npz", allow_pickle=False)
QUANTISED = [name for name in READABLE_TYPES if name.startswith("Q")]


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_blocks_decode_as_in_ggml(name: str) -> None:
    values = dequantise(GGML[f"{name}_blocks"], name)
    np.testing.assert_allclose(values, GGML[f"{name}_values"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_plain_numbers_decode_to_themselves(name: str, dtype: type[np.floating]) -> None:
    values = np.linspace(-2, 2, 64, dtype=dtype).reshape(2, 32)
    assert (dequantise(values.view(np.uint8), name) == values.astype(np.float32)).all()


def test_bf16_decodes_to_the_upper_half_of_float32() -> None:
    values = np.array([[1.0, -2.5, 0.0, 3.140625]], np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert (dequantise(stored.view(np.uint8), "BF16") == values).all()


def test_a_scale_that_is_not_a_number_warns_nobody() -> None:
    blocks = np.full((1, 34), 0xFF, np.uint8)
    assert np.isnan(dequantise(blocks, "Q8_0")).all()


def test_each_of_the_eleven_types_is_known_by_its_number_and_every_other_is_refused_by_name() -> None:
    for known in GGMLQuantizationType:
        if known.name in READABLE_TYPES:
            block = block_type(known.value)
            assert (block.block_values, block.block_bytes) == GGML_QUANT_SIZES[known]
            assert block.quantised == known.name.startswith("Q")
        else:
            with pytest.raises(UnsupportedModelError, match=f"{known.name} is not supported: readable are F32"):
                block_type(known.value)
    with pytest.raises(ModelFileError, match="tensor type 999 is unknown"):
        block_type(999)
