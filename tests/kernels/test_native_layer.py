"""What the native library takes for a decoder layer, and what it says of the rest."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvist.attention import ACTIVATIONS
from kvist.kernels import native
from kvist.kernels.native_types import DecoderLayer, HiddenRows, LinearWeight, PageLayer, PageStep
from kvist.kernels.weight_codec import WEIGHT_FORMATS, QuantisedWeight, decode_rows, pack, quantise
from kvist.models.layers import OffsetRMSNorm, normalised

EMBED, MLP, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 16
SHAPES = {
    "q": (HEADS * DIM, EMBED), "k": (KV_HEADS * DIM, EMBED), "v": (KV_HEADS * DIM, EMBED), "o": (EMBED, HEADS * DIM),
    "gate": (MLP, EMBED), "up": (MLP, EMBED), "down": (EMBED, MLP),
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(num_rows: int, num_columns: int, seed: int = 0) -> LinearWeight:
    return native.linear_weight(pack(quantise(random(num_rows, num_columns, seed=seed) * 0.1, "int8")))


def weights(**changes: Any) -> native.LayerWeights:
    given: dict[str, Any] = {name: (matrix(*shape), None) for name, shape in SHAPES.items()}
    given |= {"attention_input_norm": torch.ones(EMBED), "mlp_input_norm": torch.ones(EMBED)}
    given |= dict.fromkeys(("q_norm", "k_norm", "attention_output_norm", "mlp_output_norm"))
    return native.LayerWeights(**given | changes)


def layer(changes: dict[str, Any] | None = None, **options: Any) -> DecoderLayer:
    given: dict[str, Any] = {
        "eps": 1e-6, "head_dim": DIM, "scale": 0.25, "window": None, "activation": "silu",
    }  # fmt: skip
    return native.decoder_layer(weights(**changes or {}), **given | options)


def rows(count: int = 3, dim: int = DIM, embed: int = EMBED) -> HiddenRows:
    return native.hidden_rows(random(count, embed), (torch.ones(count, 1, dim), torch.zeros(count, 1, dim)))


def empty_pool() -> torch.Tensor:
    return torch.zeros(1, 1 << 16, dtype=torch.uint8)


def step(count: int = 3, window: int | None = None, pool: torch.Tensor | None = None) -> PageStep:
    return native.page_step(
        empty_pool() if pool is None else pool, 1 << 16, num_tokens=[count], first_positions=[0], first_numbers=[0],
        page_tables=[torch.zeros(1, dtype=torch.int64)], window=window,
    )  # fmt: skip


def pages(num_kv_heads: int = KV_HEADS, head_dim: int = DIM, offset: int = 0) -> PageLayer:
    return native.page_layer("bf16", "bf16", head_dim, num_kv_heads, offset)


def run(*call: Any, num_threads: int) -> None:
    native.run_layers([call], num_threads=num_threads)  # type: ignore[list-item]


def test_a_layer_changes_the_rows_in_place() -> None:
    x = random(3, EMBED)
    hidden = native.hidden_rows(x, (torch.ones(3, 1, DIM), torch.zeros(3, 1, DIM)))
    run(layer(), step(), pages(), hidden, num_threads=1)
    assert (x != random(3, EMBED)).all()
    assert x.isfinite().all()


def test_layers_run_one_after_another_or_none_of_them() -> None:
    first, second = layer(), layer({"q": (matrix(*SHAPES["q"], seed=9), None)})
    tables = torch.ones(3, 1, DIM), torch.zeros(3, 1, DIM)
    x, y, z = (random(3, EMBED) for _ in range(3))
    apart = step()
    for handle in (first, second):
        run(handle, apart, pages(), native.hidden_rows(x, tables), num_threads=1)
    together, rows_of_y = step(), native.hidden_rows(y, tables)
    calls = [(handle, together, pages(), rows_of_y) for handle in (first, second)]
    native.run_layers(calls, num_threads=1)
    assert torch.equal(x, y)
    assert not torch.equal(y, z)

    rows_of_z = native.hidden_rows(z, tables)
    with pytest.raises(ValueError, match="the pages have 1 KV heads"):
        native.run_layers(
            [(first, together, pages(), rows_of_z), (second, together, pages(1), rows_of_z)], num_threads=1
        )
    assert torch.equal(z, random(3, EMBED)), "a layer ran before all were checked"
    right = first, together, pages(), rows_of_z
    for wrong in ((None, *right[1:]), right[:3], (first, together, rows_of_z, right[2]), 3):
        with pytest.raises(TypeError):
            native.run_layers([right, wrong], num_threads=1)  # type: ignore[list-item]
    assert torch.equal(z, random(3, EMBED))
    native.run_layers([], num_threads=1)


# Run in a process of its own, which is what a failure ends.
HELD = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import threading, time
from collections.abc import Sequence
import torch
import test_native_layer as test

class Made(Sequence):  # its elements are made when they are asked for, and nobody else holds them
    def __init__(self, make, count):
        self.make, self.count = make, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError
        return self.make(index)

makers = (test.layer, test.step, test.pages, test.rows)
test.native.run_layers(Made(lambda _: tuple(make() for make in makers), 100), num_threads=1)
test.native.run_layers(Made(lambda _: Made(lambda index: makers[index](), 4), 100), num_threads=1)
print("made")

calls = [(test.layer(), test.step(64), test.pages(), test.rows(64)) for _ in range(200)]
spent = torch.zeros(len(test.native.layer_stages()), dtype=torch.int64)
def clear():
    while not spent.any():
        time.sleep(1e-4)
    calls.clear()
    overwriting = [torch.full((1 << 12,), 255, dtype=torch.uint8) for _ in range(500)]
thread = threading.Thread(target=clear)
thread.start()
test.native.run_layers(calls, num_threads=1, stage_ns=spent)
thread.join()
print(len(calls), "left")
"""


