"""From tensors and a specification to kernel arguments. The only place that launches the kernels."""

from __future__ import annotations

import contextlib
import math

import torch
import triton

from flash_train.attention.kernels.backward import (
    attention_backward_dkdv,
    attention_backward_dq,
    attention_backward_rows,
)
from flash_train.attention.kernels.forward import attention_forward
from flash_train.attention.kernels.tiles import Tile, Tiles, block_d, choose_tiles

LOG2_E = math.log2(math.e)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    rng: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    keep_threshold: int,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output like q, and the natural log-sum-exp: fp32 (batch, heads, seqlen), packed (heads, total)."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(_lse_shape(q), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    tile = (tiles or choose_tiles(q.device, q.dtype, q.shape[-1], keep_threshold < 256, causal)).forward
    grid = (_slots(q, cu_seqlens_q, tile.block_m), q.shape[-2])
    with _on_device(q):
        attention_forward[grid](
            q, k, v, out, lse, *_pointers(q, cu_seqlens_q, cu_seqlens_k, rng),
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_lse_strides(lse),
            *_lengths(q, k, cu_seqlens_q), scale * LOG2_E, keep_threshold,
            **_constants(q, k, cu_seqlens_q, causal, keep_threshold, tile),
        )  # fmt: skip
    return out, lse


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    rng: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    keep_threshold: int,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous and in the dtype of the inputs; bitwise the same at every call."""
    q, k, v, out, dout = _rows(q), _rows(k), _rows(v), _rows(out), _rows(dout)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    tiles = tiles or choose_tiles(q.device, q.dtype, q.shape[-1], keep_threshold < 256, causal)
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    batch, rows = (1, q.shape[0]) if cu_seqlens_q is not None else q.shape[:2]
    block = 32
    constants = {"HEAD_DIM": q.shape[-1], "BLOCK_D": block_d(q.shape[-1]), "BLOCK_M": block}
    shared = _pointers(q, cu_seqlens_q, cu_seqlens_k, rng)
    keep_rate = keep_threshold / 256
    numbers = (*_lengths(q, k, cu_seqlens_q), scale / keep_rate, scale * LOG2_E, keep_threshold)
    with _on_device(q):
        attention_backward_rows[(triton.cdiv(rows, block), q.shape[-2], batch)](
            out, dout, lse, lse if dlse is None else dlse.contiguous(), delta, lse2,
            *_strides(out), *_strides(dout), *_lse_strides(lse), rows, keep_rate,
            **constants, HAS_DLSE=dlse is not None,
        )  # fmt: skip
        attention_backward_dkdv[(_slots(k, cu_seqlens_k, tiles.dkdv.block_n), k.shape[-2])](
            q, k, v, dout, lse2, delta, dk, dv, *shared,
            *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(dk), *_strides(dv), *_lse_strides(lse),
            *numbers, **_constants(q, k, cu_seqlens_q, causal, keep_threshold, tiles.dkdv),
        )  # fmt: skip
        attention_backward_dq[(_slots(q, cu_seqlens_q, tiles.dq.block_m), q.shape[-2])](
            q, k, v, dout, lse2, delta, dq, *shared,
            *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(dq), *_lse_strides(lse),
            *numbers, **_constants(q, k, cu_seqlens_q, causal, keep_threshold, tiles.dq),
        )  # fmt: skip
    return dq, dk, dv


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but the last, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def _slots(x: torch.Tensor, cu_seqlens: torch.Tensor | None, block: int) -> int:
    """Programs along the rows of x: see ``device.schedule.find_tile``."""
    if cu_seqlens is None:
        return x.shape[0] * triton.cdiv(x.shape[1], block)
    return x.shape[0] // block + cu_seqlens.numel()


def _pointers(
    q: torch.Tensor, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, rng: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boundaries and generator state; an unused pointer is any tensor, for the kernels never read it."""
    return (q if cu_q is None else cu_q, q if cu_k is None else cu_k, q if rng is None else rng)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements."""
    return (x.stride(0), x.stride(1), x.stride(2)) if x.dim() == 4 else (0, x.stride(0), x.stride(1))


def _lse_strides(lse: torch.Tensor) -> tuple[int, int]:
    return (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))


def _lengths(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[int, int, int]:
    """(entries, query rows, key rows); packed, the rows are those of the whole tensor."""
    if cu_seqlens is None:
        return q.shape[0], q.shape[1], k.shape[1]
    return cu_seqlens.numel() - 1, q.shape[0], k.shape[0]


def _constants(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None, causal: bool, keep_threshold: int, tile: Tile
) -> dict[str, object]:
    return {
        "GROUP": q.shape[-2] // k.shape[-2],
        "HEAD_DIM": q.shape[-1],
        "BLOCK_D": block_d(q.shape[-1]),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PACKED": cu_seqlens is not None,
        "CAUSAL": causal,
        "DROPOUT": keep_threshold < 256,
        "PRECISION": "ieee" if q.device.type == "cpu" else "tf32x3",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' own."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
