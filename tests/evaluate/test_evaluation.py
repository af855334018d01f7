"""Formats of the cache beside an exact one, on tiny models: exact where they are, and what plain PyTorch gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import TINY_CONFIGS, TinyModel, tiny_model
from torch.nn.functional import cross_entropy, kl_div

from cache_checks import bytes_in_use
from key_texts import identity_statics
from kvist.cache.kv_cache import KVCache
from kvist.errors import CacheFullError, NumericsError, OptionError
from kvist.evaluate import evaluation
from kvist.evaluate.eval_config import EvalConfig
from kvist.evaluate.evaluation import Evaluation, evaluate
from kvist.kernels.key_statics import KeyStatics
from kvist.kv_format import LayerFormats
from kvist.loading.key_calibration import calibrate
from kvist.loading.progress import no_progress
from kvist.models.decoder import Decoder

WINDOW, WINDOWS = 150, 3


@pytest.fixture(scope="module", params=["qwen3", "gemma3_capped"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(request.param, tmp_path_factory.mktemp("model"))


def token_ids(decoder: Decoder, seed: int = 0, windows: int = WINDOWS, window: int = WINDOW) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(decoder.config.vocab_size, (windows, window), generator=generator).tolist()


@pytest.fixture(scope="module")
def key_statics(tiny: TinyModel) -> Sequence[KeyStatics]:
    return calibrate(tiny.decoder, token_ids(tiny.decoder, seed=1, windows=1)[0], no_progress)


def config(*formats: str, window: int = WINDOW, windows: int = WINDOWS, every: int = 1) -> EvalConfig:
    return EvalConfig(tuple(map(LayerFormats.parse, formats)), window=window, windows=windows, every=every)


def last(
    decoder: Decoder,
    asked: EvalConfig,
    *,
    tested: Decoder | None = None,
    key_statics: Sequence[KeyStatics] | None = None,
    max_step_tokens: int = 2048,
) -> Evaluation:
    windows = token_ids(decoder, windows=asked.windows, window=asked.window)
    *_, found = evaluate(
        decoder, tested or decoder, windows, asked, key_statics=key_statics, max_step_tokens=max_step_tokens
    )
    return found


def figures(found: Evaluation) -> list[tuple[float, ...]]:
    """All that does not depend on the clock."""
    rows = [(row.kl_mean, row.kl_p99, row.top1_agreement, row.perplexity) for row in found.rows]
    return [(found.reference_perplexity,), *rows]


def test_an_exact_cache_does_not_diverge_at_all(tiny):
    found = last(tiny.decoder, config("fp32"))
    (row,) = found.rows
    assert (row.kl_mean, row.kl_p99, row.top1_agreement) == (0, 0, 1)
    assert row.perplexity == found.reference_perplexity
    assert found.positions == WINDOWS * (WINDOW - 1)


def test_formats_are_evaluated_through_the_twins_too(tiny, key_statics):
    """With plain layers and pages that no native kernel works on: close, and of other bits."""
    found = last(tiny.decoder, replace(config("int8", "int4"), pytorch=True), key_statics=key_statics)
    assert [row.kv_format for row in found.rows] == ["int8", "int8, PyTorch", "int4", "int4, PyTorch"]
    for native, twin in zip(found.rows[::2], found.rows[1::2], strict=True):
        assert native.kv_bytes_per_token == twin.kv_bytes_per_token
        assert native.kl_mean != twin.kl_mean
        assert native.kl_mean == pytest.approx(twin.kl_mean, rel=0.25)


def test_a_coarser_format_diverges_more_and_takes_less(tiny, key_statics):
    found = last(tiny.decoder, config("fp32", "bf16", "int8", "k=int8,v=int4", "int4"), key_statics=key_statics)
    fp32, bf16, int8, mixed, int4 = found.rows
    assert 0 == fp32.kl_mean < min(bf16.kl_mean, int8.kl_mean)
    assert int8.kl_mean < mixed.kl_mean < int4.kl_mean
    assert int8.top1_agreement > int4.top1_agreement
    assert all(row.kl_mean <= row.kl_p99 for row in found.rows)
    sizes = [row.kv_bytes_per_token for row in found.rows]
    assert sizes == sorted(set(sizes), reverse=True)


def test_the_reference_is_the_model_that_transformers_runs(tiny):
    windows = token_ids(tiny.decoder)
    with torch.no_grad():
        logits = [tiny.oracle(torch.tensor([window])).logits[0] for window in windows]
    loss = cross_entropy(
        torch.cat([rows[:-1] for rows in logits]), torch.cat([torch.tensor(window[1:]) for window in windows])
    )
    found = last(tiny.decoder, config("fp32"))
    assert found.reference_perplexity == pytest.approx(loss.exp().item(), rel=1e-4)


def test_figures_of_another_model_are_those_of_plain_pytorch(tmp_path):
    """Other weights in place of another format: all of the way but the format itself has a plain twin."""
    models = [tiny_model("llama", tmp_path / name) for name in ("exact", "tested")]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        theirs_by_name = {name.removeprefix("model."): value for name, value in models[1].oracle.named_parameters()}
        for name, ours in models[1].decoder.named_parameters():
            theirs = theirs_by_name[name]
            noise = 0.02 * torch.randn(ours.shape, generator=generator)
            ours.add_(noise)
            theirs.add_(noise)
    windows = token_ids(models[0].decoder)
    with torch.no_grad():
        exact, tested = (
            torch.cat([model.oracle(torch.tensor([window])).logits[0, :-1] for window in windows]) for model in models
        )
    targets = torch.cat([torch.tensor(window[1:]) for window in windows])
    kl = kl_div(tested.double().log_softmax(-1), exact.double().log_softmax(-1), log_target=True, reduction="none")
    kl = kl.sum(-1)

    (row,) = last(models[0].decoder, config("fp32"), tested=models[1].decoder).rows
    assert row.kl_mean == pytest.approx(kl.mean().item(), rel=1e-3)
    assert row.kl_p99 == pytest.approx(kl.quantile(0.99, interpolation="higher").item(), rel=1e-3)
    assert row.top1_agreement == pytest.approx((exact.argmax(-1) == tested.argmax(-1)).double().mean().item())
    assert row.perplexity == pytest.approx(cross_entropy(tested, targets).exp().item(), rel=1e-4)
    assert row.kl_mean_of_windows == pytest.approx(kl.view(WINDOWS, -1).mean(-1).tolist(), rel=1e-3)


def test_weights_and_arithmetic_in_bf16_are_tested_against_fp32(tiny):
    half = type(tiny.decoder)(tiny.decoder.config).eval().requires_grad_(False)
    half.load_state_dict(tiny.decoder.state_dict())
    half.to(torch.bfloat16)
    found = last(tiny.decoder, config("bf16", "fp32"), tested=half)
    assert found.reference_perplexity == last(tiny.decoder, config("fp32")).reference_perplexity
    assert all(row.kl_mean > 0 for row in found.rows)


def test_int4_diverges_less_with_the_statics_of_the_model(tmp_path):
    """Where keys have a mean: biases make one."""
    decoder = tiny_model("qwen2", tmp_path).decoder
    with torch.no_grad():
        for layer in range(decoder.config.num_layers):
            bias = decoder.get_parameter(f"layers.{layer}.self_attn.k_proj.bias")
            bias.copy_(10 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(layer)))
    fitted = calibrate(decoder, token_ids(decoder, seed=1, windows=1)[0], no_progress)
    means = []
    for statics in (fitted, identity_statics(decoder.config.layers)):
        (row,) = last(decoder, config("int4", windows=1), key_statics=statics).rows
        means.append(row.kl_mean)
    assert 0 < means[0] < 0.5 * means[1]
    with pytest.raises(ValueError, match="has no statics"):
        last(decoder, config("int4", windows=1))


def test_results_come_window_by_window_and_the_earlier_do_not_change(tiny, key_statics):
    asked = config("bf16", "int4")
    stream = list(evaluate(tiny.decoder, tiny.decoder, token_ids(tiny.decoder), asked, key_statics=key_statics))
    assert [found.windows for found in stream] == [1, 2, 3]
    of_windows = stream[-1].rows[1].kl_mean_of_windows
    assert len(set(of_windows)) == WINDOWS
    assert [found.rows[1].kl_mean_of_windows for found in stream] == [of_windows[:1], of_windows[:2], of_windows]
    assert stream[-1].rows[1].kl_mean == pytest.approx(sum(of_windows) / WINDOWS)
    alone = last(tiny.decoder, config("int4", windows=1), key_statics=key_statics)
    assert alone.rows[0].kl_mean == of_windows[0]


def test_formats_do_not_touch_one_another(tiny, key_statics):
    together = last(tiny.decoder, config("int4", "fp32", "int8"), key_statics=key_statics)
    for index, name in enumerate(("int4", "fp32", "int8")):
        alone = last(tiny.decoder, config(name), key_statics=key_statics)
        assert figures(alone)[1] == figures(together)[1 + index]


@pytest.mark.parametrize("rows", [1, 7, 149])
def test_blocks_of_positions_do_not_change_the_figures(tiny, key_statics, monkeypatch, rows):
    asked = config("bf16", "int4", windows=2)
    whole = last(tiny.decoder, asked, key_statics=key_statics)
    monkeypatch.setattr(evaluation, "block_rows", lambda vocab_size: rows)
    in_blocks = last(tiny.decoder, asked, key_statics=key_statics)
    for found, expected in zip(figures(in_blocks), figures(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("max_step_tokens", [1, 64, 100])
def test_steps_do_not_change_the_figures(tiny, key_statics, max_step_tokens):
    asked = config("fp32", "int8", windows=1)
    whole = last(tiny.decoder, asked, key_statics=key_statics)
    stepped = last(tiny.decoder, asked, key_statics=key_statics, max_step_tokens=max_step_tokens)
    assert stepped.rows[0].kl_mean == 0  # the reference takes the same steps
    assert stepped.reference_perplexity == pytest.approx(whole.reference_perplexity, rel=1e-4)
    assert stepped.rows[1].kl_mean == pytest.approx(whole.rows[1].kl_mean, rel=0.05)


@pytest.mark.parametrize("every", [2, 10, 148, 149, 150])
def test_every_nth_position_counts_alone(tiny, every, monkeypatch):
    scored: list[torch.Tensor] = []
    compare = evaluation.ReferenceBlock.compare
    monkeypatch.setattr(
        evaluation.ReferenceBlock,
        "compare",
        lambda *a: scored.append(found := compare(*a)) or found,  # type: ignore[func-returns-value]
    )
    whole = last(tiny.decoder, config("bf16", windows=1))
    few = last(tiny.decoder, config("bf16", windows=1, every=every))
    of_all, of_few = scored
    assert few.positions == len(range(0, WINDOW - 1, every))
    torch.testing.assert_close(of_few.kl, of_all.kl[::every], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(of_few.surprisal, of_all.surprisal[::every])
    assert whole.positions == WINDOW - 1


def test_runs_of_positions_have_means_of_their_own(tiny, monkeypatch):
    monkeypatch.setattr(evaluation, "POSITION_RUN", 64)
    (row,) = last(tiny.decoder, config("bf16")).rows
    firsts, means = zip(*row.kl_mean_of_positions, strict=True)
    assert firsts == (0, 64, 128)
    assert len(set(means)) == 3
    weights = (64, 64, WINDOW - 1 - 128)
    mean = sum(weight * part for weight, part in zip(weights, means, strict=True)) / (WINDOW - 1)
    assert mean == pytest.approx(row.kl_mean)


def test_the_least_window_scores_one_position(tiny):
    found = last(tiny.decoder, config("bf16", window=2, windows=1))
    assert found.positions == 1


def test_each_pass_is_told_when_it_begins(tiny):
    told: list[tuple[int, str]] = []
    asked = config("bf16", "k=bf16,v=fp32", windows=2)
    windows = token_ids(tiny.decoder, windows=2)
    list(evaluate(tiny.decoder, tiny.decoder, windows, asked, started=lambda *what: told.append(what)))
    names = ("reference", "bf16", "k=bf16,v=fp32")
    assert told == [(window, name) for window in (0, 1) for name in names]


def test_layers_may_have_formats_of_their_own(tiny, key_statics):
    found = last(tiny.decoder, config("bf16", "int4", "bf16/1:int4"), key_statics=key_statics)
    bf16, int4, one_layer = found.rows
    assert bf16.kl_mean < one_layer.kl_mean < int4.kl_mean
    assert bf16.kv_bytes_per_token > one_layer.kv_bytes_per_token > int4.kv_bytes_per_token
    with pytest.raises(OptionError, match="names layer 99"):
        last(tiny.decoder, config("bf16/99:int4"))


def test_a_head_that_a_format_cannot_take_is_refused_before_anything_is_computed(tmp_path: Path):
    assert TINY_CONFIGS["llama_wide_heads"][1]["head_dim"] == 20
    decoder = tiny_model("llama_wide_heads", tmp_path).decoder
    told: list[str] = []
    windows = token_ids(decoder, windows=1)
    asked = config("fp32", "int4", windows=1)
    with pytest.raises(OptionError, match="head dim of 20"):
        list(evaluate(decoder, decoder, windows, asked, started=lambda window, name: told.append(name)))
    assert told == []


def test_a_window_that_the_memory_cannot_hold_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(evaluation, "available_bytes", lambda: 10_000)
    with pytest.raises(CacheFullError, match="take a shorter window"):
        last(tiny.decoder, config("fp32"))


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    decoder = tiny_model("llama", tmp_path).decoder
    decoder.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match="not finite"):
        last(decoder, config("bf16"))


def test_an_interrupt_gives_the_memory_back(tiny, monkeypatch):
    caches: list[KVCache] = []

    class Interrupted(KVCache):
        """The last layer of a pass over bf16 is where Ctrl-C comes."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            caches.append(self)

        def view(self, spans):
            view = super().view(spans)
            write = view.write

            def write_or_stop(layer, k, v):
                write(layer, k, v)
                if str(self.config.kv_format) == "bf16" and layer == len(self.layers) - 1:
                    assert bytes_in_use(self) > 0
                    raise KeyboardInterrupt

            monkeypatch.setattr(view, "write", write_or_stop)
            return view

    monkeypatch.setattr(evaluation, "KVCache", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        last(tiny.decoder, config("fp32", "bf16"))
    assert [cache.used_bytes for cache in caches] == [0, 0, 0]