def test_what_runs_is_held_until_it_has_run() -> None:
    """Whether the caller's sequence holds its elements or not, and whatever other threads do to it meanwhile."""
    result = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr, result.returncode) == ("made\n0 left\n", "", 0)


def test_stages_are_clocked() -> None:
    spent = torch.zeros(len(native.layer_stages()), dtype=torch.int64)
    call = (layer(), step(), pages(), rows())
    native.run_layers([call], num_threads=1, stage_ns=spent)
    assert (spent > 0).all()
    once = spent.clone()
    native.run_layers([call, call], num_threads=1, stage_ns=spent)
    assert (spent > once).all(), "times are added up"
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(len(spent)), torch.zeros(2 * len(spent))[::2]):
        with pytest.raises(ValueError, match="stage_ns"):
            native.run_layers([call], num_threads=1, stage_ns=wrong)


# --- the rows between the products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 7, 16, 40, 64, 80, 576, 1000])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_rows_are_normed(dims: int, count: int) -> None:
    x = random(count, dims) * random(count, 1, seed=1).mul(5).exp()
    norm = OffsetRMSNorm(dims, 1e-5).requires_grad_(False)
    norm.weight.copy_(random(dims, seed=2))
    tables = torch.ones(count, 1, 2)
    found = []
    for threads in (1, 3):
        out = torch.full_like(x, 7.0)
        native.hidden_rows(x, (tables, tables)).norm(norm.weight, out, offset=1.0, eps=1e-5, num_threads=threads)
        found.append(out)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], norm(x), rtol=1e-6, atol=1e-30)


def test_a_row_of_numbers_that_are_none_is_normed_alone() -> None:
    x, out = random(4, EMBED), torch.empty(4, EMBED)
    expected = normalised(x, 1e-5)
    x[1, 5], x[3, 0] = float("nan"), float("inf")
    tables = torch.ones(4, 1, 2)
    native.hidden_rows(x, (tables, tables)).norm(torch.ones(EMBED), out, offset=0.0, eps=1e-5, num_threads=1)
    assert out[1].isnan().all()
    assert out[3, 0].isnan()
    torch.testing.assert_close(out[::2], expected[::2])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_are_those_of_pytorch(activation: str) -> None:
    """Gates come through their bias and are multiplied by one; of 32 one is not 0, whose code then is exact."""
    identity = native.linear_weight(pack(quantise(torch.eye(EMBED) * 127, "int8")))
    nothing = native.linear_weight(pack(quantise(torch.zeros(EMBED, EMBED), "int8")))
    large = torch.tensor([-3e38, -1e30, -150, -88, 88, 150, 1e30, 3e38])
    for value in (*torch.linspace(-12, 30, 43), *large):
        gate = torch.zeros(EMBED)
        gate[[5, 40]] = torch.stack((value, value * 1e-3))
        changes: dict[str, Any] = dict.fromkeys(("q", "k", "v", "o"), (nothing, None))
        changes |= {"gate": (nothing, gate), "up": (nothing, torch.ones(EMBED)), "down": (identity, None)}
        x = torch.zeros(1, EMBED)
        rows_of_x = native.hidden_rows(x, (torch.ones(1, 1, DIM), torch.zeros(1, 1, DIM)))
        run(layer(changes, activation=activation), step(1), pages(HEADS), rows_of_x, num_threads=1)
        torch.testing.assert_close(x[0], ACTIVATIONS[activation](gate.double()).float() * 127, rtol=3e-6, atol=1e-12)


