"""Files that are written in parts are what the library itself would have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvist.loading.safetensors_writer import TensorSpec, write_safetensors

TENSORS = {"odd": torch.randn(3, 5), "even": torch.randn(16, 32), "one": torch.randn(1), "line": torch.randn(64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_reads_back_what_was_written_in_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    path, written = tmp_path / "model.safetensors", []
    specs = {name: TensorSpec(tuple(tensor.shape), dtype) for name, tensor in TENSORS.items()}
    write_safetensors(path, specs, lambda name: TENSORS[name].to(dtype).flatten().split(7), written.append)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor.to(dtype))
    assert sum(written) == sum(tensor.numel() for tensor in TENSORS.values()) * dtype.itemsize


def test_tensors_of_whole_cache_lines_start_at_cache_lines(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    specs = {name: TensorSpec(tuple(tensor.shape), torch.bfloat16) for name, tensor in TENSORS.items()}
    write_safetensors(path, specs, lambda name: [TENSORS[name].bfloat16().flatten()], lambda _: None)
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    starts = {name: 8 + header_bytes + header[name]["data_offsets"][0] for name in TENSORS}
    assert starts["even"] % 64 == 0
    assert starts["line"] % 64 == 0


def test_parts_that_do_not_fill_the_shape_are_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w: its parts differ from its shape by 4 bytes"):
        write_safetensors(
            tmp_path / "x", {"w": TensorSpec((3,), torch.float32)}, lambda _: [torch.zeros(2)], lambda _: None
        )
