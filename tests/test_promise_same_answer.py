"""Promise 1, end to end: the logits of a token have the same bits, however its context was computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_files import hf_config, hf_state, write_tiny_directory

from kvist.cache.kv_cache import KVCache, Span
from kvist.config import CacheConfig
from kvist.kv_format import LayerFormats
from kvist.loading import LoadedModel, load
from kvist.models.step_inputs import StepInputs

WEIGHTS = ("bf16", "int8", "int4")
CACHES = ("bf16", "fp32", "int8", "k=int8,v=int4", "int4")
# Of the state's own family, and what a configuration says besides.
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "mistral": ("llama", {"sliding_window": 70}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3_text": ("gemma3", {"sliding_window": 70}),
}
TINY_TOKENS, REAL_TOKENS = 333, 200
NUM_STRANGERS = 16
DECODED = 12


class Text:
    """A text, and a cache in which it can be computed in any way."""

    def __init__(self, model: LoadedModel, kv_format: str, token_ids: list[int]) -> None:
        formats = LayerFormats.parse(kv_format)
        statics = model.key_statics() if formats.quantised_keys else None
        self.model, self.token_ids = model, token_ids
        self.cache = KVCache(model.config.layers, CacheConfig(formats, 1 << 28), key_statics=statics)

    @torch.inference_mode()
    def step(self, tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """New tokens of some sequences; the logits of all of them."""
        spans = [Span(sequence, len(ids)) for sequence, ids in tokens.items()]
        for span in spans:
            assert self.cache.reserve(span.sequence_id, self.cache.length(span.sequence_id) + span.num_tokens)
        view = self.cache.view(spans)
        packed = torch.tensor([token for ids in tokens.values() for token in ids])
        logits = self.model.decoder(StepInputs(packed, view.positions(), torch.arange(len(packed)), view))
        self.cache.commit(view)
        return dict(zip(tokens, logits.split([span.num_tokens for span in spans]), strict=True))

    def chunks(self, stops: list[int]) -> torch.Tensor:
        """The logits of the text up to the last stop, computed up to each in turn."""
        sequence, found = self.cache.open(), []
        for first, stop in zip([0, *stops], stops, strict=False):
            found.append(self.step({sequence: self.token_ids[first:stop]})[sequence])
        self.cache.release(sequence)
        return torch.cat(found)

    def cold(self) -> torch.Tensor:
        return self.chunks([len(self.token_ids)])

    def among_strangers(self) -> torch.Tensor:
        """In three steps, each with tokens of others before and behind it, more of them in each."""
        others = [self.cache.open() for _ in range(NUM_STRANGERS)]
        sequence, found, length = self.cache.open(), [], len(self.token_ids)
        order = [*others[:5], sequence, *others[5:]]
        for number, (first, stop) in enumerate([(0, length // 2), (length // 2, length - 1), (length - 1, length)]):
            tokens = {other: self.token_ids[other % 7 : other % 7 + 1 + other % (2 + number)] for other in others}
            tokens[sequence] = self.token_ids[first:stop]
            found.append(self.step({each: tokens[each] for each in order})[sequence])
        for each in order:
            self.cache.release(each)
        return torch.cat(found)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(text: Text, chunk_sizes: tuple[int, ...]) -> None:
    length = len(text.token_ids)
    torch.set_num_threads(1)
    expected = text.cold()
    assert expected.isfinite().all()
    torch.set_num_threads(2)
    assert torch.equal(text.cold(), expected)
    for size in chunk_sizes:
        assert torch.equal(text.chunks([*range(size, length, size), length]), expected), f"in chunks of {size}"
    decoded = [length // 2, *range(length // 2 + 1, length // 2 + DECODED)]
    assert torch.equal(text.chunks(decoded), expected[: decoded[-1]]), "token by token"
    assert torch.equal(text.among_strangers(), expected), "among strangers"
    assert text.cache.used_bytes == 0


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model_type, weights_format = request.param
    architecture, more = FAMILIES[model_type]
    config = hf_config(model_type=model_type, max_position_embeddings=4096, **more)
    directory = tmp_path_factory.mktemp("model") / model_type
    # As small as trained weights are: random ones of size 1 give attention to one token alone.
    state = {name: x * 0.2 if x.dim() == 2 else x for name, x in hf_state(architecture).items()}
    return load(write_tiny_directory(directory, state, config=config), weights_format)


@pytest.mark.parametrize("kv_format", CACHES)
@pytest.mark.parametrize(
    "tiny", [(family, weights) for family in FAMILIES for weights in WEIGHTS], indirect=True, ids=" ".join
)
def test_a_tiny_model_of_every_family(tiny: LoadedModel, kv_format: str) -> None:
    token_ids = torch.randint(0, 256, (TINY_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    check(Text(tiny, kv_format, token_ids), (7, 64, 65))


REAL = [("gguf", "bf16"), ("gguf", "int8"), ("gguf", "int4"), ("int8", "int8"), ("int4", "int4"), ("bf16", "bf16")]


@pytest.mark.parametrize("fixture", ["smollm2_gguf", "gemma3_gguf"])
@pytest.mark.parametrize(("weights_format", "kv_format"), REAL)
def test_a_real_model(
    fixture: str, weights_format: str, kv_format: str, alice: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(fixture)
    model = load(path, weights_format)
    check(Text(model, kv_format, model.tokenizer.encode(alice)[:REAL_TOKENS]), (64,))
