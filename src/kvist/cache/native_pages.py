"""A layer group as the native kernels are told of it: its layers once with the cache, its pages once in each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvist.cache.page_codec import PageCodec
from kvist.cache.page_table import PageTable
from kvist.kernels import native
from kvist.kernels.native_types import PageStep

_DTYPES = (torch.float32, torch.bfloat16)


class NativePages:
    """The layers of a group whose pages are on the CPU.

    Args:
        codec: of the pages.
        window: tokens that a query of the group sees, itself included; None sees all.

    Attributes:
        layers: the native library's own description of each, in their order within the group.
    """

    def __init__(self, codec: PageCodec, window: int | None) -> None:
        self._page_bytes = codec.layout.page_bytes
        self._window = window
        self._turns = codec.turns
        layers = []
        for place, statics in zip(codec.layout.layers, codec.statics, strict=True):
            keys, values = place.kv_format.keys, place.kv_format.values
            layer = (keys, values, place.head_dim, place.num_kv_heads, place.offset)
            if statics is None or not place.kv_format.quantised_keys:
                layers.append(native.page_layer(*layer))
                continue
            layers.append(
                native.page_layer(
                    *layer,
                    key_offset=statics.offset.contiguous(),
                    key_scale=statics.scale.contiguous(),
                    key_feedback=statics.feedback.contiguous() if keys == "int4" else None,
                    turns=codec.turns_of(statics),
                )
            )
        self.layers = tuple(layers)

    def step(
        self,
        pages: torch.Tensor,
        num_tokens: Sequence[int],
        first_positions: Sequence[int],
        tables: Sequence[PageTable],
    ) -> PageStep:
        """The pages of a step of some spans.

        Args:
            pages: `[P, stride]` uint8, all of the pool.
            num_tokens: of each span; none at all is allowed.
            first_positions: of each span's first token.
            tables: the pages of each span's sequence, those of the span's own tokens included.
        """
        # A span without tokens has no rows, and perhaps no pages.
        spans = [span for span in zip(num_tokens, first_positions, tables, strict=True) if span[0]]
        num_numbers = max((table.stop for _, _, table in spans), default=0)
        return native.page_step(
            pages,
            self._page_bytes,
            num_tokens=[count for count, _, _ in spans],
            first_positions=[first for _, first, _ in spans],
            first_numbers=[table.first for _, _, table in spans],
            page_tables=[table.tensor() for _, _, table in spans],
            turns=[turns.table(num_numbers) for turns in self._turns],
            window=self._window,
        )

    def append(self, step: PageStep, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a layer's keys and values `[T, K, D]` of a step; `layer` is counted within the group."""
        step.append(self.layers[layer], _capsule(k), _capsule(v), num_threads=torch.get_num_threads())

    def attend(
        self,
        step: PageStep,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's queries `[T, H, D]` over their sequences; `layer` as in `append`."""
        queries = q if q.dtype in _DTYPES else q.float()
        out = torch.empty(q.shape, dtype=queries.dtype)
        step.attend(
            self.layers[layer],
            _capsule(queries),
            _capsule(out),
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
            num_threads=torch.get_num_threads(),
        )
        return out.to(q.dtype)


def _capsule(x: torch.Tensor) -> object:
    x = x if x.dtype in _DTYPES else x.float()
    return native.capsule(x if x.stride(-1) == 1 else x.contiguous())
