"""Promise 1, for the attention, over the queries, keys and values of real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvist.attention import StepAttention
from kvist.attention.attend import attend
from kvist.cache.kv_cache import KVCache, Span
from kvist.config import CacheConfig
from kvist.kv_format import LayerFormats
from kvist.loading import LoadedModel, load
from kvist.models.step_inputs import StepInputs

NUM_TOKENS = 700
LAYERS = {"smollm2_gguf": (0, 14, 29), "gemma3_gguf": (0, 5, 16)}
Projected = dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, name: str) -> LoadedModel:
    path: Path = request.getfixturevalue(name)
    return load(str(path), "bf16")


@pytest.fixture(scope="module")
def projected(model: LoadedModel, name: str, alice: str) -> Projected:
    """Queries, keys and values of some layers for one long text."""
    found: Projected = {}

    def look(attention: StepAttention, arguments: tuple[object, ...]) -> None:
        x, rope, _, layer = arguments
        if layer in LAYERS[name]:
            found[layer] = attention.project(x, rope)  # type: ignore[arg-type, index]

    modules = [module for module in model.decoder.modules() if isinstance(module, StepAttention)]
    handles = [module.register_forward_pre_hook(look) for module in modules]
    token_ids = torch.tensor(model.tokenizer.encode(alice)[:NUM_TOKENS])
    cache = KVCache(model.config.layers, CacheConfig(LayerFormats.parse("bf16"), 1 << 30))
    sequence = cache.open()
    cache.reserve(sequence, NUM_TOKENS)
    view = cache.view([Span(sequence, NUM_TOKENS)])
    inputs = StepInputs(token_ids, view.positions(), torch.empty(0, dtype=torch.int64), view)
    with torch.inference_mode():
        model.decoder.hidden_states(inputs, plain_layers=True)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Runner:
    """Attention of the recorded layers, over a cache of the whole model."""

    def __init__(self, model: LoadedModel, projected: Projected, kv_format: str) -> None:
        formats = LayerFormats.parse(kv_format)
        statics = model.key_statics() if formats.quantised_keys else None
        self._cache = KVCache(model.config.layers, CacheConfig(formats, 1 << 30), key_statics=statics)
        self._projected = projected

    def open(self) -> int:
        return self._cache.open()

    def step(self, *runs: tuple[int, int]) -> list[torch.Tensor]:
        """Each sequence's next tokens up to a length, in one step: `[layers, tokens, H, D]` for each."""
        starts = [self._cache.length(sequence) for sequence, _ in runs]
        rows = torch.cat([torch.arange(start, stop) for start, (_, stop) in zip(starts, runs, strict=True)])
        for sequence, stop in runs:
            assert self._cache.reserve(sequence, stop)
        view = self._cache.view([Span(s, stop - start) for start, (s, stop) in zip(starts, runs, strict=True)])
        mixed = []
        for layer, (q, k, v) in self._projected.items():
            view.write(layer, k[rows], v[rows])
            mixed.append(attend(q[rows], view, layer, scale=q.shape[-1] ** -0.5))
        self._cache.commit(view)
        return list(torch.stack(mixed).split([len(range(a, b)) for a, (_, b) in zip(starts, runs, strict=True)], 1))


@pytest.mark.parametrize("kv_format", ["bf16", "fp32", "int8", "k=int8,v=int4", "int4"])
def test_however_it_is_computed(model: LoadedModel, projected: Projected, kv_format: str) -> None:
    """Cold on one thread and on two, in chunks, decoded, and beside other sequences."""
    runner = Runner(model, projected, kv_format)
    torch.set_num_threads(1)
    (cold,) = runner.step((runner.open(), NUM_TOKENS))
    assert cold.isfinite().all()
    torch.set_num_threads(2)
    assert torch.equal(runner.step((runner.open(), NUM_TOKENS))[0], cold)

    sequence, other = runner.open(), runner.open()
    parts = [runner.step((sequence, stop))[0] for stop in (63, 64, 200, 513)]
    parts += [runner.step((sequence, stop))[0] for stop in range(514, 524)]
    for stop, stranger in ((525, 70), (600, 71), (601, 500), (NUM_TOKENS, 501)):
        parts.append(runner.step((other, stranger), (sequence, stop))[1])
    assert torch.equal(torch.cat(parts, dim=1), cold)
