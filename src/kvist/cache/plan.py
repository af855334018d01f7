"""What keys and values cost in pages: the formula of the allocator, and of whoever plans with it.

A sequence takes whole pages of 64 tokens in every layer group, and a page takes whole pages of the operating system.
Groups without a window keep a sequence's every token. Those with one keep what the first query of a step sees, the
slack for rewinding before it and the step's own tokens, so that their cost ends somewhere.

                      tokens that are kept, and pages of a sequence of 6,144 in steps of 2,048
    full attention    |0 ........................................ 6,143|     96
    window of 512                       |window, slack, the step's own |     ceil((512 + 64 + 2048 - 2) / 64) + 1 = 42
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.cache.page_layout import PAGE_SLOTS, LayerGroup, PageLayout, layer_groups
from kvist.cache.page_pool import page_stride
from kvist.cache.page_table import PageRules
from kvist.config import CacheConfig, LayerConfig
from kvist.errors import OptionError
from kvist.kv_format import LayerFormats
from kvist.memory import binary_size, distinct_sizes


@dataclass(frozen=True)
class GroupPlan:
    """What a layer group costs.

    Attributes:
        layer_group: its layers and window.
        layout: the bytes of its pages.
        rules: how many pages its sequences need.
    """

    layer_group: LayerGroup
    layout: PageLayout
    rules: PageRules

    @property
    def stride(self) -> int:
        """The bytes that a page costs."""
        return page_stride(self.layout.page_bytes)

    def bytes_for(self, num_tokens: int) -> int:
        """The most bytes that a sequence takes at once in this group while it grows from nothing to `num_tokens`."""
        return self.rules.most_pages(num_tokens) * self.stride


class CachePlan:
    """What sequences cost in a cache, before there is one.

    Args:
        layers: the shape of each layer's cache.
        kv_format: how they are stored.
        rewind_slack_tokens: how far a sequence can be rewound without losing what its windows see.
        max_step_tokens: the most tokens of a sequence in one step.

    Attributes:
        kv_format: as given.
        groups: of the layers, full attention first, then the windows, ascending.
        bytes_per_token: of one token's slots over all layers, what lies between them for alignment included.
        least_bytes: a page of each group, without which no sequence can begin.

    Raises:
        OptionError: there are no layers, or the format cannot take a head dim or names a layer that is not there.
    """

    def __init__(
        self,
        layers: Sequence[LayerConfig],
        kv_format: LayerFormats,
        rewind_slack_tokens: int,
        max_step_tokens: int,
    ) -> None:
        if not layers:
            raise OptionError("there are no layers: a cache needs one at least")
        formats = kv_format.of(len(layers))
        self.kv_format = kv_format
        self.groups = tuple(
            GroupPlan(
                group,
                PageLayout([layers[i] for i in group.layers], [formats[i] for i in group.layers]),
                PageRules(group.window, rewind_slack_tokens, max_step_tokens),
            )
            for group in layer_groups(layers)
        )
        self.bytes_per_token = sum(group.layout.page_bytes for group in self.groups) // PAGE_SLOTS
        self.least_bytes = sum(group.stride for group in self.groups)

    @classmethod
    def checked(cls, layers: Sequence[LayerConfig], config: CacheConfig) -> CachePlan:
        """The plan of a cache, where there can be one.

        Raises:
            OptionError: there cannot, as above, or the budget is less than `least_bytes`.
        """
        plan = cls(layers, config.kv_format, config.rewind_slack_tokens, config.max_step_tokens)
        plan.check_budget(config.memory_bytes)
        return plan

    def check_budget(self, memory_bytes: int) -> None:
        """Raise `OptionError` where no sequence can begin in a budget, naming the least that is enough."""
        if memory_bytes < self.least_bytes:
            groups = f" for each of {len(self.groups)} layer groups" if len(self.groups) > 1 else ""
            given, _ = distinct_sizes(memory_bytes, self.least_bytes)
            raise OptionError(
                f"kv_memory is {given}: it must be at least {binary_size(self.least_bytes)} "
                f"({self.least_bytes:,} bytes), a page of {PAGE_SLOTS} tokens in {self.kv_format}{groups}"
            )

    def bytes_for(self, num_tokens: int) -> int:
        """The most bytes that a sequence takes at once while it grows from nothing to `num_tokens`.

        That much is promised to a sequence which reserves `num_tokens`. It is what the sequence takes in the end where
        no window has dropped a page by then, up to `window + rewind_slack_tokens` tokens, and in full attention always.
        """
        return sum(group.bytes_for(num_tokens) for group in self.groups)

    def max_tokens(self, memory_bytes: int, num_sequences: int = 1) -> int:
        """The most tokens that each of so many sequences can have at once in a budget; 0 where they cannot begin.

        `sys.maxsize` where all layers have windows and the budget holds them, since then it has no end.
        """
        share = memory_bytes // num_sequences
        if all(group.rules.window is not None for group in self.groups) and self.bytes_for(sys.maxsize) <= share:
            return sys.maxsize
        low, high = 0, 1 + share // min(group.stride for group in self.groups)
        while high - low > 1:  # pages: `low` fit, `high` do not
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_for(middle * PAGE_SLOTS) <= share else (low, middle)
        return low * PAGE_SLOTS

    def max_sequences(self, memory_bytes: int, num_tokens: int) -> int:
        """How many sequences of `num_tokens`, one at least, fit in a budget at once, none of them sharing a page."""
        return memory_bytes // self.bytes_for(num_tokens)
