"""The small decoder: a Llama by its weights, the same with and without a cache, and one that learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import close
from tiny import new_cache, run_step, tiny_model

from kvist.attention import Decoder, DecoderConfig, DecoderLayer
from kvist.config import RopeConfig
from kvist.errors import OptionError

CONFIG = DecoderConfig(vocab_size=61, embed_dim=24, num_layers=3, num_heads=6, num_kv_heads=2)
# As `tiny.TINY_CONFIGS` has them.
LLAMA = DecoderConfig(
    vocab_size=199, embed_dim=48, num_layers=3, num_heads=6, num_kv_heads=2, mlp_dim=80, tie_embeddings=False
)


def decoder(**changes: object) -> Decoder:
    """A random one whose weights are large enough for tokens to differ clearly."""
    torch.manual_seed(0)
    made = Decoder(replace(CONFIG, **changes)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return made


def prompts(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama_mha_tied", {"num_kv_heads": 6, "tie_embeddings": True}),
        ("llama_wide_heads", {"head_dim": 20}),
    ],
)
def test_it_loads_a_llamas_weights_and_gives_its_logits(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    tiny = tiny_model(family, tmp_path)
    ours = Decoder(replace(LLAMA, **changes)).eval()  # type: ignore[arg-type]
    ours.load_state_dict(tiny.decoder.state_dict(), strict=True)
    token_ids = prompts(1, 23)
    with torch.no_grad():
        given, _ = ours(token_ids)
        close(given, tiny.oracle(token_ids).logits)
    # And what the models compute over pages, with the same core.
    cache = new_cache(tiny.decoder)
    sequence = cache.open()
    packed = run_step(tiny.decoder, cache, {sequence: token_ids[0].tolist()})[sequence]
    close(given[0], packed)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_generation_is_the_same_with_a_cache_without_and_over_pages(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.sampled_from([6, 3, 2, 1]), "num_kv_heads")
    pre_norm = data.draw(st.booleans(), "pre_norm")
    rope = data.draw(st.sampled_from([None, RopeConfig(50.0)]), "rope")
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), "lengths")
    left, new = data.draw(st.booleans(), "left"), data.draw(st.integers(0, 6), "new")
    model = decoder(num_kv_heads=num_kv_heads, pre_norm=pre_norm, rope=rope)
    longest = max(lengths)
    token_ids, mask = prompts(len(lengths), longest), torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, longest - length :] = left
        mask[row, :length] |= not left
    given = model.generate(token_ids, new, mask=mask)
    assert given.shape == (len(lengths), longest + new)
    assert torch.equal(given[:, :longest], token_ids)
    assert torch.equal(given, model.generate(token_ids, new, mask=mask, use_cache=False))
    pages = model.paged_caches(len(lengths), longest + new)
    assert torch.equal(given, model.generate(token_ids, new, mask=mask, caches=pages))
    for row in range(len(lengths)):  # and every row as it is alone
        alone = model.generate(token_ids[row, mask[row]].unsqueeze(0), new)
        assert torch.equal(given[row, longest:], alone[0, alone.shape[1] - new :])


@pytest.mark.parametrize("use_cache", [True, False])
def test_with_a_cache_the_prompt_is_computed_once_and_then_a_token_a_step(use_cache: bool) -> None:
    model, lengths = decoder(), []
    model.layers[0].register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
    model.generate(prompts(1, 4), 5, use_cache=use_cache)
    assert lengths == ([4, 1, 1, 1, 1] if use_cache else [4, 5, 6, 7, 8])


def test_caches_that_earlier_tokens_left_can_be_gone_on_from() -> None:
    model, token_ids = decoder(), prompts(2, 9)
    with torch.no_grad():
        _, caches = model(token_ids[:, :5])
    assert [cache.length for cache in caches] == [5, 5, 5]
    expected = model.generate(token_ids, 6)
    assert torch.equal(model.generate(token_ids[:, 5:], 6, caches=caches), expected[:, 5:])


def test_pre_and_post_norm_are_what_they_say() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 24)
    pre, post = (DecoderLayer(24, 6, 2, pre_norm=pre_norm) for pre_norm in (True, False))
    with torch.no_grad():
        for layer in (pre, post):
            for name, parameter in layer.named_parameters():
                if "norm" in name:
                    parameter.normal_(1, 0.3)
        y = x + pre.self_attn(pre.input_layernorm(x))[0]
        torch.testing.assert_close(pre(x)[0], y + pre.mlp(pre.post_attention_layernorm(y)))
        y = post.post_attention_layernorm(x + post.self_attn(x)[0])
        torch.testing.assert_close(post(x)[0], post.post_feedforward_layernorm(y + post.mlp(y)))
    assert Decoder(replace(CONFIG, pre_norm=False)).norm is None


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", torch.nn.SiLU()),
        ("relu", torch.nn.ReLU()),
        ("gelu", torch.nn.GELU()),
        ("gelu_tanh", torch.nn.GELU(approximate="tanh")),
    ],
)
def test_the_activation_is_the_one_asked_for(activation: str, function: torch.nn.Module) -> None:
    mlp = DecoderLayer(24, 6, 2, activation=activation).mlp
    x = torch.randn(3, 24)
    torch.testing.assert_close(mlp(x), mlp.down_proj(function(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_dropout_is_off_while_generating_and_as_it_was_after() -> None:
    model = decoder(dropout=0.5).train()
    token_ids = prompts(1, 4)
    assert torch.equal(model.generate(token_ids, 8), decoder().generate(token_ids, 8))
    assert model.training
    assert (model(token_ids)[0] - model(token_ids)[0]).abs().max() > 0.01


def test_generating_leaves_each_module_in_its_own_mode() -> None:
    model = decoder(dropout=0.5).train()
    model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    model.generate(prompts(1, 4), 2)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert set(before.values()) == {True, False}


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
def test_it_learns_a_pattern_and_then_writes_it(num_kv_heads: int) -> None:
    torch.manual_seed(0)
    model = Decoder(replace(CONFIG, num_kv_heads=num_kv_heads, num_layers=2, vocab_size=7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.tensor([0, 3, 1, 4, 2, 6, 5]).repeat(4).unsqueeze(0)
    losses = []
    for _ in range(60):
        logits, _ = model(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5 > 0.2 > losses[-1]
    assert model.generate(text[:, :4], 10)[0].tolist() == text[0, :14].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "^num_kv_heads is 4: it must divide the 6 query heads"),
        ({"activation": "gelu_tan"}, "^unknown activation 'gelu_tan': did you mean 'gelu_tanh'"),
        ({"vocab_size": 0}, "^vocab_size is 0"),
        ({"num_layers": 0}, "^num_layers is 0"),
        ({"mlp_dim": 0}, "^mlp_dim is 0"),
    ],
)
def test_what_cannot_be_made_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Decoder(replace(CONFIG, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "mask",
    [torch.ones(1, 4, 4, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 4, dtype=torch.long)],
    ids=["pairs", "short", "integers"],
)
def test_a_mask_that_does_not_fit_the_prompts_is_refused(mask: torch.Tensor, use_cache: bool) -> None:
    with pytest.raises(OptionError, match=r"^mask is \(.*\) torch.\w+: it must be bool, \(1, 4\)$"):
        decoder().generate(prompts(1, 4), 2, mask=mask, use_cache=use_cache)


def test_what_cannot_be_generated_is_refused() -> None:
    model, token_ids = decoder(), prompts(1, 4)
    with pytest.raises(OptionError, match=r"^there are caches, and use_cache is False"):
        model.generate(token_ids, 1, use_cache=False, caches=model.paged_caches(1, 8))
    with pytest.raises(OptionError, match=r"^there are 2 caches for 3 layers"):
        model.generate(token_ids, 1, caches=model.paged_caches(1, 8)[:2])
    with pytest.raises(OptionError, match="with one token at least"):
        model.generate(token_ids[:, :0], 1)
    with pytest.raises(OptionError, match=r"^new_tokens is -1"):
        model.generate(token_ids, -1)
