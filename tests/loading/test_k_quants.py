"""Files with blocks of Q4_K, Q5_K and Q6_K: what is kept of their weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tiny_files import VOCABULARY, hyperparameters, write_gguf

from kvist.kernels.weight_codec import GROUP_COLUMNS, decode, unpack
from kvist.loading import LoadedModel, load
from kvist.loading.gguf_checkpoint import GgufCheckpoint
from kvist.loading.gguf_file import GgufFile
from kvist.models.matrices import QuantisedMatrix

COLUMNS = 256  # one block
# Each type's format, and where the fp16 scales of a block lie: those of Q4_K and Q5_K scale steps and minima.
KEPT_AS = {"Q4_K": "int4_min", "Q5_K": "int8", "Q6_K": "int8"}
SCALES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
SHAPES = {"attn_q": 128, "attn_k": 64, "attn_v": 64, "ffn_gate": 256, "ffn_up": 256, "ffn_down": 256}


def random_blocks(rng: np.random.Generator, tensor_type: str, num_rows: int) -> np.ndarray:
    """Any codes, any steps and minima of groups, and scales such that weights are as small as trained ones."""
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor_type]]
    blocks = rng.integers(0, 256, (num_rows, block_bytes), np.uint8)
    place = SCALES[tensor_type]
    scales = rng.uniform(1e-5, 1e-4, (num_rows, (place.stop - place.start) // 2)).astype(np.float16)
    blocks[:, place] = scales.view(np.uint8)
    return blocks


@pytest.fixture(params=KEPT_AS)
def models(request: pytest.FixtureRequest, tmp_path: Path, own_cache: Path) -> tuple[str, LoadedModel, LoadedModel]:
    """The type, the model as it is kept, and in fp32."""
    tensor_type, rng = request.param, np.random.default_rng(0)
    tensors: dict[str, tuple[np.ndarray, str]] = {
        "token_embd.weight": (random_blocks(rng, tensor_type, 300), tensor_type),
        "output_norm.weight": (np.ones(COLUMNS, np.float32), "F32"),
        # Its columns are those of all query heads, 128: fewer than a block has.
        "blk.0.attn_output.weight": (rng.standard_normal((COLUMNS, 128)).astype(np.float32) * 0.05, "F32"),
        "blk.0.attn_norm.weight": (np.ones(COLUMNS, np.float32), "F32"),
        "blk.0.ffn_norm.weight": (np.ones(COLUMNS, np.float32), "F32"),
    }
    for name, rows in SHAPES.items():
        tensors[f"blk.0.{name}.weight"] = (random_blocks(rng, tensor_type, rows), tensor_type)
    metadata = hyperparameters("llama") | VOCABULARY
    metadata |= {"llama.block_count": 1, "llama.embedding_length": COLUMNS, "llama.feed_forward_length": COLUMNS}
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors)
    return tensor_type, load(path), load(path, "fp32")


def test_what_is_kept_is_closer_than_half_a_step_of_its_format(
    models: tuple[str, LoadedModel, LoadedModel],
) -> None:
    tensor_type, kept, exact = models
    assert kept.weights_format == "gguf"
    assert kept.bf16_matrices == ()
    parameters = dict(exact.decoder.named_parameters())
    found = {name: module for name, module in kept.decoder.named_modules() if isinstance(module, QuantisedMatrix)}
    assert len(found) == len(SHAPES) + 1
    for name, module in found.items():
        assert module.packed.format == KEPT_AS[tensor_type]
        expected = parameters[f"{name}.weight"].detach()
        groups = torch.unflatten(expected, 1, (-1, GROUP_COLUMNS))
        error = torch.unflatten(decode(module.packed) - expected, 1, (-1, GROUP_COLUMNS)).abs().amax(2)
        if tensor_type == "Q4_K":  # its codes are kept: only steps and minima are rounded, to fp16
            codes = unpack(module.packed)
            assert codes.minima is not None
            bound = (15 * codes.steps.float() + codes.minima.float().abs()) * 2**-11
        else:  # half a step of int8, and 127 steps in fp16, whose smallest numbers have fewer digits
            bound = groups.abs().amax(2) * (0.5 / 127 + 2**-11) + 127 * 2**-25
        assert (error <= 1.01 * bound).all()


def test_what_is_lost_is_little_beside_what_the_type_has_lost_itself(
    models: tuple[str, LoadedModel, LoadedModel],
) -> None:
    """Its own error is evenly spread over a step: 1/12 of the step's square. Ours adds less than a tenth of it."""
    tensor_type, kept, exact = models
    parameters = dict(exact.decoder.named_parameters())
    for name, module in kept.decoder.named_modules():
        if isinstance(module, QuantisedMatrix):
            expected = parameters[f"{name}.weight"].detach()
            # Groups of 16 with a step each in Q6_K, of 32 in the others: their smallest distance of two weights.
            groups = torch.unflatten(expected, 1, (-1, 16 if tensor_type == "Q6_K" else GROUP_COLUMNS))
            sorted_groups = groups.sort(2).values
            distances = sorted_groups[..., 1:] - sorted_groups[..., :-1]
            steps = torch.where(distances > 1e-9, distances, torch.inf).amin(2)
            own = (steps[steps.isfinite()] ** 2 / 12).mean()
            assert ((decode(module.packed) - expected) ** 2).mean() < 0.1 * own


def test_gemmas_weights_hardly_change(gemma3_gguf: Path) -> None:
    """Of the demo model, by type: the change over the size of the weights, root mean squares."""
    model = load(gemma3_gguf)
    checkpoint = GgufCheckpoint(GgufFile(gemma3_gguf), model.config)
    squares: dict[str, list[float]] = {}
    for name, module in model.decoder.named_modules():
        codes = checkpoint.codes(f"model.{name}.weight") if isinstance(module, QuantisedMatrix) else None
        if codes is not None and codes.ggml_type in KEPT_AS:
            assert module.packed.format == KEPT_AS[codes.ggml_type]
            stored = checkpoint.read(f"model.{name}.weight", torch.float32)
            of_type = squares.setdefault(codes.ggml_type, [0.0, 0.0])
            of_type[0] += float(((decode(module.packed) - stored) ** 2).sum())
            of_type[1] += float((stored**2).sum())
    changes = {name: (change / size) ** 0.5 for name, (change, size) in squares.items()}
    assert changes == {"Q4_K": pytest.approx(0.0007, rel=0.1), "Q6_K": pytest.approx(0.0056, rel=0.1)}
