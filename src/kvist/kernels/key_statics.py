"""What the quantised keys of a layer are coded with, derived once for a model from a fixed text.

Keys are coded after rope, so their mean turns with the position. It is kept as that of position 0 and turned to the
first position P of each page:

    offset(P) = R(P) offset        P = 64 * page number, R(P) rope's rotation: plane i by P * frequencies[i] radians

Plane i of a vector has dims i and i + D / 2 as its coordinates, as in attention/rope.py. What else is static is
averaged over where a text may stand. Rope is a group, so the moments of one window of text are turned to another place,
R M R^T, and not measured again there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kvist.kernels import native
from kvist.kernels.rotation import rotate

# Of the mean diagonal: keeps a metric invertible where the text left a direction unused.
_DAMPING = 0.01
# Of the mean over dims: the least second moment that a dim counts with.
_LEAST_MOMENT = 1e-4
# The least mean: a head that does nothing at all gets statics that do nothing.
_LEAST_MEAN = 1e-30
_MOST_SCALE = 32.0
# Places of the text over which moments are averaged.
_STARTS = 64
_LEAST_TABLE = 64

_PAGE_SLOTS = native.page_layout()["slots"]


@dataclass(frozen=True)
class KeyMoments:
    """What a text that begins at position 0 says about a layer's queries and keys after rope, in float64.

    The moments of keys are of x = k - offset(P), each token counted by the attention that its key receives: the first
    token's key is an outlier that half the attention may go to. Its share stands apart, since it stays at position 0
    wherever the rest of a text stands.

    Attributes:
        offset: `[K, D]`, the mean of the keys turned back by their pages' first positions.
        key_metric: `[K, D, D]`, the mean of x x^T, without the first token's share.
        first_key_moment: `[K, D]`, the first token's share of the diagonal.
        query_metric: `[K, D, D]`, the mean of q q^T over the queries of a KV head.
        num_tokens: of the text.
    """

    offset: torch.Tensor
    key_metric: torch.Tensor
    first_key_moment: torch.Tensor
    query_metric: torch.Tensor
    num_tokens: int


@dataclass(frozen=True)
class KeyStatics:
    """The keys k of a layer are coded as `rotate((k - offset(P)) * scale)`, P the first position of their page.

    Attributes:
        offset: `[K, D]` float32, the offset of position 0.
        scale: `[K, D]` float32, positive; queries stand divided by it.
        feedback: `[K, groups, g, g]` float32, unit lower triangular: how the rounding error of a dim of an int4 group
            moves the targets of the dims before it.
        frequencies: `[D / 2]` float32, radians per position of each plane that rope turns.
    """

    offset: torch.Tensor
    scale: torch.Tensor
    feedback: torch.Tensor
    frequencies: torch.Tensor

    def to(self, device: torch.device) -> KeyStatics:
        """The same values on a device."""
        return KeyStatics(*(getattr(self, field.name).to(device) for field in fields(self)))


class PageTurns:
    """By how much rope turns the first position of each page: a table that grows with the pages asked for.

    A page's row depends on its number alone: it is computed by itself, in float64, and rounded once to float32.

    Args:
        frequencies: `[D / 2]`, radians per position.
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        self._frequencies = frequencies.cpu().double()
        # [pages, cosine or sine, D / 2]
        self._table = torch.empty(0, 2, len(frequencies), dtype=torch.float32, device=frequencies.device)

    def turn(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Vectors `[D, K, 1]` float32 of position 0, turned to pages: `[D, K, n]`. Each operation rounds by itself.

        Args:
            x: the vectors.
            numbers: `[n]` int64, the pages' numbers in their sequences.
        """
        if len(numbers):
            self._reach(int(numbers.max()) + 1)
        # [D / 2, 1, n] each.
        cos, sin = self._table.index_select(0, numbers).permute(1, 2, 0).unsqueeze(2)
        return _turned(x, cos, sin, dim=0)

    def table(self, num_pages: int) -> torch.Tensor:
        """Cosines and sines of the pages from 0 on, `[num_pages, 2, D / 2]` float32 or longer, not to be changed."""
        self._reach(num_pages)
        return self._table

    def _reach(self, num_pages: int) -> None:
        have = len(self._table)
        if have >= num_pages:
            return
        # One page after the other: in an operation over many, the bits of a cosine may depend on its place.
        rows = []
        for number in range(have, max(num_pages, 2 * have, _LEAST_TABLE)):
            angles = self._frequencies * (number * _PAGE_SLOTS)
            rows.append(torch.stack((angles.cos(), angles.sin())).float())
        self._table = torch.cat((self._table, torch.stack(rows).to(self._table.device)))


def key_moments(q: torch.Tensor, k: torch.Tensor, received: torch.Tensor, frequencies: torch.Tensor) -> KeyMoments:
    """The moments of one window of text, whose first token has position 0.

    Args:
        q: `[T, H, D]`, the queries of a layer after rope.
        k: `[T, K, D]`, its keys after rope.
        received: `[K, T]`, the attention that each key received, summed over the queries and the heads of a group.
        frequencies: `[D / 2]`, radians per position of each plane.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    queries = q.double().view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    keys, frequencies = k.double().transpose(0, 1), frequencies.double()
    weights = received.double() / received.double().sum(-1, keepdim=True).clamp_min(_LEAST_MEAN)
    first_positions = torch.arange(num_tokens, device=k.device) // _PAGE_SLOTS * _PAGE_SLOTS
    angles = first_positions.unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()

    offset = _turned(keys, cos, -sin, dim=-1).mean(1)
    centred = keys - _turned(offset.unsqueeze(1), cos, sin, dim=-1)
    rest = centred[:, 1:]
    return KeyMoments(
        offset=offset,
        key_metric=(rest * weights[:, 1:, None]).mT @ rest,
        first_key_moment=weights[:, :1] * centred[:, 0].square(),
        query_metric=queries.mT @ queries / queries.shape[1],
        num_tokens=num_tokens,
    )


def key_statics(moments: KeyMoments, frequencies: torch.Tensor, group_dims: int, *, horizon: int = 8192) -> KeyStatics:
    """Offset, scale and feedback of a layer, fit for a text of the moments' kind anywhere before `horizon`.

    The scale balances the step, which grows with the scaled key, against the harm that an error in a dim does, which
    grows with the scaled query: (E q^2 / E k^2)^(1/4) is the least of sum(k'^2) sum(q'^2). The feedback is the L of the
    L D L^T of the scaled and rotated queries' metric, for each group.

    Args:
        moments: of the calibration text.
        frequencies: `[D / 2]`, those of the moments.
        group_dims: dims of an int4 group.
        horizon: the position before which the text ends, wherever it stands; one within the text leaves it in place.
    """
    head_dim = moments.offset.shape[-1]
    last_start = max(0, horizon - moments.num_tokens)
    starts = torch.linspace(0, last_start, _STARTS, dtype=torch.float64, device=moments.offset.device).round()
    key_metric, query_metric = (
        _averaged(metric, frequencies.double(), starts) for metric in (moments.key_metric, moments.query_metric)
    )
    key_moment = key_metric.diagonal(dim1=-2, dim2=-1) + moments.first_key_moment
    ratio = _floored(query_metric.diagonal(dim1=-2, dim2=-1)) / _floored(key_moment)
    scale = ratio.pow(0.25)
    scale = (scale / scale.log().mean(-1, keepdim=True).exp()).clamp(1 / _MOST_SCALE, _MOST_SCALE)
    metric = _rotated_metric(query_metric / scale[:, :, None] / scale[:, None])
    mean_diagonal = metric.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(_LEAST_MEAN)
    metric += _DAMPING * mean_diagonal[:, None, None] * torch.eye(head_dim, dtype=metric.dtype, device=metric.device)
    # [K, groups, g, g]: the blocks on the diagonal.
    blocks = torch.stack([metric[:, i : i + group_dims, i : i + group_dims] for i in range(0, head_dim, group_dims)], 1)
    lower = torch.linalg.cholesky(blocks)
    feedback = lower / lower.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return KeyStatics(moments.offset.float(), scale.float(), feedback.float(), frequencies.float())


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
    """Vectors along `dim`, turned by angles of which there is one for each plane there."""
    first, second = x.chunk(2, dim)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim)