# --- rows of a matrix as numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("num_columns", [32, 96, 128])
def test_rows_of_a_matrix_are_decoded_to_the_bits_of_the_twin(format: str, num_columns: int) -> None:
    codes = quantise(random(50, num_columns), format)
    halves = torch.randint(-(2**15), 2**15, codes.steps.shape, dtype=torch.int16).view(torch.float16)
    halves[0, 0], halves[1, 0], halves[2, 0] = float("nan"), float("inf"), 0.0
    weight = pack(type(codes)(codes.kind, codes.codes, halves, None if codes.minima is None else halves.flip(0)))
    chosen = torch.tensor([49, 0, 1, 2, 15, 16, 17, 17, 31, 32])
    out = torch.empty(len(chosen), num_columns + 3)[:, :num_columns]
    native.linear_weight(weight).decode_rows(chosen, out)
    assert torch.equal(out.nan_to_num(0.5), decode_rows(weight, chosen).nan_to_num(0.5))


@pytest.mark.parametrize(
    ("chosen", "out", "message"),
    [
        (torch.tensor([0, 50]), torch.empty(2, 64), "a row is 50: it must be from 0 to 49"),
        (torch.tensor([-1]), torch.empty(1, 64), "a row is -1: it must be from 0 to 49"),
        (torch.tensor([1.0]), torch.empty(1, 64), "rows must have dtype int64"),
        (torch.tensor([1]), torch.empty(2, 64), "out has 2 rows: it must have 1"),
        (torch.tensor([1]), torch.empty(1, 32), "out has 32 columns: it must have 64"),
        (torch.tensor([1]), torch.empty(1, 64, dtype=torch.bfloat16), "out must have dtype float32"),
    ],
)
def test_decoding_says_what_is_wrong(chosen: torch.Tensor, out: torch.Tensor, message: str) -> None:
    weight: QuantisedWeight = pack(quantise(random(50, 64), "int4"))
    with pytest.raises(ValueError, match=re.escape(message)):
        native.linear_weight(weight).decode_rows(chosen, out)


