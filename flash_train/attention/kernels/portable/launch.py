"""Launch the portable forward and backward kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.kernels.arguments import (
    addressable,
    contiguous_columns,
    dropout_arguments,
    lengths_of,
    mask_rule,
    score_arguments,
    slots_of,
    stats,
    strided,
)
from flash_train.attention.kernels.call import UNUSED, Call
from flash_train.attention.kernels.launch import Launch, on_device
from flash_train.attention.kernels.launch_cache import launch_all
from flash_train.attention.kernels.portable.backward import (
    attention_backward_dkdv,
    attention_backward_dq,
    attention_backward_rows,
)
from flash_train.attention.kernels.portable.forward import attention_forward
from flash_train.attention.kernels.portable.tiles import Tiles, choose_tiles, constants, variant_of
from flash_train.attention.kernels.results import gradients, outputs, sink_gradient, slope_gradient
from flash_train.attention.kernels.tile_lists import lists_launch
from flash_train.attention.kernels.tile_sizes import Tile, block_d, cdiv


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None, *, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output, like q with v's head_dim, and the natural log-sum-exp.

    The log-sum-exp is fp32 (batch, heads, seqlen) or, packed, (heads, total). If ``out`` is given, the output is
    written there; its heads may be a slice.
    """
    q, k, v = addressable(q), addressable(k), addressable(v)
    given, made = outputs(q, v, out)
    if q.shape[:-1].numel() > 0:
        with on_device(q):
            launch_all(_forward_launches, (q, k, v, *given), made, call, _tiles(q, v, call, tiles).forward)
    out, lse = (*given, *made)
    return out, lse


def refusal(q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """None: these kernels run every call."""


def backward_refusal(q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """None: these kernels run every call."""


def _forward_launches(*arguments: Any) -> tuple[Launch, ...]:
    return (forward_launch(*arguments),)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    needs_slopes: bool = False,
    into: Sequence[Tensor | None] = (None, None, None),
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dq, dk, dv, and the gradients of slopes (None unless ``needs_slopes``) and of sinks (None without sinks).

    They are bitwise the same in every call. The first three are written ``into`` the tensors that are given.
    """
    q, k, v, out, dout = addressable(q), addressable(k), addressable(v), addressable(out), addressable(dout)
    lse, dlse = contiguous_columns(lse), None if dlse is None else dlse.contiguous()
    dq, dk, dv = gradients(q, k, v, into)
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    dslope = torch.zeros_like(lse) if needs_slopes else None
    made = (delta, lse2, dq, dk, dv, dslope)
    with on_device(q):
        launch_all(_backward_launches, (q, k, v, out, dout, lse, dlse), made, call, _tiles(q, v, call, tiles))
        if q.numel() == 0 or k.numel() == 0:
            dq, dk, dv = dq.zero_(), dk.zero_(), dv.zero_()
    slopes = None if dslope is None else slope_gradient(dslope, call)
    return dq, dk, dv, slopes, None if call.sinks is None else sink_gradient(delta, lse, call)


def _backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    lse2: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dslope: Tensor | None,
    call: Call,
    tiles: Tiles,
) -> Iterator[Launch]:
    if q.shape[:-1].numel() > 0:
        yield rows_launch(out, dout, lse, dlse, delta, lse2, call)
    if q.numel() > 0 and k.numel() > 0:
        if tiles.dv is None:
            yield dkdv_launch(q, k, v, dout, lse2, delta, dk, dv, call, tiles.dkdv)
        else:
            yield dkdv_launch(q, k, v, dout, lse2, delta, dk, None, call, tiles.dkdv)
            yield dkdv_launch(q, k, v, dout, lse2, delta, None, dv, call, tiles.dv)
        yield dq_launch(q, k, v, dout, lse2, delta, dq, dslope, call, tiles.dq)


def forward_launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, tile: Tile) -> Launch:
    rule, score, dropout = _mask_score_dropout(call, tile, walks_keys=True)
    arguments = (
        *map(strided, (q, k, v, out)), stats(lse), call.cu_seqlens_q, call.cu_seqlens_k, rule, score, call.sinks,
        dropout, *lengths_of(q, k, call),
    )  # fmt: skip
    grid = (slots_of(q, call.cu_seqlens_q, tile.block_m), q.shape[-2])
    fixed, lists = _constants(q, k, v, tile), lists_launch(call, rule, walks_keys=True)
    return Launch(attention_forward, grid, arguments, fixed, lists)


def rows_launch(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor, lse2: Tensor, call: Call
) -> Launch:
    block = 32
    batch, rows = (1, out.shape[0]) if out.dim() == 3 else out.shape[:2]
    arguments = (
        strided(out), strided(dout), stats(lse), None if dlse is None else stats(dlse),
        stats(delta), stats(lse2), rows, call.keep_rate,
    )  # fmt: skip
    fixed = {"HEAD_DIM": out.shape[-1], "BLOCK_D": block_d(out.shape[-1]), "BLOCK_M": block}
    return Launch(attention_backward_rows, (batch * cdiv(rows, block), out.shape[-2]), arguments, fixed)


def dkdv_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    call: Call,
    tile: Tile,
) -> Launch:
    rule, score, dropout = _mask_score_dropout(call, tile, walks_keys=False)
    arguments = (
        *map(strided, (q, k, v, dout)), stats(lse2), stats(delta), strided(dk), strided(dv), call.cu_seqlens_q,
        call.cu_seqlens_k, rule, score, dropout, call.scale / call.keep_rate, *lengths_of(q, k, call),
    )  # fmt: skip
    grid = (slots_of(k, call.cu_seqlens_k, tile.block_n), k.shape[-2])
    fixed, lists = _constants(q, k, v, tile), lists_launch(call, rule, walks_keys=False)
    return Launch(attention_backward_dkdv, grid, arguments, fixed, lists)


def dq_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor,
    dslope: Tensor | None,
    call: Call,
    tile: Tile,
) -> Launch:
    rule, score, dropout = _mask_score_dropout(call, tile, walks_keys=True)
    arguments = (
        *map(strided, (q, k, v, dout)), stats(lse2), stats(delta), strided(dq),
        None if dslope is None else stats(dslope), call.cu_seqlens_q, call.cu_seqlens_k, rule, score, dropout,
        call.scale / call.keep_rate, call.keep_rate, *lengths_of(q, k, call),
    )  # fmt: skip
    grid = (slots_of(q, call.cu_seqlens_q, tile.block_m), q.shape[-2])
    fixed, lists = _constants(q, k, v, tile), lists_launch(call, rule, walks_keys=True)
    return Launch(attention_backward_dq, grid, arguments, fixed, lists)


def _mask_score_dropout(call: Call, tile: Tile, walks_keys: bool) -> tuple[Any, ...]:
    walked = tile.block_n if walks_keys else tile.block_m
    return mask_rule(call, tile, walks_keys), score_arguments(call), dropout_arguments(call, walked)


def _tiles(q: Tensor, v: Tensor, call: Call, tiles: Tiles | None) -> Tiles:
    if tiles is None:
        variant = variant_of(call.bounds.right != UNUSED, call.rng is not None, call.has_terms)
        tiles = choose_tiles(q.device, q.dtype, max(q.shape[-1], v.shape[-1]), variant)
    return tiles.within(*call.bounds.block) if call.has_lists else tiles


def _constants(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> dict[str, Any]:
    return constants(q, v.shape[-1], q.shape[-2] // k.shape[-2], tile)
