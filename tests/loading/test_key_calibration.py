"""The statics of quantised keys come from what attention sees of a text, layer by layer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY_CONFIGS, new_cache, run_step, tiny_model

from kvist.attention import inverse_frequencies, step_attention
from kvist.config import ModelConfig
from kvist.errors import ModelFileError, NumericsError, OptionError
from kvist.kernels import native
from kvist.kernels.key_statics import KeyStatics, key_moments, key_statics
from kvist.loading import key_calibration, load
from kvist.loading.key_calibration import calibrate, calibration_ids, feedback_dims, received_attention, recipe_hash
from kvist.loading.progress import no_progress
from kvist.models.decoder import Decoder

NAMES = ("offset", "scale", "feedback", "frequencies")


def tiny_decoder(family: str, directory: Path) -> Decoder:
    return tiny_model(family, directory).decoder


def token_ids(count: int = 200) -> list[int]:
    return torch.randint(3, 199, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def probabilities(q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """The attention of every query head `[H, T, T]`, all at once and in float64."""
    num_tokens, num_heads, _ = q.shape
    keys = k.double().repeat_interleave(num_heads // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * scale
    distance = torch.arange(num_tokens).unsqueeze(1) - torch.arange(num_tokens)
    seen = (distance >= 0) & (distance < (window or num_tokens))
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


# --- what is looked at ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TINY_CONFIGS))
def test_every_familys_layers_get_sound_values_with_their_own_rope(family: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(family, tmp_path)
    statics = calibrate(decoder, token_ids(), no_progress)
    assert len(statics) == decoder.config.num_layers
    for index, (layer, found) in enumerate(zip(decoder.config.layers, statics, strict=True)):
        heads, dims, block = layer.num_kv_heads, layer.head_dim, feedback_dims(layer.head_dim)
        assert found.offset.shape == found.scale.shape == (heads, dims)
        assert found.feedback.shape == (heads, dims // block, block, block)
        assert torch.equal(found.frequencies, inverse_frequencies(decoder.rope_of(index), dims))
        assert all(getattr(found, name).isfinite().all() for name in NAMES)
        assert all(getattr(found, name).dtype == torch.float32 for name in NAMES)
        assert (found.scale > 0).all()
        assert found.offset.abs().max() > 0


def test_layers_with_a_window_turn_by_another_rope_than_those_without(tmp_path: Path) -> None:
    decoder = tiny_decoder("gemma3_scaled", tmp_path)
    frequencies = [layer.frequencies for layer in calibrate(decoder, token_ids(), no_progress)]
    full = [index for index, window in enumerate(decoder.config.windows) if window is None]
    assert full == [5]
    for index in range(decoder.config.num_layers):
        assert torch.equal(frequencies[index], frequencies[5]) == (index == 5)


@pytest.mark.parametrize("family", ["llama", "mistral_windowed", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_queries_and_keys_looked_at_are_those_that_attention_takes(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(family, tmp_path).to(dtype)
    looked_at: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    attended: list[tuple[torch.Tensor, torch.Tensor, float, int | None]] = []
    attend = step_attention.attend

    def recorded(q: torch.Tensor, cache: Any, layer: int, **options: Any) -> torch.Tensor:
        keys, _ = cache.read_split(layer, 0, 0, len(q))
        attended.append((q.clone(), keys.to(dtype), options["scale"], cache.window(layer)))
        return attend(q, cache, layer, **options)

    def moments(*arguments: torch.Tensor) -> Any:
        looked_at.append(arguments)  # type: ignore[arg-type]
        return key_moments(*arguments)

    monkeypatch.setattr(step_attention, "attend", recorded)
    monkeypatch.setattr(key_calibration, "key_moments", moments)
    statics = calibrate(decoder, token_ids(), no_progress)
    assert len(looked_at) == len(attended) == decoder.config.num_layers
    for found, (q, k, received, frequencies), (used_q, used_k, scale, window) in zip(
        statics, looked_at, attended, strict=True
    ):
        assert q.dtype == k.dtype == dtype
        assert torch.equal(q, used_q)
        assert torch.equal(k.transpose(0, 1), used_k)
        # And from there on as the recipe says, by a plainer way.
        shared = probabilities(used_q, k, scale, window).sum(1)
        expected = shared.unflatten(0, (k.shape[1], -1)).sum(1)
        torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-4)
        head_dim = decoder.config.head_dim
        again = key_statics(
            key_moments(used_q, k, expected, frequencies), frequencies, feedback_dims(head_dim), horizon=512
        )
        for name in NAMES:
            torch.testing.assert_close(getattr(found, name), getattr(again, name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("window", [None, 1, 7, 128, 400])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_the_attention_that_keys_receive(
    num_tokens: int, window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    q = torch.randn(num_tokens, num_heads, 8, generator=generator)
    k = torch.randn(num_tokens, num_kv_heads, 8, generator=generator)
    received = received_attention(q, k, scale=0.7, window=window)
    expected = probabilities(q, k, 0.7, window).sum(1).unflatten(0, (num_kv_heads, -1)).sum(1)
    torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-5)


def test_the_values_fit_the_models_whole_context_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    horizons = set()

    def recorded(*arguments: Any, horizon: int) -> KeyStatics:
        horizons.add(horizon)
        return key_statics(*arguments, horizon=horizon)

    monkeypatch.setattr(key_calibration, "key_statics", recorded)
    decoder = tiny_decoder("llama", tmp_path)
    calibrate(decoder, token_ids(), no_progress)
    monkeypatch.setattr(key_calibration, "_MOST_HORIZON", 400)
    calibrate(decoder, token_ids(), no_progress)
    assert horizons == {512, 400}


def test_heads_that_int4_does_not_take_are_fed_nothing_back(tmp_path: Path) -> None:
    assert not native.takes_head_dim("int4", 20)
    statics = calibrate(tiny_decoder("llama_wide_heads", tmp_path), token_ids(), no_progress)
    assert all(torch.equal(layer.feedback, torch.ones(2, 20, 1, 1)) for layer in statics)


# --- the run ----------------------------------------------------------------------------------------------------------


def test_the_decoder_is_as_before_afterwards(tmp_path: Path) -> None:
    decoder = tiny_decoder("gemma3", tmp_path)
    tokens = token_ids(30)
    cache = new_cache(decoder)
    before = run_step(decoder, cache, {cache.open(): tokens})[0]
    calibrate(decoder, token_ids(), no_progress)
    cache = new_cache(decoder)
    assert torch.equal(run_step(decoder, cache, {cache.open(): tokens})[0], before)
    assert hooks_of(decoder) == 0


def test_a_step_that_another_thread_runs_meanwhile_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder("llama", tmp_path)
    alone = calibrate(decoder, token_ids(), no_progress)

    def in_between(*arguments: torch.Tensor) -> Any:
        if threading.current_thread() is threading.main_thread():
            cache = new_cache(decoder)
            thread = threading.Thread(target=run_step, args=(decoder, cache, {cache.open(): [5, 6, 7]}))
            thread.start()
            thread.join()
        return key_moments(*arguments)

    monkeypatch.setattr(key_calibration, "key_moments", in_between)
    for layer, expected in zip(calibrate(decoder, token_ids(), no_progress), alone, strict=True):
        assert all(torch.equal(getattr(layer, name), getattr(expected, name)) for name in NAMES)


def test_progress_counts_the_bytes_of_the_keys(tmp_path: Path) -> None:
    decoder = tiny_decoder("llama", tmp_path)
    seen: list[tuple[int, int | None]] = []
    calibrate(decoder, token_ids(), lambda stage, done, total: seen.append((done, total)))
    total = 200 * 3 * 2 * 8 * 4  # tokens, layers, KV heads, dims, bytes
    assert seen == [(done * total // 3, total) for done in range(4)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_whose_keys_are_no_numbers_is_refused(value: float, tmp_path: Path) -> None:
    decoder = tiny_decoder("llama", tmp_path)
    with torch.no_grad():
        decoder.get_parameter("layers.1.self_attn.k_proj.weight")[3, 4] = value
    with pytest.raises(NumericsError, match=r"keys or queries in layer 1 are not numbers .* try weights_format='fp32'"):
        calibrate(decoder, token_ids(), no_progress)
    assert hooks_of(decoder) == 0


def test_a_model_whose_scores_are_no_numbers_is_refused(tmp_path: Path) -> None:
    """Its keys and queries are, and no layer after this one would tell."""
    decoder = tiny_decoder("llama", tmp_path)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            decoder.get_parameter(f"layers.2.self_attn.{name}.weight").mul_(1e25)
    with pytest.raises(NumericsError, match=r"in layer 2 are not numbers .* or have products that are not"):
        calibrate(decoder, token_ids(), no_progress)


def hooks_of(decoder: Decoder) -> int:
    return sum(len(module._forward_pre_hooks) for module in decoder.modules())


# --- the text ---------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer with a token per so many letters."""

    def __init__(self, letters: int, first_id: int = 0) -> None:
        self.letters, self.first_id = letters, first_id

    def encode(self, text: str) -> list[int]:
        return [self.first_id + index % 50 for index in range(len(text) // self.letters)]


def shape(max_context: int, vocab_size: int = 100) -> ModelConfig:
    return ModelConfig(
        model_type="tiny", vocab_size=vocab_size, embed_dim=8, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8,
        max_context=max_context, rms_norm_eps=1e-6, tie_embeddings=True, windows=(None,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("max_context", "letters", "expected"),
    [(8192, 1, 2048), (8192, 7, 2048), (512, 1, 512), (64, 1, 64), (8192, 16, 1023)],
)
def test_a_window_of_the_text_that_fits_the_model(max_context: int, letters: int, expected: int) -> None:
    assert len(calibration_ids(Letters(letters), shape(max_context))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_context", "letters", "num_tokens"), [(63, 1, 63), (8192, 1000, 16)])
def test_a_model_that_takes_too_little_of_it_is_refused(max_context: int, letters: int, num_tokens: int) -> None:
    with pytest.raises(OptionError, match=f"64 tokens of text at least, .* takes {num_tokens}: choose bf16 or fp32"):
        calibration_ids(Letters(letters), shape(max_context))  # type: ignore[arg-type]


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    assert calibration_ids(Letters(1), shape(512, vocab_size=50))  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="gives token 50 for plain text, and the model has 50 tokens"):
        calibration_ids(Letters(1, first_id=1), shape(512, vocab_size=50))  # type: ignore[arg-type]


def test_the_text_is_another_than_the_one_that_quality_is_judged_on(alice: str) -> None:
    text = key_calibration._text()
    assert text.isascii()
    assert not {line for line in text.splitlines() if len(line) > 20} & set(alice.splitlines())


def test_another_text_or_recipe_has_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {recipe_hash()}
    monkeypatch.setattr(key_calibration, "_RECIPE_VERSION", key_calibration._RECIPE_VERSION + 1)
    hashes.add(recipe_hash())
    text = key_calibration._text()
    monkeypatch.setattr(key_calibration, "_text", lambda: text[:-1])
    hashes.add(recipe_hash())
    assert len(hashes) == 3


@pytest.mark.parametrize(("fixture", "first"), [("smollm2_gguf", "First"), ("gemma3_gguf", "<bos>")])
def test_the_real_models_begin_the_text_as_they_were_trained(
    fixture: str, first: str, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(fixture))
    ids = calibration_ids(model.tokenizer, model.config)
    assert len(ids) == 2048
    assert model.tokenizer.decode(ids[:1], skip_special_tokens=False) == first
    assert model.tokenizer.decode(ids).startswith("First Citizen:\nBefore we proceed any further")
