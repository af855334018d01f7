"""Runs of a tiny model by the engine: what is computed, and what is found in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_files import hf_config, hf_state, write_tiny_directory

from kvist.bench import rates
from kvist.bench.format_runs import FormatRuns, Workload
from kvist.bench.probed import Measured
from kvist.bench.prompts import SHIPPED_TEXT, Prompts
from kvist.bench.rates import decode_rows, filled, prefill_rows, request_lengths, requests_rows
from kvist.bench.step_bytes import cache_read, weights_read
from kvist.cache.plan import CachePlan
from kvist.config import LayerConfig
from kvist.errors import CacheFullError, ContextFullError
from kvist.kv_format import LayerFormats
from kvist.loading import LoadedModel, load
from kvist.loading.progress import no_progress

BF16 = LayerFormats.parse("bf16")
WINDOW = 70
_GEMMA = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Gemma has layers with windows."""
    changes = _GEMMA | {"query_pre_attn_scalar": 32} if request.param == "gemma3_text" else {}
    state = hf_state(request.param.removesuffix("_text"))
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return load(write_tiny_directory(folder, state, config=hf_config(request.param, **changes)))


@pytest.fixture
def steps(loaded: LoadedModel) -> list[list[tuple[int, int]]]:
    """First position and tokens of each sequence, for each step that the model takes."""
    taken: list[list[tuple[int, int]]] = []

    def note(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        view = inputs[0].cache  # type: ignore[attr-defined]
        taken.append([(first, span.num_tokens) for first, span in zip(view.first_positions, view.spans, strict=True)])

    handle = loaded.decoder.register_forward_pre_hook(note)
    yield taken
    handle.remove()


def runs_of(loaded: LoadedModel, *lengths: int, new_tokens: int = 3, kept: bool = True) -> FormatRuns:
    workload = Workload(lengths, new_tokens, kept)
    workload.check(loaded, [BF16])
    return FormatRuns(loaded, BF16, Prompts(loaded.tokenizer, "twigs and branches"), workload, None)


def decoded(first: int, num_steps: int, batch: int = 1) -> list[list[tuple[int, int]]]:
    return [[(first + step, 1)] * batch for step in range(num_steps)]


def test_decode_finds_its_prompt_in_the_cache(loaded, steps) -> None:
    runs = runs_of(loaded, 200)
    assert runs.decode(200).seconds > 0
    assert steps == [[(0, 200)], *decoded(200, 3)]
    for _ in range(3):
        steps.clear()
        runs.decode(200)
        assert steps == decoded(199, 4)


def test_a_shorter_context_is_found_too_where_no_window_has_lost_it(loaded, steps) -> None:
    runs = runs_of(loaded, 400)
    runs.decode(400)
    steps.clear()
    runs.decode(100)
    windowed = any(layer.window is not None for layer in loaded.config.layers)
    assert steps == ([[(0, 100)], *decoded(100, 3)] if windowed else decoded(99, 4))


def test_a_batch_decodes_in_common_steps_after_texts_of_its_own(loaded, steps) -> None:
    runs = runs_of(loaded, 90, 90, 90)
    runs.decode(90, 3)
    steps.clear()
    runs.decode(90, 3)
    assert steps == decoded(89, 4, batch=3)
    steps.clear()
    runs.decode(90, 2)
    assert steps == decoded(89, 4, batch=2)


def test_prefill_begins_from_nothing_every_time(loaded, steps) -> None:
    runs = runs_of(loaded, 150, new_tokens=0, kept=False)
    for _ in range(2):
        assert runs.prefill(150).seconds > 0
    assert steps == [[(0, 150)], [(0, 150)]]
    assert runs.engine.kv_used_bytes() == 0


def test_requests_are_answered_all_at_once(loaded, steps) -> None:
    runs = runs_of(loaded, 100, 20, kept=False)
    assert runs.answer([100, 20]).seconds > 0
    assert steps[0] == [(0, 100), (0, 20)]
    assert len(steps) == 4
    assert runs.engine.kv_used_bytes() == 0


def test_what_cannot_be_run_is_refused(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextFullError, match="510 tokens and 4 that follow are 514, and the context of tiny is 512"):
        Workload((510,), 3, True).check(loaded, [BF16])
    monkeypatch.setattr("kvist.bench.format_runs.available_bytes", lambda: 1)
    with pytest.raises(CacheFullError, match=r"sequences of 40 tokens in all take .* in bf16, and 1 byte is free"):
        Workload((20, 20), 3, True).check(loaded, [BF16])


def test_caches_that_are_kept_must_fit_together(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32, workload = LayerFormats.parse("fp32"), Workload((300,), 3, True)
    needed = [workload.kv_bytes(workload.plan(loaded, kv_format)) for kv_format in (BF16, fp32)]
    monkeypatch.setattr("kvist.bench.format_runs.available_bytes", lambda: max(needed))
    Workload((300,), 3, False).check(loaded, [BF16, fp32])
    with pytest.raises(CacheFullError, match="in bf16, fp32"):
        workload.check(loaded, [BF16, fp32])


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_repeats_the_text_to_its_length(loaded) -> None:
    prompts = Prompts(loaded.tokenizer, "twig. ")
    assert loaded.tokenizer.decode(prompts.of(14)) == "twig. twig. tw"
    assert len(prompts.of(1)) == 1


def test_prompts_of_a_batch_begin_differently(loaded) -> None:
    prompts = Prompts(loaded.tokenizer, SHIPPED_TEXT.read_text(encoding="utf-8"))
    assert len({tuple(prompts.of(16, index)) for index in range(64)}) == 64


class _WithBos:
    bos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [7, 8, 9]


def test_every_prompt_begins_with_the_token_that_texts_begin_with() -> None:
    prompts = Prompts(_WithBos(), "x")  # type: ignore[arg-type]
    assert prompts.of(6) == [1, 7, 8, 9, 7, 8]
    assert prompts.of(4, 1)[0] == 1
    assert prompts.of(1) == [1]


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_a_token_reads_what_it_sees() -> None:
    plan = CachePlan([LayerConfig(1, 64, None), LayerConfig(1, 64, 100)], BF16, 64, 2048)
    of_layer = 2 * 2 * 64  # keys and values in bf16
    assert cache_read(plan, 50, 1) == 2 * of_layer * 51
    assert cache_read(plan, 200, 1) == of_layer * (201 + 100)
    assert cache_read(plan, 200, 3) == of_layer * (202 + 100)


def test_a_table_that_is_no_output_matrix_is_not_read(tmp_path: Path) -> None:
    tied = load(write_tiny_directory(tmp_path / "tied", hf_state("llama")))
    assert weights_read(tied) == tied.weights_bytes
    config = hf_config(tie_word_embeddings=False)
    untied = load(write_tiny_directory(tmp_path / "untied", hf_state("llama", tied=False), config=config))
    assert weights_read(untied) == weights_read(tied)
    assert untied.weights_bytes > tied.weights_bytes


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def took(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Every run takes as long as it is told."""

    def all_take(seconds: float) -> None:
        for name in ("decode", "prefill", "answer"):
            monkeypatch.setattr(FormatRuns, name, lambda *arguments: Measured(seconds))

    return all_take


def test_figures_of_decode(loaded, took) -> None:
    runs = runs_of(loaded, 100, 100)
    took(0.5)
    rows = decode_rows({"bf16": runs}, [20, 100], [1, 2], 10_000, 2, lambda: 1e6, no_progress)
    assert [(row.context, row.batch) for row in rows] == [(20, 1), (20, 2), (100, 1), (100, 2)]
    one, two = rows[0], rows[1]
    cache = cache_read(runs.plan, 20, 3)
    assert (one.tokens_per_s, two.tokens_per_s, one.ratio_to_one, two.ratio_to_one) == (6, 12, 1, 2)
    assert (one.weights_bytes, one.cache_bytes, two.cache_bytes) == (10_000, cache, 2 * cache)
    assert one.gb_per_s == pytest.approx(6 * (10_000 + cache) / 1e9)
    assert one.roofline_fraction == pytest.approx(one.tokens_per_s / one.limit_tokens_per_s)
    assert two.limit_tokens_per_s == pytest.approx(2 * 1e6 / (10_000 + 2 * cache))
    assert (one.spread_fraction, one.repetitions, one.discarded, one.is_steady) == (0, 2, 0, True)


def test_without_one_alone_there_is_no_ratio(loaded, took) -> None:
    took(0.5)
    (row,) = decode_rows({"bf16": runs_of(loaded, 9, 9)}, [9], [2], 1, 1, lambda: 1e6, no_progress)
    assert row.ratio_to_one is None


def test_a_run_around_which_the_bandwidth_moved_does_not_count(loaded, took) -> None:
    took(0.5)
    bandwidths = iter([1e6, 5e5, 5e5])
    (row,) = decode_rows({"bf16": runs_of(loaded, 9)}, [9], [1], 1, 1, lambda: next(bandwidths), no_progress)
    assert (row.repetitions, row.discarded, row.is_steady, row.bandwidth_gb_per_s) == (1, 1, True, 5e-4)


def test_figures_of_prefill_and_requests(loaded, took) -> None:
    runs = {"bf16": runs_of(loaded, 100, 50)}
    took(0.5)
    prefilled = prefill_rows(runs, [100, 10], 1, lambda: 1e6, no_progress)
    assert [(row.context, row.seconds, row.tokens_per_s) for row in prefilled] == [(100, 0.5, 200), (10, 0.5, 20)]
    (answered,) = requests_rows(runs, [100, 50], 1, lambda: 1e6, no_progress)
    assert (answered.seconds, answered.prompt_tokens, answered.new_tokens) == (0.5, 150, 8)
    assert answered.tokens_per_s == 316


def test_the_lengths_of_requests_are_always_the_same() -> None:
    lengths = request_lengths(32)
    assert (sum(lengths), lengths[:3], lengths == request_lengths(32)) == (28_306, [1305, 1028, 864], True)
    assert all(200 <= length <= 1500 for length in lengths)


@pytest.mark.parametrize("kept", [True, False])
def test_memory_counts_the_caches_that_stay(loaded, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(rates, "peak_bytes_of", lambda task: task() and 10_000)
    runs = {name: runs_of(loaded, 64, kept=kept) for name in ("a", "b")}
    figures = filled(runs, lambda one: one.decode(64), program_bytes=1000, weights_bytes=200, progress=no_progress)
    each = runs["a"].kv_bytes
    assert [one.kv_bytes for one in figures] == [each, 2 * each if kept else each]
    assert (figures[0].predicted_bytes, figures[0].peak_bytes) == (1200 + each, 10_000)
