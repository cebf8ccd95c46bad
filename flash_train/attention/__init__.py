"""Exact attention in Triton, and other implementations to compare with.

Layout: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with a ``Packing``. The package imports
torch, triton and ``flash_train.checks``, a file that needs only the standard library. So it can be used on its own.
"""

from flash_train.attention.backends import BACKENDS, flash_unavailable, resolve_backend
from flash_train.attention.decoding.kvcache import cached_attention
from flash_train.attention.dropout import EntryOrigins, RngState, keep_mask
from flash_train.attention.flash_attn.api import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_train.attention.flash_attn.padding import pad_input, unpad_input
from flash_train.attention.flops import attended_pairs, attention_flops
from flash_train.attention.functional import attention, explain
from flash_train.attention.masks import BlockSparse, Causal, Document, Full, Mask, MaskFunction, Tree, Window
from flash_train.attention.merge import merge
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec

__all__ = [
    "BACKENDS",
    "AttentionSpec",
    "BlockSparse",
    "Causal",
    "Document",
    "EntryOrigins",
    "Full",
    "Mask",
    "MaskFunction",
    "Packing",
    "RngState",
    "Tree",
    "Window",
    "attended_pairs",
    "attention",
    "attention_flops",
    "cached_attention",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_unavailable",
    "keep_mask",
    "merge",
    "pad_input",
    "resolve_backend",
    "unpad_input",
]