def _averaged(metric: torch.Tensor, frequencies: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The mean of R(s) M R(s)^T over starts s, for symmetric M `[K, D, D]`.

    With a plane's two coordinates as one complex number z = x + iy, R(s) multiplies z by e^(isf). So E z_a conj(z_b) is
    multiplied by e^(is(f_a - f_b)) and E z_a z_b by e^(is(f_a + f_b)), whose means over s are D / 2 x D / 2 numbers.
    """
    angles = frequencies.unsqueeze(1) * starts
    phases = torch.polar(torch.ones_like(angles), angles)
    xx, xy, yx, yy = (block for rows in metric.chunk(2, dim=-2) for block in rows.chunk(2, dim=-1))
    conjugated = torch.complex(xx + yy, yx - xy) * (phases @ phases.mH / len(starts))
    plain = torch.complex(xx - yy, yx + xy) * (phases @ phases.mT / len(starts))
    total, difference = (plain + conjugated) / 2, (plain - conjugated) / 2
    upper = torch.cat((total.real, difference.imag), dim=-1)
    lower = torch.cat((total.imag, -difference.real), dim=-1)
    return torch.cat((upper, lower), dim=-2)


def _rotated_metric(metric: torch.Tensor) -> torch.Tensor:
    """H M H of symmetric `[K, D, D]`, H the Hadamard rotation."""
    half = rotate(metric.permute(1, 0, 2))
    return rotate(half.permute(2, 1, 0)).permute(1, 0, 2)


def _floored(moment: torch.Tensor) -> torch.Tensor:
    return moment.clamp_min(_LEAST_MOMENT * moment.mean(-1, keepdim=True).clamp_min(_LEAST_MEAN))
