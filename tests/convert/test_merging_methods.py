"""What each method keeps: heads that differ only by what it may undo are merged without loss."""

from __future__ import annotations

import gc

import pytest
import torch
from convert_fakes import FAMILIES, NORMED, TOKENS, change_state, logits_of_transformers, state_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvist.convert import to_gqa
from kvist.convert.aligning import similar_groups
from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.calibration import layers_on_text
from kvist.convert.fitting import fitted_projection, missed_share
from kvist.convert.gqa_config import GqaConfig
from kvist.convert.merging import mean_heads
from kvist.convert.source import Source
from kvist.evaluate.text_windows import EvaluationText, text_windows
from kvist.loading.progress import no_progress
from kvist.loading.tokenizer import Tokenizer

NUM_LAYERS, HEAD_DIM = 3, 8


def convert(source, num_kv_heads, method, text):
    destination = source.with_name(f"{method}-{num_kv_heads}")
    calibrated = text if method in ("aligned", "fitted") else None
    done = to_gqa(source, destination, num_kv_heads, config=GqaConfig(method, window=64, windows=8), text=calibrated)
    return destination, done


def lost(source, destination):
    """The largest difference of a logit from the source's."""
    return (logits_of_transformers(source) - logits_of_transformers(destination)).abs().max().item()


def with_related_heads(source, *, key, value, order=(0, 1, 2, 3)):
    """Change a checkpoint so that each two of its KV heads, as `order` pairs them, are made of one.

    Args:
        key, value: give the projection of a head `[D, E + bias]` from that of the head that it is made of.
    """
    generator = torch.Generator().manual_seed(3)
    changes = {}
    for layer in range(NUM_LAYERS):
        for side, change in (("k", key), ("v", value)):
            name = f"model.layers.{layer}.self_attn.{side}_proj"
            state = load_file(source / "model.safetensors")
            matrix = state[f"{name}.weight"]
            bias = state.get(f"{name}.bias")
            together = matrix if bias is None else torch.cat((matrix, bias.unsqueeze(1)), 1)
            heads = together.reshape(4, -1, together.shape[1]).clone()
            for first, second in (order[:2], order[2:]):
                heads[second] = change(heads[first], generator)
            flat = heads.reshape(together.shape)
            changes[f"{name}.weight"] = flat[:, : matrix.shape[1]].contiguous()
            if bias is not None:
                changes[f"{name}.bias"] = flat[:, -1].contiguous()
    change_state(source, changes)
    return source


def same(head, generator):
    return head


def turned(head, generator):
    """By a random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(len(head), len(head), generator=generator)).Q @ head


def turned_by_angles(head, generator):
    """Plane by plane, as rope turns."""
    return _times(head, torch.polar(torch.ones(len(head) // 2), 6 * torch.rand(len(head) // 2, generator=generator)))


def turned_and_scaled(head, generator):
    """The same, and each plane longer or shorter."""
    factors = torch.randn(2, len(head) // 2, generator=generator)
    return _times(head, torch.complex(*factors))


def mixed(head, generator):
    """By a random matrix that is not far from singular nor orthogonal."""
    return (torch.eye(len(head)) + 0.3 * torch.randn(len(head), len(head), generator=generator)) @ head


def _times(head, factors):
    planes = factors.unsqueeze(1) * torch.complex(*head.chunk(2))
    return torch.cat((planes.real, planes.imag))


# --- what the layers see ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_a_text_give_what_transformers_gives(checkpoint, family):
    source = checkpoint(family)
    oracle = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in oracle.model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, _, kwargs, out: seen.append((kwargs["hidden_states"][0], out[0][0])), with_kwargs=True
        )
    with torch.inference_mode():
        oracle(torch.tensor([TOKENS]))
    opened = Source.open(source, None, no_progress)
    layers = list(layers_on_text(opened, [TOKENS]))
    assert len(layers) == len(seen) == opened.config.num_layers
    for index, (layer, (inputs, outputs)) in enumerate(zip(layers, seen, strict=True)):
        bias = oracle.model.layers[index].self_attn.o_proj.bias
        assert (layer.inputs[0] - inputs).abs().max() < 1e-4
        assert (layer.outputs[0] + (0 if bias is None else bias) - outputs).abs().max() < 1e-4
    assert all(parameter.is_meta for parameter in opened.decoder.layers.parameters()), "a layer was left in memory"


def tensors_in_memory():
    """Bytes of all storages that Python reaches."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if issubclass(type(tensor), torch.Tensor) and not tensor.is_meta
    }
    return sum(storages.values())


