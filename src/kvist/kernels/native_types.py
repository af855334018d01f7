"""The native library's types: what csrc/bindings.cpp offers, as `native` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

if TYPE_CHECKING:
    import torch


class StorageFormatFields(TypedDict):
    """`StorageFormat` of csrc/page_layout.h."""

    bits: int
    codes_per_lane: int
    scalars: int
    scalar_bytes: int


class PageLayoutFields(TypedDict):
    """The constants of csrc/page_layout.h."""

    version: int
    slots: int
    lanes: int
    lane_bytes: int
    int8_key_bias: int
    most_head_dim: int
    formats: dict[str, StorageFormatFields]


class PageLayer(Protocol):
    """One layer in the pages of its group, for native kernels: made by `page_layer`."""


class PageStep(Protocol):
    """The pages of one layer group in one step, for native kernels: made by `page_step`."""

    def attend(
        self,
        layer: PageLayer,
        q: object,
        out: object,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        num_threads: int,
    ) -> None:
        """Attention of every token of the step over its own sequence.

        Decoding and prompts, many sequences at once. A row of the result, one query head of one token, has the same
        bits whatever else is in the step and however many threads there are.

        Args:
            layer: whose keys and values are read. Those of this step are in the pages already.
            q: `[T, H, D]` bfloat16 or float32 with contiguous dims, a tensor or its DLPack capsule; query head `h`
                reads KV head `h // group_size`.
            out: as `q`; is overwritten.
            scale: multiplies the scores.
            window: tokens that a query sees, itself included; at most that of the step, which is the default.
            softcap: scores `s` become `softcap * tanh(s / softcap)`.
            sinks: `[H]` float32, the logit of a place that every query of a head may attend to and that holds nothing.
            num_threads: how many threads work.

        Raises:
            ValueError: an argument has the wrong dtype, shape or strides, or a window is too large.
        """

    def append(self, layer: PageLayer, k: object, v: object, *, num_threads: int) -> None:
        """Store a layer's keys and values of the step, one for each token.

        The bytes are those of `PageCodec.write`, whatever the threads and the instruction set.

        Args:
            layer: whose they are.
            k, v: `[T, K, D]` bfloat16 or float32 with contiguous dims, keys after rope; or DLPack capsules of them.
            num_threads: how many threads may work.

        Raises:
            ValueError: an argument has the wrong dtype, shape or strides.
        """


class LinearWeight(Protocol):
    """A matrix for native products: made by `linear_weight`."""

    def apply(self, x: object, out: object, *, num_threads: int) -> None:
        """Write `x @ W.T` to `out`, with the bits of `linear.linear` where the weights are quantised.

        A row of the result has the same bits whatever the other rows and the threads; and whatever the instruction set
        where the weights are quantised.

        Args:
            x: `[T, K]` bfloat16 or float32 with contiguous columns, a tensor or its DLPack capsule. A row with what is
                no number, or infinite, spoils its own results alone; with quantised weights it gives NaN throughout.
            out: `[T, N]` bfloat16 or float32 with contiguous columns, of `x`'s dtype or the other; is overwritten.
            num_threads: how many threads may work.

        Raises:
            ValueError: an argument has the wrong dtype, shape or strides, or the two overlap.
        """

    def decode_rows(self, rows: object, out: object) -> None:
        """Write the weights of some rows to `out`, with the bits of `weight_codec.decode_rows`.

        Args:
            rows: `[T]` int64, contiguous.
            out: `[T, K]` float32 with contiguous columns; is overwritten.

        Raises:
            ValueError: an argument has the wrong dtype, shape or strides, or there is no such row.
        """


class HiddenRows(Protocol):
    """The hidden states of a step, for native layers: made by `hidden_rows`."""

    def norm(self, weight: object, out: object, *, offset: float, eps: float, num_threads: int) -> None:
        """Write the hidden states, divided by their root mean square, times `weight + offset`, to `out`.

        Args:
            weight: `[E]` float32.
            out: `[T, E]` float32, contiguous.
            offset: is added to the weight.
            eps: is added to the mean square.
            num_threads: how many threads may work.

        Raises:
            ValueError: an argument has the wrong dtype, shape or strides, or is out of bounds.
        """


class DecoderLayer(Protocol):
    """A decoder layer whose matrices are quantised or in bf16: made by `decoder_layer`, run by `run_layers`."""


LayerCall = tuple[DecoderLayer, PageStep, PageLayer, HiddenRows]
"""What a layer needs in a step: itself, the step's pages, how it lies in them, and a row for each token of the step."""


class Library(Protocol):
    """What `csrc/bindings.cpp` offers. Arguments out of bounds raise ValueError."""

    LAYER_STAGES: list[str]

    def built_isas(self) -> list[str]: ...
    def runnable_isas(self) -> list[str]: ...
    def choose_isa(self, max_isa: str) -> str: ...
    def chosen_isa(self) -> str: ...
    def read_rates(self, buffer_bytes: int, passes: int, num_threads: int) -> list[float]: ...
    def page_layout(self) -> PageLayoutFields: ...
    def takes_head_dim(self, format: str, head_dim: int) -> bool: ...
    def group_dims(self, format: str, head_dim: int) -> int: ...
    def head_layout(self, keys: str, values: str, head_dim: int) -> tuple[int, int, int, int, int]: ...
    def code_place(self, side: str, format: str, head_dim: int, slot: int, dim: int) -> tuple[int, int]: ...
    def scalar_place(self, format: str, slot: int, group: int, scalar: int) -> int: ...
    def PageLayer(  # noqa: N802
        self,
        keys: str,
        values: str,
        head_dim: int,
        num_kv_heads: int,
        offset: int,
        key_offset: torch.Tensor | None,
        key_scale: torch.Tensor | None,
        key_feedback: torch.Tensor | None,
        turns: int,
    ) -> PageLayer: ...
    def PageStep(  # noqa: N802
        self,
        pool: object,
        page_bytes: int,
        num_tokens: Sequence[int],
        first_positions: Sequence[int],
        first_numbers: Sequence[int],
        page_tables: Sequence[object],
        turns: Sequence[object],
        window: int | None,
    ) -> PageStep: ...
    def HiddenRows(self, x: object, cos: object, sin: object) -> HiddenRows: ...  # noqa: N802
    def DecoderLayer(  # noqa: N802
        self,
        matrices: Sequence[LinearWeight],
        biases: Sequence[object | None],
        norms: Sequence[object | None],
        *,
        norm_offset: float,
        eps: float,
        head_dim: int,
        scale: float,
        window: int | None,
        activation: str,
    ) -> DecoderLayer: ...
    def run_layers(
        self, calls: Sequence[LayerCall], *, num_threads: int, stage_ns: torch.Tensor | None = None
    ) -> None: ...
    def LinearWeight(  # noqa: N802
        self, format: str, num_rows: int, num_columns: int, data: object, fine_rows: bool
    ) -> LinearWeight: ...
