"""Fitting a layer's merged projections to what its attention gave before, on a text, in closed form.

1. Values matter through the output projections. The best shared values are the strongest directions of all the heads'
   products `output @ value` together, for inputs with the second moment that the text has (reduced-rank regression).
   They need not be any head's own.
2. Keys matter through the queries that read them. Rope lets each plane of a key be multiplied by a complex number that
   the queries take back: so each plane's shared key is the strongest direction of the planes that it replaces. Norms
   over queries and keys take that freedom: under them keys become their mean.
3. The output projection once more, with the attention that the new keys give: least squares on what the new heads mix.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvist.convert.aligning import Groups, from_planes, planes, similar_groups
from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.merging import mean_heads
from kvist.convert.plain_attention import AttentionRules, attention, mixed_values

# Of the mean variance: what keeps directions that the text hardly shows at the weights that the layer had.
_RIDGE = 1e-4
# The same of the output projection, which has more to fit: with less it learns the text by heart.
_OUTPUT_RIDGE = 0.1
# Where weights are all zero there is nothing to divide by.
_TINY = 1e-300


def fit(
    weights: AttentionWeights,
    rules: AttentionRules,
    moment: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    num_kv_heads: int,
) -> tuple[AttentionWeights, Groups]:
    """Fit a layer with fewer KV heads.

    Args:
        weights: of the layer, float64.
        rules: what its attention does besides.
        moment: second moment of its inputs, float64, as in `aligning`.
        inputs: `[B, L, E]`, float32.
        targets: what its attention gave for them, `[B, L, E]`.
        num_kv_heads: how many are left.

    Returns:
        The fitted layer, float32, and the KV heads that became each of its own.
    """
    groups = similar_groups(weights, moment, num_kv_heads, turn_keys=rules.turns_with_rope)
    weights = weights.regrouped([head for group in groups for head in group])
    root, inverse = _roots(moment)
    shared = _with_shared_values(weights, root, inverse, num_kv_heads)
    if rules.turns_with_rope:
        shared = _with_shared_keys(shared, root, inverse, num_kv_heads)
    else:
        shared = replace(shared, key=mean_heads(shared.key, num_kv_heads))
    return _with_fitted_output(shared.map(torch.Tensor.float), rules, inputs, targets), groups


@torch.no_grad()
def missed_share(
    weights: AttentionWeights, rules: AttentionRules, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """The share of the targets' square that a layer misses."""
    missed = sum(
        float((attention(x, weights, rules) - y).double().square().sum()) for x, y in zip(inputs, targets, strict=True)
    )
    return missed / max(float(targets.double().square().sum()), _TINY)


def _with_shared_values(
    weights: AttentionWeights, root: torch.Tensor, inverse: torch.Tensor, num_kv_heads: int
) -> AttentionWeights:
    """Values that serve all query heads of a new group best, and their output projections."""
    head_dim, merged = weights.value.shape[1], weights.num_kv_heads // num_kv_heads
    size = merged * weights.group_size
    values, outputs = [], []
    for group in range(num_kv_heads):
        # What each query head makes of an input that it attends to alone.
        products = [
            weights.output[:, head] @ weights.value[head // weights.group_size] @ root
            for head in range(group * size, (group + 1) * size)
        ]
        strength = sum((product.T @ product for product in products), torch.zeros_like(root))
        directions = torch.linalg.eigh(strength).eigenvectors[:, -head_dim:]
        value = directions.T @ inverse
        scale = weights.value[group * merged : (group + 1) * merged].norm() / merged**0.5 / value.norm()  # as it was
        values.append(scale * value)
        outputs += [product @ directions / scale.clamp_min(_TINY) for product in products]
    return replace(weights, value=torch.stack(values), output=torch.stack(outputs, dim=1))


def _with_shared_keys(
    weights: AttentionWeights, root: torch.Tensor, inverse: torch.Tensor, num_kv_heads: int
) -> AttentionWeights:
    """For each plane the key that serves all query heads of a new group best, and what they multiply it by."""
    complex_root = root.to(torch.complex128)
    keys, queries = planes(weights.key) @ complex_root, planes(weights.query)
    merged, size = len(keys) // num_kv_heads, weights.group_size
    # A plane that large queries read counts more, `[K, D / 2]`.
    read = (queries @ complex_root).abs().square().sum(-1).view(len(keys), size, -1).sum(1).sqrt()
    shared, factors = [], []
    for first in range(0, len(keys), merged):
        own = keys[first : first + merged]
        weighted = (own * read[first : first + merged].unsqueeze(-1)).transpose(0, 1)  # [D / 2, merged, E]
        direction = torch.linalg.svd(weighted, full_matrices=False).Vh[:, 0]
        factor = (own * direction.conj()).sum(-1)  # [merged, D / 2]: a key is nearly factor * direction
        scale = factor.abs().square().mean(0).sqrt()  # the size that keys had
        shared.append(scale.unsqueeze(-1) * direction)
        factors.append(factor / scale.clamp_min(_TINY))
    taken_back = torch.cat(factors).conj().repeat_interleave(size, dim=0).unsqueeze(-1)
    key = torch.stack(shared) @ inverse.to(torch.complex128)
    return replace(weights, key=from_planes(key), query=from_planes(queries * taken_back))


@torch.no_grad()
def _with_fitted_output(
    weights: AttentionWeights, rules: AttentionRules, inputs: torch.Tensor, targets: torch.Tensor
) -> AttentionWeights:
    """The output projection with the least squared error on the text, drawn a little to the one that there is."""
    flat = weights.output.flatten(1).double()
    gram, cross = flat.new_zeros(flat.shape[1], flat.shape[1]), flat.new_zeros(flat.shape[1], flat.shape[0])
    for x, y in zip(inputs, targets, strict=True):
        mixed = mixed_values(x, weights, rules).double()
        gram += mixed.T @ mixed
        cross += mixed.T @ y.double()
    ridge = (_OUTPUT_RIDGE * gram.diagonal().mean()).clamp_min(_TINY)
    gram.diagonal().add_(ridge)
    output = torch.linalg.solve(gram, cross + ridge * flat.T).T
    return replace(weights, output=output.float().reshape(weights.output.shape))


def _roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric square root of a second moment and its inverse; directions that the text lacks count a little."""
    values, vectors = torch.linalg.eigh(moment)
    root = (values.clamp_min(0) + _RIDGE * values.mean()).clamp_min(_TINY).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
