"""What the quantised keys of a layer are coded with, derived once for a model from a fixed text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist.kernels.rotation import rotate

# Of the mean diagonal: keeps a metric invertible where the text left a direction unused.
_DAMPING = 0.01
# Of the mean over dims: the least second moment that a dim counts with.
_LEAST_MOMENT = 1e-4
_MOST_SCALE = 32.0


@dataclass(frozen=True)
class KeyMoments:
    """What a text says about a layer's queries and keys after rope, in float64.

    Attributes:
        key_mean: `[K, D]`, over all keys.
        key_moment: `[K, D]`, the squares of the keys less their mean, each key counted by the attention that it gets:
            the first token's key is an outlier that half the attention may go to.
        query_metric: `[K, D, D]`, the mean of q q^T over the queries of a KV head.
    """

    key_mean: torch.Tensor
    key_moment: torch.Tensor
    query_metric: torch.Tensor


@dataclass(frozen=True)
class KeyStatics:
    """The keys k of a layer are coded as `rotate((k - offset) * scale)`.

    Attributes:
        offset: `[K, D]` float32, the mean key. Softmax does not see it.
        scale: `[K, D]` float32, positive; queries stand divided by it.
        feedback: `[K, groups, g, g]` float32, unit lower triangular: how the rounding error of a dim of an int4 group
            moves the targets of the dims before it.
    """

    offset: torch.Tensor
    scale: torch.Tensor
    feedback: torch.Tensor


def key_statics(moments: KeyMoments, group_dims: int) -> KeyStatics:
    """Offset, scale and feedback of a layer.

    The scale balances the step, which grows with the scaled key, against the harm that an error in a dim does, which
    grows with the scaled query: (E q^2 / E k^2)^(1/4) is the least of sum(k'^2) sum(q'^2). The feedback is the L of the
    L D L^T of the scaled and rotated queries' metric, for each group.

    Args:
        moments: of the calibration text.
        group_dims: dims of an int4 group.
    """
    head_dim = moments.key_mean.shape[-1]
    ratio = _floored(moments.query_metric.diagonal(dim1=-2, dim2=-1)) / _floored(moments.key_moment)
    scale = ratio.pow(0.25)
    scale = (scale / scale.log().mean(-1, keepdim=True).exp()).clamp(1 / _MOST_SCALE, _MOST_SCALE)
    metric = _rotated_metric(moments.query_metric / scale[:, :, None] / scale[:, None])
    mean_diagonal = metric.diagonal(dim1=-2, dim2=-1).mean(-1)
    metric += _DAMPING * mean_diagonal[:, None, None] * torch.eye(head_dim, dtype=metric.dtype, device=metric.device)
    # [K, groups, g, g]: the blocks on the diagonal.
    blocks = torch.stack([metric[:, i : i + group_dims, i : i + group_dims] for i in range(0, head_dim, group_dims)], 1)
    lower = torch.linalg.cholesky(blocks)
    feedback = lower / lower.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return KeyStatics(moments.key_mean.float(), scale.float(), feedback.float())


def _rotated_metric(metric: torch.Tensor) -> torch.Tensor:
    """R M R of symmetric `[K, D, D]`."""
    half = rotate(metric.permute(1, 0, 2))
    return rotate(half.permute(2, 1, 0)).permute(1, 0, 2)


def _floored(moment: torch.Tensor) -> torch.Tensor:
    return moment.clamp_min(_LEAST_MOMENT * moment.mean(-1, keepdim=True))
