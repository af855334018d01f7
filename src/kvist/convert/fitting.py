"""Fitting a layer's merged projections to what its attention gave before, on a text, in closed form.

1. Values matter through the output projections. The best shared values are the strongest directions of all the heads'
   products `output @ value` together, for inputs with the second moment that the text has (reduced-rank regression).
   They need not be any head's own.
2. Keys matter through the queries that read them. Rope lets each plane of a key be multiplied by a complex number that
   the queries take back: so each plane's shared key is the strongest direction of the planes that it replaces. Norms
   over queries and keys take that freedom: under them keys become their mean.
3. The output projection once more, with the attention that the new keys give: least squares on what the new heads mix,
   drawn to the projection of step 1 by a ridge. How strongly is chosen for each layer on parts of the text that are
   kept apart: the fewer tokens there are for a layer's weights, the sooner it would learn them by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvist.convert.aligning import Groups, from_planes, planes, similar_groups
from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.merging import mean_heads
from kvist.convert.plain_attention import AttentionRules, attention, mixed_values

# Of the mean variance: what keeps directions that the text hardly shows at the weights that the layer had.
_RIDGE = 1e-4
# The same of the output projection, which has more to fit: from the weakest to the strongest.
_OUTPUT_RIDGES = (0.03, 0.1, 0.3, 1.0)
# Into how many parts the text is dealt to choose one: each is judged on once, after a fit to the others.
_PARTS = 4
# Of the whole text's mean variance: what keeps the moments of some parts, which may be all zero, above what rounding
# leaves of the others.
_LEAST_STRENGTH = 1e-9
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
    shared = shared.map(torch.Tensor.float)
    del weights, root, inverse, moment  # or they would lie in memory beside those of the output projection
    return _with_fitted_output(shared, rules, inputs, targets), groups


@torch.no_grad()
def missed_share(
    weights: AttentionWeights, rules: AttentionRules, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """The share of the targets' square that a layer misses."""
    missed = total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        missed += float((attention(x, weights, rules) - y).double().square().sum())
        total += float(y.double().square().sum())
    return missed / max(total, _TINY)


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
        # A head may have more dims than there are directions: the others stay empty.
        directions = torch.nn.functional.pad(directions, (head_dim - directions.shape[1], 0))
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
    start = weights.output.flatten(1).T.double()  # [H D, E]
    parts: list[_Part] = [([], []) for _ in range(_PARTS)]
    pieces = -(-_PARTS // len(inputs))  # of a window, where there are fewer than parts
    dealt = 0
    for x, y in zip(inputs, targets, strict=True):
        mixed = mixed_values(x, weights, rules)
        for rows, wanted in zip(mixed.chunk(pieces), y.chunk(pieces), strict=True):
            parts[dealt % _PARTS][0].append(rows)
            parts[dealt % _PARTS][1].append(wanted)
            dealt += 1
    output = fitted_projection(parts, start)
    return replace(weights, output=output.T.float().reshape(weights.output.shape))


_Part = tuple[list[torch.Tensor], list[torch.Tensor]]


def fitted_projection(parts: Sequence[_Part], start: torch.Tensor) -> torch.Tensor:
    """Least squares, drawn to a projection by the ridge with which parts are missed least by fits to the other parts.

    Beside the parts and `start` lie four matrices of `[H D, H D]` and four of `[H D, E]` at most, in float64.

    Args:
        parts: of a text, each some blocks of rows that the projection takes, `[L, H D]`, and of what should come out,
            `[L, E]`.
        start: the projection that a fit is drawn to, `[H D, E]`, float64.

    Returns:
        `[H D, E]`, float64.
    """
    gram, cross = start.new_zeros(len(start), len(start)), torch.zeros_like(start)
    for part in parts:
        _add_moments(gram, cross, part)
    least = float(_LEAST_STRENGTH * gram.diagonal().mean())
    missed = [0.0] * len(_OUTPUT_RIDGES)
    for part in parts:
        own_gram, own_cross = torch.zeros_like(gram), torch.zeros_like(cross)
        _add_moments(own_gram, own_cross, part)
        gram -= own_gram
        cross -= own_cross
        for number, ridge in enumerate(_OUTPUT_RIDGES):
            output = _solved(gram, cross, start, ridge, least)
            # The squared error, less the square of what should come out: the same for each ridge.
            missed[number] += float(((own_gram @ output).sub_(own_cross, alpha=2).mul_(output)).sum())
        gram += own_gram
        cross += own_cross
    del own_gram, own_cross
    return _solved(gram, cross, start, _OUTPUT_RIDGES[missed.index(min(missed))], least)


def _add_moments(gram: torch.Tensor, cross: torch.Tensor, part: _Part) -> None:
    """Add a part's second moments, and its products with what should come out, in place."""
    for rows, wanted in zip(*part, strict=True):
        transposed = rows.T.double()
        gram.addmm_(transposed, transposed.T)
        cross.addmm_(transposed, wanted.double())


def _solved(gram: torch.Tensor, cross: torch.Tensor, start: torch.Tensor, ridge: float, least: float) -> torch.Tensor:
    """`[H D, E]`: least squares by their second moments, drawn to `start` by a ridge of the mean variance."""
    strength = max(ridge * float(gram.diagonal().mean()), least, _TINY)
    drawn = gram.clone()
    drawn.diagonal().add_(strength)
    return torch.cholesky_solve(torch.add(cross, start, alpha=strength), torch.linalg.cholesky(drawn))


def _roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric square root of a second moment and its inverse; directions that the text lacks count a little."""
    values, vectors = torch.linalg.eigh(moment)
    root = (values.clamp_min(0) + _RIDGE * values.mean()).clamp_min(_TINY).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