# --- the border -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer({"k": (matrix(40, EMBED), None)}), "v has the shape [32, 64]: it must be [40, 64]"),
        (lambda: layer({"o": (matrix(EMBED, 96), None)}), "o has the shape [64, 96]: it must be [64, 64]"),
        (lambda: layer({"down": (matrix(EMBED, 64), None)}), "down has the shape [64, 64]: it must be [64, 96]"),
        (
            lambda: layer({"up": (matrix(MLP, EMBED), torch.ones(95))}),
            "the bias of up has 95 elements: it must have 96",
        ),
        (
            lambda: layer({"q": (matrix(64, 64), torch.ones(64, dtype=torch.bfloat16))}),
            "the bias of q must have dtype float32",
        ),
        (lambda: layer({"mlp_input_norm": torch.ones(32)}), "the norm before the MLP has 32 elements"),
        (lambda: layer({"mlp_input_norm": None}), "the norms before attention and before the MLP must be there"),
        (lambda: layer({"q_norm": torch.ones(DIM)}), "the norms of q and k go together"),
        (lambda: layer(head_dim=15), "head_dim is 15: it must be even"),
        (lambda: layer(head_dim=0), "head_dim is 0: it must be from 2"),
        (lambda: layer(head_dim=64), "q and k have 64 and 32 rows: they must be heads of head_dim 64"),
        (lambda: layer(eps=-1.0), "eps must be finite and 0 at least"),
        (lambda: layer(scale=float("nan")), "scale must be finite"),
        (lambda: layer(window=0), "window must be 1 at least"),
        (lambda: layer(activation="relu"), "activation is 'relu': it must be silu or gelu_tanh"),
        (lambda: run(layer(), step(), pages(1), rows(), num_threads=1), "the pages have 1 KV heads of 16 dims"),
        (lambda: run(layer(), step(), pages(offset=1 << 16), rows(), num_threads=1), "the layer ends at byte"),
        (lambda: run(layer(), step(), pages(), rows(2), num_threads=1), "there are 2 rows: the step has 3 tokens"),
        (
            lambda: run(layer(), step(), pages(), rows(dim=8), num_threads=1),
            "the rows have 64 dims, turned in heads of 8: those of this layer are 64 and 16",
        ),
        (lambda: run(layer(), step(), pages(), rows(embed=32), num_threads=1), "the rows have 32 dims"),
        (
            lambda: run(layer(window=65), step(window=64), pages(), rows(), num_threads=1),
            "the layer's window is 65: that of the step is 64",
        ),
        (lambda: run(layer(), step(), pages(), rows(), num_threads=0), "num_threads is 0: it must be from 1 to 1024"),
        (lambda: hidden(x=torch.zeros(3, EMBED, dtype=torch.bfloat16)), "x must have dtype float32"),
        (lambda: hidden(x=torch.zeros(EMBED)), "x has 1 dimensions: it must have 2"),
        (lambda: hidden(x=torch.zeros(3, 2 * EMBED)[:, ::2]), "x has stride 2 in its last dimension: it must be 1"),
        (lambda: hidden(x=torch.zeros(1, EMBED).expand(3, EMBED)), "x must be contiguous"),
        (lambda: hidden(cos=torch.zeros(2, 1, DIM)), "cos has the shape [2, 1, 16]: it must be [3, 1, 16]"),
        (lambda: hidden(sin=torch.zeros(3, 1, 8)), "sin has the shape [3, 1, 8]: it must be [3, 1, 16]"),
        (lambda: hidden(sin=torch.zeros(3, 2, DIM)), "sin has the shape [3, 2, 16]"),
        (lambda: hidden(cos=torch.zeros(3, DIM)), "cos has 2 dimensions: it must have 3"),
        (lambda: hidden(overlap=True), "x and cos must not overlap"),
        (lambda: norm_to(torch.empty(3, EMBED), weight=torch.ones(3)), "weight has 3 elements"),
        (lambda: norm_to(torch.empty(2, EMBED)), "out has the shape [2, 64]"),
        (lambda: norm_to(torch.empty(3, EMBED), eps=math.inf), "eps must be finite"),
        (lambda: norm_to(torch.empty(3, EMBED), offset=math.nan), "offset must be finite"),
        (lambda: native.hidden_rows(torch.empty(3, EMBED, device="meta"), (torch.ones(3, 1, DIM),) * 2), "is on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_what_is_wrong(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def norm_to(out: torch.Tensor, weight: torch.Tensor | None = None, *, offset: float = 0.0, eps: float = 1e-6) -> None:
    rows().norm(torch.ones(EMBED) if weight is None else weight, out, offset=offset, eps=eps, num_threads=1)


def hidden(*, overlap: bool = False, **changes: torch.Tensor) -> HiddenRows:
    if overlap:
        memory = torch.zeros(3 * EMBED)
        changes = {"x": memory.view(3, EMBED), "cos": memory[-48:].view(3, 1, DIM)}
    given = {"x": torch.zeros(3, EMBED), "cos": torch.zeros(3, 1, DIM), "sin": torch.zeros(3, 1, DIM)} | changes
    return native.hidden_rows(given["x"], (given["cos"], given["sin"]))


@pytest.mark.parametrize("name", ["x", "cos", "sin"])
def test_rows_lie_apart_from_the_pages(name: str) -> None:
    pool = empty_pool()
    shape = (3, EMBED) if name == "x" else (3, 1, DIM)
    within = pool[0, -4 * math.prod(shape) :].view(torch.float32).view(shape)
    with pytest.raises(ValueError, match=rf"^{name} and the pool must not overlap$"):
        run(layer(), step(pool=pool), pages(), hidden(**{name: within}), num_threads=1)
    assert not pool.any()


def test_what_is_written_lies_apart_from_what_is_read() -> None:
    packed, norm, pool, x = (
        pack(quantise(random(64, EMBED), "int8")),
        torch.ones(4 * EMBED),
        empty_pool(),
        random(3, EMBED),
    )
    changes = {"q": (native.linear_weight(packed), None), "attention_input_norm": norm[:EMBED]}
    in_weights = packed.data.view(-1)[: 12 * EMBED].view(torch.float32).view(3, EMBED)
    for within, name in ((in_weights, "q"), (norm[EMBED - 1 : -1].view(3, EMBED), "the norm before attention")):
        before = within.clone()
        with pytest.raises(ValueError, match=f"^x and {name} must not overlap$"):
            run(layer(changes), step(), pages(), hidden(x=within), num_threads=1)
        assert torch.equal(within.view(torch.int32), before.view(torch.int32))
    clocks = 8 * len(native.layer_stages())
    for memory, name in ((pool, "the pool"), (x.view(torch.uint8), "x"), (packed.data, "q")):
        spent = memory.view(-1)[:clocks].view(torch.int64)
        call = (layer(changes), step(pool=pool), pages(), hidden(x=x))
        with pytest.raises(ValueError, match=f"^stage_ns and {name} must not overlap$"):
            native.run_layers([call], num_threads=1, stage_ns=spent)
    assert torch.equal(x, random(3, EMBED))


@pytest.mark.parametrize("change", ["turned", "other memory", "another storage", "smaller"])
def test_rows_stay_as_they_were_checked(change: str) -> None:
    """Whatever is done to the tensor that they were made of, but to its storage."""
    weight, tables = torch.ones(EMBED), (torch.ones(7, 1, DIM), torch.zeros(7, 1, DIM))

    def normed(rows_of: HiddenRows) -> torch.Tensor:
        out = torch.empty(7, EMBED)
        rows_of.norm(weight, out, offset=0.0, eps=1e-6, num_threads=1)
        return out

    x, expected = random(7, EMBED), native.hidden_rows(random(7, EMBED), tables)
    found = native.hidden_rows(x, tables)
    if change == "turned":
        x.t_()
    elif change == "other memory":
        x.data = torch.zeros(7, EMBED)
    elif change == "another storage":
        x.set_(torch.zeros(1))  # type: ignore[call-overload]
    else:
        x.resize_(1, EMBED)
    overwriting = [torch.full((7, EMBED), 9.0) for _ in range(20)]
    assert torch.equal(normed(found), normed(expected))
    with pytest.raises(ValueError, match=re.escape("out has the shape [1, 64]: it must be [7, 64]")):
        found.norm(weight, torch.empty(1, EMBED), offset=0.0, eps=1e-6, num_threads=1)
    for one in (found, expected):
        run(layer(), step(7), pages(), one, num_threads=1)
    assert torch.equal(normed(found), normed(expected))
    del overwriting


def test_a_matrix_keeps_its_bytes_when_its_tensor_gets_others() -> None:
    packed, chosen, out = pack(quantise(random(50, 64), "int8")), torch.arange(50), torch.empty(50, 64)
    expected, handle = decode_rows(packed, chosen), native.linear_weight(packed)
    packed.data.data = torch.zeros_like(packed.data)
    overwriting = [torch.full_like(packed.data, 9) for _ in range(20)]
    handle.decode_rows(chosen, out)
    assert torch.equal(out, expected)
    del overwriting


def test_a_layer_computes_with_what_is_written_to_its_weights_later() -> None:
    norm, bias, packed = torch.ones(EMBED), torch.zeros(MLP), pack(quantise(random(EMBED, EMBED), "int8"))
    changes = {
        "attention_input_norm": norm, "mlp_input_norm": norm, "up": (matrix(MLP, EMBED), bias),
        "o": (native.linear_weight(packed), None),
    }  # fmt: skip
    handle, found = layer(changes), []
    for written in (None, norm, bias, packed.data):
        if written is not None:
            written.copy_(random(*written.shape, seed=5) if written.is_floating_point() else written.flip(0))
        pair = [random(3, EMBED), random(3, EMBED)]
        for one, x in zip((handle, layer(changes)), pair, strict=True):
            run(one, step(), pages(), hidden(x=x), num_threads=1)
        assert torch.equal(*pair)
        assert not any(torch.equal(pair[0], before) for before in found)
        found.append(pair[0])


def test_norms_may_be_kept_less_an_offset() -> None:
    norm, found = random(EMBED).mul(64).round().div(64), []
    for offset in (0.0, 1.0):
        x = random(3, EMBED)
        names = ("attention_input_norm", "attention_output_norm", "mlp_input_norm", "mlp_output_norm")
        changes = dict.fromkeys(names, norm - offset) | dict.fromkeys(("q_norm", "k_norm"), norm[:DIM] - offset)
        run(layer({**changes, "norm_offset": offset}), step(), pages(), hidden(x=x), num_threads=1)
        found.append(x)
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="norm_offset must be finite"):
        layer({"norm_offset": math.inf})


def test_a_layer_keeps_its_matrices_alive() -> None:
    handle = layer()
    x = random(3, EMBED)
    first = native.hidden_rows(x, (torch.ones(3, 1, DIM), torch.zeros(3, 1, DIM)))
    run(handle, step(), pages(), first, num_threads=1)
    overwriting = [torch.full((6, 1664), 255, dtype=torch.uint8) for _ in range(20)]
    again = random(3, EMBED)
    second = native.hidden_rows(again, (torch.ones(3, 1, DIM), torch.zeros(3, 1, DIM)))
    run(handle, step(), pages(), second, num_threads=2)
    assert torch.equal(x, again)
    del overwriting


def test_nothing_is_no_matrix() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        layer({"q": (None, None)})
