"""A GGUF file as a checkpoint: Hugging Face names, row order and norm weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvist.config import ModelConfig
from kvist.errors import ModelFileError, shown
from kvist.loading.checkpoint import PLAIN_DTYPES, StoredCodes
from kvist.loading.gguf_blocks import dequantise
from kvist.loading.gguf_file import GgufFile, GgufTensor
from kvist.loading.untrusted_file import DAMAGED

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Not weights: the configuration holds what they say.
_ROPE_TENSORS = ("rope_freqs.weight",)

# Values de-quantised at once: large enough for numpy, small enough that the float32 in between stays a few MB.
_VALUES_AT_ONCE = 1 << 18

# Too few for PyTorch to share among threads, whose waking costs more than the conversion while the cores are busy
# (measured: 10 ms instead of 0.2 ms).
_VALUES_PER_COPY = 1 << 14


class GgufCheckpoint:
    """The tensors of a GGUF file.

    llama.cpp's `llama` files hold the rows of the query and key projections with the two halves of a head interleaved,
    and its `gemma3` files hold norm weights plus one; both are undone here.

    Args:
        gguf: the file.
        config: the model's configuration, which says how many heads the projections hold.
    """

    def __init__(self, gguf: GgufFile, config: ModelConfig) -> None:
        self._gguf = gguf
        self._architecture = gguf.metadata["general.architecture"]
        self._num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in gguf.tensors.items():
            if name in _ROPE_TENSORS:
                continue
            if (other := self._tensors.setdefault(self._hf_name(name), tensor)) is not tensor:
                raise ModelFileError(
                    f"{gguf.path} holds one tensor under two names, {shown(other.name)} and {shown(name)}: {DAMAGED}"
                )

    def names(self) -> list[str]:
        """All tensor names; one without a Hugging Face counterpart keeps its own."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, mapped where it is stored so."""
        tensor = self._tensors[name]
        if PLAIN_DTYPES.get(tensor.type.name) == dtype and not self._num_permuted_heads(name) and not self._shift(name):
            return torch.from_numpy(self._gguf.blocks(tensor)).view(dtype).reshape(tensor.shape)
        out = torch.empty(tensor.shape, dtype=dtype)
        flat, first = out.view(-1), 0
        for values in self.parts(name, dtype):
            flat[first : first + len(values)] = values
            first += len(values)
        return out

    def parts(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The tensor's values in `dtype`, flat and in order, some at a time: never all de-quantised at once."""
        tensor = self._tensors[name]
        blocks, order = self._rows(name, tensor)
        columns = math.prod(tensor.shape) // len(blocks)
        step = max(1, _VALUES_AT_ONCE // columns)
        shift = self._shift(name)
        for first in range(0, len(blocks), step):
            rows = blocks[first : first + step] if order is None else blocks[order[first : first + step]]
            values = torch.from_numpy(dequantise(rows, tensor.type.name)).view(-1)
            yield _converted(values + shift if shift else values, dtype)

    def rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        tensor = self._tensors[name]
        blocks, order = self._rows(name, tensor)
        rows = blocks[first:stop] if order is None else blocks[order[first:stop]]
        values = torch.from_numpy(dequantise(rows, tensor.type.name)).view(stop - first, -1)
        return values + self._shift(name)

    def block_type(self, name: str) -> str | None:
        kind = self._tensors[name].type
        return kind.name if kind.quantised else None

    def codes(self, name: str) -> StoredCodes | None:
        """The stored blocks of a quantised tensor, mapped where their rows need no other order."""
        tensor = self._tensors[name]
        if not tensor.type.quantised:
            return None
        blocks, order = self._rows(name, tensor)
        return StoredCodes(tensor.type.name, tensor.shape, torch.from_numpy(blocks if order is None else blocks[order]))

    def _rows(self, name: str, tensor: GgufTensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.intp] | None]:
        """The stored rows `[rows, bytes per row]` and the order in which Hugging Face has them; None for the same."""
        blocks = self._gguf.blocks(tensor)
        num_heads = self._num_permuted_heads(name)
        if not num_heads:
            return blocks, None
        if len(tensor.shape) == 1 and not tensor.type.quantised:
            blocks = blocks.reshape(tensor.shape[0], tensor.type.block_bytes)  # of a bias each value is a row
        if len(blocks) % (2 * num_heads):
            raise ModelFileError(
                f"{self._gguf.path}: {name} of shape {tensor.shape} does not hold {num_heads} heads: {DAMAGED}"
            )
        return blocks, np.arange(len(blocks)).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()

    def _num_permuted_heads(self, name: str) -> int:
        """The heads whose rows have another order in the file; 0 where the order is the same."""
        if self._architecture != "llama":
            return 0
        projection = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        return self._num_heads.get(projection, 0)

    def _shift(self, name: str) -> float:
        return -1.0 if self._architecture == "gemma3" and name.endswith("norm.weight") else 0.0

    def _hf_name(self, name: str) -> str:
        layer_names = _GEMMA3_LAYER if self._architecture == "gemma3" else _LAYER
        match name.split("."):
            case [base, "weight" | "bias" as kind] if base in _OUTER:
                return f"{_OUTER[base]}.{kind}"
            case ["blk", layer, base, "weight" | "bias" as kind] if base in layer_names:
                return f"model.layers.{layer}.{layer_names[base]}.{kind}"
        return name


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == dtype:
        return values
    out = torch.empty_like(values, dtype=dtype)
    for first in range(0, len(values), _VALUES_PER_COPY):
        out[first : first + _VALUES_PER_COPY] = values[first : first + _VALUES_PER_COPY]
    return out
