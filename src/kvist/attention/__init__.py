"""Attention: as modules over tensors, over the pages of the cache, and what both are made of."""

from kvist.attention.attend import attend, kernel_name
from kvist.attention.decoder import Decoder, DecoderConfig
from kvist.attention.decoder_layer import DecoderLayer
from kvist.attention.gated_mlp import ACTIVATIONS, GatedMLP
from kvist.attention.grouped import grouped_attention
from kvist.attention.grouped_query import GroupedQueryAttention
from kvist.attention.heads import AttentionHeads
from kvist.attention.layer_cache import ContiguousCache, EncoderCache
from kvist.attention.paged_cache import PagedCache
from kvist.attention.rope import apply_rope, inverse_frequencies, rope_tables
from kvist.attention.step_attention import StepAttention

__all__ = [
    "ACTIVATIONS",
    "AttentionHeads",
    "ContiguousCache",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "EncoderCache",
    "GatedMLP",
    "GroupedQueryAttention",
    "PagedCache",
    "StepAttention",
    "apply_rope",
    "attend",
    "grouped_attention",
    "inverse_frequencies",
    "kernel_name",
    "rope_tables",
]
