"""Attention over the cache: rope, grouped-query attention, the choice of a kernel."""

from kvist.attention.attend import attend, kernel_name
from kvist.attention.grouped_query import GroupedQueryAttention
from kvist.attention.rope import apply_rope, inverse_frequencies, rope_tables

__all__ = ["GroupedQueryAttention", "apply_rope", "attend", "inverse_frequencies", "kernel_name", "rope_tables"]