def test_what_lies_in_memory_while_a_layer_is_fitted(checkpoint, text, monkeypatch):
    """The text's hidden states four times, and 20 matrices of `[E, E]` in float64, the layer itself among them."""
    source, length, width = checkpoint(), 24, 64
    peaks: dict[int, int] = {}
    solve, calls = torch.cholesky_solve, 0
    before = tensors_in_memory()

    def counted(*arguments):
        nonlocal calls
        result, calls = solve(*arguments), calls + 1
        if calls % 5 == 0:  # looking takes a while
            peaks[windows] = max(peaks.get(windows, 0), tensors_in_memory() - before)
        return result

    monkeypatch.setattr(torch, "cholesky_solve", counted)
    for windows in (4, 64):
        made = source.with_name(f"made_{windows}")
        to_gqa(source, made, 1, config=GqaConfig("fitted", window=length, windows=windows), text=text)
    hidden_bytes, matrix_bytes = length * width * 4, width * width * 8
    assert 3.9 < (peaks[64] - peaks[4]) / (60 * hidden_bytes) < 4.1
    assert (peaks[4] - 4 * 4 * hidden_bytes) / matrix_bytes < 21


# --- aligned ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama_llama3_rope", "llama_mqa_biased", "mistral_windowed", "qwen2"])
def test_aligning_undoes_turns_that_rope_permits(checkpoint, text, family):
    source = with_related_heads(checkpoint(family), key=turned_by_angles, value=turned)
    aligned, done = convert(source, 2, "aligned", text)
    assert lost(source, aligned) < 2e-3
    assert max(layer.missed for layer in done.layers) < 1e-6
    assert lost(source, convert(source, 2, "mean", text)[0]) > 0.1


@pytest.mark.parametrize("family", NORMED)
def test_under_norms_values_alone_are_turned(checkpoint, text, family):
    source = with_related_heads(checkpoint(family), key=same, value=turned)
    assert lost(source, convert(source, 2, "aligned", text)[0]) < 2e-3
    assert lost(source, convert(source, 2, "mean", text)[0]) > 0.05


def test_heads_that_agree_are_found_wherever_they_are(checkpoint, text):
    source = with_related_heads(checkpoint(), key=turned_by_angles, value=turned, order=(0, 3, 2, 1))
    aligned, done = convert(source, 2, "aligned", text)
    assert {layer.groups for layer in done.layers} == {((0, 3), (1, 2))}
    assert lost(source, aligned) < 2e-3


