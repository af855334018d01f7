"""Aligning KV heads before they are merged (arXiv 2412.20677): what is averaged should agree.

A head's values may be turned by any orthogonal matrix, since the output projection can turn them back. Its keys may
only be turned as rope turns them, each plane by an angle, since that alone commutes with rope; the queries that read
them are turned alike, and the scores stay. Norms over queries and keys commute with no turn. So heads are turned onto
the mean of their group until they agree as well as they can, and groups are chosen so that they do.

Agreement is measured where it counts, on the inputs that the layer sees: `moment` is their second moment,
`E[x x^T]`, `[E, E]` (`E + 1` with biases).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from kvist.convert.attention_weights import AttentionWeights
from kvist.convert.merging import mean_of_each

# Turning one head after another onto the mean of the others settles quickly; a few more rounds cost nothing.
_ROUNDS = 20

Groups = tuple[tuple[int, ...], ...]


def align_and_merge(
    weights: AttentionWeights, moment: torch.Tensor, num_kv_heads: int, *, turn_keys: bool
) -> tuple[AttentionWeights, Groups]:
    """Group, turn and merge the KV heads of a layer.

    Args:
        weights: float64.
        moment: of the layer's inputs, float64.
        num_kv_heads: how many are left, a divisor of those that there are.
        turn_keys: whether keys and queries may be turned: not under norms.

    Returns:
        The merged layer, and the KV heads that became each of its own.
    """
    groups = similar_groups(weights, moment, num_kv_heads, turn_keys=turn_keys)
    weights = weights.regrouped([head for group in groups for head in group])
    size = weights.num_kv_heads // num_kv_heads
    for first in range(0, weights.num_kv_heads, size):
        heads = list(range(first, first + size))
        weights = _with_turned_values(weights, heads, moment)
        if turn_keys:
            weights = _with_turned_keys(weights, heads, moment)
    return mean_of_each(weights, num_kv_heads), groups


def similar_groups(weights: AttentionWeights, moment: torch.Tensor, num_groups: int, *, turn_keys: bool) -> Groups:
    """Groups of KV heads that agree well once they are aligned, each ascending.

    Begins with neighbours, and swaps heads between groups as long as that raises the sum of the similarities within
    groups: never worse than neighbours, and the same for the same weights.
    """
    size = weights.num_kv_heads // num_groups
    groups = [list(range(first, first + size)) for first in range(0, weights.num_kv_heads, size)]
    if num_groups == 1:
        return tuple(map(tuple, groups))
    similarity = _similarities(weights, moment, turn_keys=turn_keys).tolist()

    def gain(one: list[int], i: int, other: list[int], j: int) -> float:
        """What swapping heads `i` of one group and `j` of another adds."""
        change = 0.0
        for mate in one:
            if mate != i:
                change += similarity[j][mate] - similarity[i][mate]
        for mate in other:
            if mate != j:
                change += similarity[i][mate] - similarity[j][mate]
        return change

    improved = True
    while improved:
        improved = False
        for one, other in combinations(groups, 2):
            best = max(((gain(one, i, other, j), i, j) for i in one for j in other), key=lambda found: found[0])
            if best[0] > 1e-9:
                _, i, j = best
                one[one.index(i)], other[other.index(j)] = j, i
                improved = True
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def planes(heads: torch.Tensor) -> torch.Tensor:
    """`[n, D / 2, E]` complex of heads `[n, D, E]`: rope multiplies each row by a number of absolute value one."""
    return torch.complex(*heads.chunk(2, dim=1))


def from_planes(complex_heads: torch.Tensor) -> torch.Tensor:
    """The other way."""
    return torch.cat((complex_heads.real, complex_heads.imag), dim=1)


def _similarities(weights: AttentionWeights, moment: torch.Tensor, *, turn_keys: bool) -> torch.Tensor:
    """How well each two KV heads agree once aligned, `[K, K]`: the cosine of their keys plus that of their values."""
    num_heads = weights.num_kv_heads
    similarity = torch.zeros(num_heads, num_heads, dtype=torch.float64)
    keys = planes(weights.key) if turn_keys else weights.key
    weighted_keys, weighted_values = keys @ moment.to(keys.dtype), weights.value @ moment
    key_norms = (weighted_keys * keys.conj()).sum((1, 2)).real.sqrt()
    value_norms = (weighted_values * weights.value).sum((1, 2)).sqrt()
    for i, j in combinations(range(num_heads), 2):
        overlaps = (weighted_keys[i] * keys[j].conj()).sum(1)
        agree = overlaps.abs().sum() if turn_keys else overlaps.sum()
        keys_agree = agree / (key_norms[i] * key_norms[j]).clamp_min(1e-30)
        values = torch.linalg.svdvals(weighted_values[i] @ weights.value[j].T).sum()
        values_agree = values / (value_norms[i] * value_norms[j]).clamp_min(1e-30)
        similarity[i, j] = similarity[j, i] = keys_agree + values_agree
    return similarity


def _with_turned_values(weights: AttentionWeights, heads: Sequence[int], moment: torch.Tensor) -> AttentionWeights:
    """Orthogonal Procrustes: each head's values onto the sum of the others', and its output projection turned back."""
    values, output = weights.value.clone(), weights.output.clone()
    for _ in range(_ROUNDS):
        for head in heads:
            others = values[heads].sum(0) - values[head]
            u, _, v = torch.linalg.svd(others @ moment @ values[head].T)
            turn = u @ v
            values[head] = turn @ values[head]
            readers = slice(head * weights.group_size, (head + 1) * weights.group_size)
            output[:, readers] = output[:, readers] @ turn.T
    return replace(weights, value=values, output=output)


def _with_turned_keys(weights: AttentionWeights, heads: Sequence[int], moment: torch.Tensor) -> AttentionWeights:
    """Each plane of a head's keys onto the sum of the others', by an angle that its queries are turned by too."""
    keys, queries = planes(weights.key), planes(weights.query)
    complex_moment = moment.to(keys.dtype)
    for _ in range(_ROUNDS):
        for head in heads:
            others = keys[heads].sum(0) - keys[head]
            overlap = ((others @ complex_moment) * keys[head].conj()).sum(1, keepdim=True)
            turn = torch.where(overlap.abs() > 0, overlap / overlap.abs().clamp_min(1e-300), torch.ones_like(overlap))
            keys[head] = turn * keys[head]
            readers = slice(head * weights.group_size, (head + 1) * weights.group_size)
            queries[readers] = turn * queries[readers]
    return replace(weights, key=from_planes(keys), query=from_planes(queries))
