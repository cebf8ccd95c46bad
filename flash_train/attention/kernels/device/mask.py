"""Which keys a tile of queries visits, and which of them each query sees."""

import triton
import triton.language as tl


@triton.jit
def key_range(start_m, shift, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """(whole, stop): key blocks before ``whole`` are seen by every query of the tile, none from ``stop`` on by any."""
    if CAUSAL:
        stop = tl.maximum(tl.minimum(start_m + BLOCK_M + shift, len_k), 0)
        whole = tl.maximum(tl.minimum(start_m + shift + 1, len_k), 0) // BLOCK_N * BLOCK_N
    else:
        stop = len_k
        whole = len_k // BLOCK_N * BLOCK_N
    return whole, stop


@triton.jit
def visible_keys(start_m, start_n, shift, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Bool [1 or BLOCK_M, BLOCK_N], True where the query sees the key: query i sees keys up to i + shift."""
    offs_n = start_n + tl.arange(0, BLOCK_N)[None, :]
    visible = offs_n < len_k
    if CAUSAL:
        visible = visible & (offs_n <= start_m + tl.arange(0, BLOCK_M)[:, None] + shift)
    return visible