def test_no_grouping_is_more_alike_than_the_one_that_is_found():
    """Against every partition of six heads into pairs."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(6, 4, 10, generator=generator, dtype=torch.float64)
    heads[4], heads[5] = heads[1] + 0.1 * heads[4], heads[2] + 0.1 * heads[5]
    weights = AttentionWeights(heads, heads, heads, torch.randn(10, 6, 4, generator=generator, dtype=torch.float64))
    groups = similar_groups(weights, torch.eye(10, dtype=torch.float64), 3, turn_keys=True)
    assert groups == ((0, 3), (1, 4), (2, 5))


# --- fitted -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama_mqa_biased", "mistral_windowed", "qwen2"])
def test_fitting_undoes_whatever_queries_and_outputs_can(checkpoint, text, family):
    source = with_related_heads(checkpoint(family), key=turned_and_scaled, value=mixed)
    fitted, done = convert(source, 2, "fitted", text)
    assert lost(source, fitted) < 5e-3
    assert max(layer.missed for layer in done.layers) < 1e-5
    assert lost(source, convert(source, 2, "aligned", text)[0]) > 0.1


@pytest.mark.parametrize("family", NORMED)
def test_fitting_under_norms_undoes_what_is_done_to_values(checkpoint, text, family):
    source = with_related_heads(checkpoint(family), key=same, value=mixed)
    assert lost(source, convert(source, 2, "fitted", text)[0]) < 5e-3
    assert lost(source, convert(source, 2, "aligned", text)[0]) > 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_fitting_misses_less_of_the_attention_than_aligning(checkpoint, text, family):
    source = checkpoint(family)
    fitted, aligned = (convert(source, 1, method, text)[1].layers for method in ("fitted", "aligned"))
    for one, other in zip(fitted, aligned, strict=True):
        assert one.missed < other.missed


def test_a_layer_of_zeros_is_fitted_to_zeros(checkpoint, text):
    source = checkpoint()
    names = [f"model.layers.1.self_attn.{side}_proj.weight" for side in "qkvo"]
    state = state_of(source)
    change_state(source, {name: torch.zeros_like(state[name]) for name in names})
    for method in ("aligned", "fitted"):
        destination, _ = convert(source, 1, method, text)
        assert all(torch.isfinite(tensor).all() for tensor in state_of(destination).values())
        assert not state_of(destination)[names[3]].any() or not state_of(destination)[names[2]].any()


@pytest.mark.parametrize(("noise", "ridge"), [(0.01, 0.03), (1.3, 0.3), (3.0, 1.0)])
def test_the_ridge_is_the_one_that_serves_parts_of_the_text_that_were_kept_apart(noise, ridge):
    """Against least squares over rows, with the ridge as rows of its own."""
    generator = torch.Generator().manual_seed(0)
    rows, start, change, errors = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((4, 20, 12), (12, 5), (12, 5), (4, 20, 5))
    )
    targets = rows @ (start + 0.3 * change) + noise * errors
    missed, whole = {}, {}
    for one in (0.03, 0.1, 0.3, 1.0):
        total = 0.0
        for apart in (0, 1, 2, 3, None):
            others = [part for part in range(4) if part != apart]
            x, y = rows[others].flatten(0, 1), targets[others].flatten(0, 1)
            strength = one * x.square().sum(0).mean()
            drawn = strength.sqrt() * torch.eye(12, dtype=torch.float64)
            output = torch.linalg.lstsq(torch.cat((x, drawn)), torch.cat((y, drawn @ start))).solution
            if apart is None:
                whole[one] = output
                continue
            total += float((rows[apart] @ output - targets[apart]).square().sum())
        missed[one] = total
    assert min(missed, key=missed.__getitem__) == ridge
    parts = [([x[:7], x[7:]], [y[:7], y[7:]]) for x, y in zip(rows, targets, strict=True)]
    torch.testing.assert_close(fitted_projection(parts, start), whole[ridge])


def test_parts_without_a_value_that_is_not_zero_are_fitted():
    """What the other parts leave of the second moments is rounding alone."""
    generator = torch.Generator().manual_seed(0)
    rows, targets = (torch.randn(4, 20, n, generator=generator, dtype=torch.float64) for n in (12, 5))
    rows[:3] = 0
    parts = [([x], [y]) for x, y in zip(rows, targets, strict=True)]
    assert fitted_projection(parts, torch.zeros(12, 5, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("windows", [1, 3])
def test_fewer_windows_than_parts_are_cut(checkpoint, text, windows):
    destination = checkpoint().with_name("fitted")
    config = GqaConfig("fitted", window=64, windows=windows)
    done = to_gqa(checkpoint(), destination, 1, config=config, text=text)
    assert all(0 < layer.missed < 0.9 for layer in done.layers)


@pytest.mark.parametrize("family", ["llama", "llama_mqa_biased"])
def test_heads_of_more_dims_than_the_model_are_fitted(checkpoint, text, family):
    source = checkpoint(family, hidden_size=32, head_dim=64)
    fitted, aligned = (convert(source, 2, method, text) for method in ("fitted", "aligned"))
    for one, other in zip(fitted[1].layers, aligned[1].layers, strict=True):
        assert one.missed < other.missed
    assert logits_of_transformers(fitted[0]).isfinite().all()


@pytest.mark.parametrize("method", ["aligned", "fitted"])
def test_what_is_missed_is_that_of_the_weights_as_they_are_stored(checkpoint, text, method):
    source = checkpoint("qwen2", dtype=torch.bfloat16)
    destination, done = convert(source, 1, method, text)
    opened, made = (Source.open(path, None, no_progress) for path in (source, destination))
    read = EvaluationText.read(text).text
    windows = text_windows(Tokenizer.from_directory(source), opened.config, read, GqaConfig(method, 64, 8))
    for layer in layers_on_text(opened, windows):
        stored = made.attention_weights(layer.index).map(torch.Tensor.float)
        missed = missed_share(stored, layer.rules, layer.inputs, layer.outputs)
        assert done.layers[layer.index].missed == pytest.approx(missed, rel=1e-6)


# --- means ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("copies", [2, 3, 5, 7, 11, 64])
def test_the_mean_of_equal_heads_is_the_head_to_the_bit(dtype, copies):
    patterns = torch.randint(-(2**15), 2**15, (20_000,), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    head = (patterns.view(dtype) if dtype.itemsize == 2 else patterns.repeat_interleave(2).view(dtype)[:20_000]).clone()
    head[~head.isfinite()] = -0.0
    merged = mean_heads(head.repeat(copies, 1, 1), 1)
    assert torch.equal(merged.view(torch.uint8).flatten(), head.view(torch.uint8))
