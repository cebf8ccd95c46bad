"""Launch Hopper's kernels: grids, buffers between the kernels, and calls that they cannot run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_train.attention.kernels.arguments import (
    contiguous_columns,
    dropout_arguments,
    lengths_of,
    mask_rule,
    score_arguments,
    slots_of,
    stats,
    strided,
)
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.hopper import grid
from flash_train.attention.kernels.hopper.backward.dq import hopper_backward_dq
from flash_train.attention.kernels.hopper.backward.dq_accumulator import AHEAD
from flash_train.attention.kernels.hopper.backward.fused import dq_columns, hopper_backward
from flash_train.attention.kernels.hopper.backward.rows import PAD, hopper_finish, hopper_prepare
from flash_train.attention.kernels.hopper.backward.wide import hopper_backward_wide
from flash_train.attention.kernels.hopper.descriptors import (
    MOST_ROWS,
    describable,
    describe,
    describe_dq_accumulator,
    describe_rows,
)
from flash_train.attention.kernels.hopper.forward import hopper_forward
from flash_train.attention.kernels.hopper.tiles import (
    WIDEST_DQ_ACCUMULATOR,
    ForwardTile,
    backward_tile,
    dq_tile,
    forward_tile,
)
from flash_train.attention.kernels.launch import Launch, on_device
from flash_train.attention.kernels.launch_cache import TensorSignature, launch_all, signature_of
from flash_train.attention.kernels.results import gradients, outputs, sink_gradient, slope_gradient
from flash_train.attention.kernels.tile_lists import lists_launch
from flash_train.attention.kernels.tile_sizes import block_d, cdiv


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do the same as ``portable.launch.forward``, for a call that ``refusal`` accepts."""
    if out is not None and not describable(signature_of(out)):
        found, lse = forward(q, k, v, call)
        return out.copy_(found), lse
    given, made = outputs(q, v, out)
    if q.shape[:-1].numel() > 0:
        with on_device(q):
            launch_all(_forward_launches, (q, k, v, *given), (*made, _work_tile_counter(q)), call)
    out, lse = (*given, *made)
    return out, lse


_counters: dict[int, Tensor] = {}


def _work_tile_counter(q: Tensor) -> Tensor:
    """Return a counter, int32 0. Every launch leaves it at 0.

    Launches on a device's default stream share one counter, because they run one after the other. On any other stream
    every launch allocates its own. A CUDA graph needs its own counter: it may be replayed on any stream, and its memory
    pool is freed with it. ``torch.compile`` uses such a pool, too, in the runs before it captures a graph.
    """
    # the raw stream: a Python stream object would take time to create
    if not q.is_cuda or torch._C._cuda_getCurrentRawStream(q.device.index) != 0:
        return q.new_zeros(1, dtype=torch.int32)
    if q.device.index not in _counters:
        _counters[q.device.index] = q.new_zeros(1, dtype=torch.int32)
    return _counters[q.device.index]


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Do the same as ``portable.launch.backward``, for a call that ``backward_refusal`` accepts.

    One kernel computes five products for each pair of tiles, and accumulates dQ in no fixed order. A
    separate kernel for dQ, with two more products, runs under ``torch.use_deterministic_algorithms``, for the gradient
    of slopes, and if head_dim is more than 128.
    """
    dout = dout if describable(signature_of(dout)) else dout.clone(memory_format=torch.contiguous_format)
    out, lse = contiguous_columns(out), contiguous_columns(lse)
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = gradients(q, k, v, into)
    separate_dq = (
        block_d(q.shape[-1]) > WIDEST_DQ_ACCUMULATOR or needs_slopes or torch.are_deterministic_algorithms_enabled()
    )
    dslope = torch.zeros_like(lse) if needs_slopes else None
    buffers = make_backward_buffers(q, call, with_dq=not separate_dq)
    with on_device(q):
        if q.shape[:-1].numel() > 0:
            made = (buffers.delta, buffers.lse2, buffers.dq, buffers.counters, dq, dk, dv, dslope)
            launch_all(_backward_launches, (q, k, v, out, dout, lse, dlse), made, call)
        else:
            dk, dv = dk.zero_(), dv.zero_()
    slopes = None if dslope is None else slope_gradient(dslope, call)
    return dq, dk, dv, slopes, None if call.sinks is None else sink_gradient(buffers.delta_like(call, lse), lse, call)


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
    dq_accum: Tensor | None,
    counters: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dslope: Tensor | None,
    call: Call,
) -> Iterator[Launch]:
    buffers = BackwardBuffers(delta, lse2, dq_accum, counters)
    yield prepare_launch(k, out, dout, lse, dlse, buffers, call)
    yield backward_launch(q, k, v, dout, buffers, dq, dk, dv, call)
    if dq_accum is None:
        yield dq_launch(q, k, v, dout, buffers, dq, dslope, call)
    else:
        yield finish_launch(buffers, dq, k, call)


def refusal(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Say why these kernels cannot run the call's forward; None if they can."""
    aligned = call.rng is None or call.draws_aligned
    blocks = call.bounds.block if call.has_lists else None
    return _refusal(signature_of(q), signature_of(k), signature_of(v), aligned, blocks)


@functools.lru_cache(maxsize=4096)  # the checks take as long as a launch, and calls repeat
def _refusal(
    q: TensorSignature,
    k: TensorSignature,
    v: TensorSignature,
    aligned: bool,
    blocks: tuple[int, int] | None,
) -> str | None:
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if k.shape[-3] == 0:
        return "there are no keys"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is neither bfloat16 nor float16"
    if block_d(head_dim) != block_d(head_dim_v):
        return f"q's head_dim {head_dim} and v's {head_dim_v} take tiles of different widths"
    for name, signature in (("q", q), ("k", k), ("v", v)):
        if not describable(signature):
            return f"{name} has strides {signature.stride}: TMA takes multiples of 16 bytes below 2**40, the last 1"
        if signature.shape[-3] > MOST_ROWS:
            return f"{name} has {signature.shape[-3]} rows: the coordinates of TMA reach {MOST_ROWS}"
    for name, columns in (("q", head_dim), ("v", head_dim_v)):
        if columns % 8:
            return f"{name}'s head_dim {columns} is not a multiple of 8"
    if not aligned:
        return "the first query or key of the dropout mask, or of an entry's part of it, is no multiple of 16"
    if blocks is not None and (blocks[0] % 128 or blocks[1] % 128):
        return f"the mask's blocks of {blocks[0]} x {blocks[1]} are not multiples of 128"
    return None


def backward_refusal(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Say why these kernels cannot run the call's backward; None if they can."""
    reason = refusal(q, k, v, call)
    if reason is not None:
        return reason
    if call.has_lists and call.block_map is not None and call.block_map.shape[1] > 1 and q.shape[-2] != k.shape[-2]:
        return "heads that share keys have block patterns of their own"
    if q.shape[-2] * PAD * slots_of(q, call.cu_seqlens_q, PAD) >= 2**31:
        return "there are 2**31 rows or more, of all heads together"
    return None


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    counter: Tensor,
    call: Call,
    tile: ForwardTile | None = None,
) -> Launch:
    """Return the forward launch. ``counter`` is an int32 0, and is 0 again after the launch."""
    columns = block_d(q.shape[-1])
    tile = tile or forward_tile(columns, grid.mean_seqlen(k, call.cu_seqlens_k), call)
    n_heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    entries, rows_q, rows_k = lengths_of(q, k, call)
    rule = mask_rule(call, tile.as_tile, walks_keys=True)
    arguments = (
        describe(q, 64, columns), describe(k, tile.block_n, columns), describe(v, tile.block_n, columns),
        describe(out, 64, columns), stats(lse), counter, call.cu_seqlens_q, call.cu_seqlens_k, rule,
        score_arguments(call), call.sinks, dropout_arguments(call), entries, rows_q, rows_k, n_heads,
        grid.heads_at_once(q, k, call, 64 * tile.consumers),
    )  # fmt: skip
    constants = {
        "GROUP": group,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": columns,
        "CONSUMERS": tile.consumers,
        "Q_STAGES": tile.q_stages,
        "K_STAGES": tile.k_stages,
        "V_STAGES": tile.v_stages,
        "PINGPONG": tile.pingpong,
        "num_warps": 4,
        "maxnreg": {2: 168, 3: 128}[tile.consumers],
    }
    programs = (min(grid.count_work_tiles(q, call.cu_seqlens_q, 64 * tile.consumers), grid.processors(q.device)),)
    return Launch(hopper_forward, programs, arguments, constants, lists_launch(call, rule, walks_keys=True))


@dataclass(frozen=True)
class BackwardBuffers:
    """Buffers between the kernels of the backward, in padded rows (``backward.rows``)."""

    delta: Tensor  #: fp32 (heads, padded)
    lse2: Tensor  #: fp32 (heads, padded)
    dq: Tensor | None  #: fp32 (heads, padded, columns), in pieces; None if a separate kernel computes dQ
    #: int32 (2, at least the key heads of all entries): see ``backward.dq_accumulator``; None without ``dq``
    counters: Tensor | None

    @property
    def padded(self) -> int:
        return self.delta.shape[1]

    def delta_like(self, call: Call, lse: Tensor) -> Tensor:
        """Return delta in the shape of ``lse``."""
        if call.cu_seqlens_q is None:
            entries, heads, rows = lse.shape
            by_entry = self.delta.view(heads, entries, PAD * cdiv(rows, PAD))  # no -1: there may be no entries
            return by_entry[:, :, :rows].transpose(0, 1)
        row = torch.arange(lse.shape[1], device=lse.device)
        entry = torch.searchsorted(call.cu_seqlens_q[1:], row, right=True, out_int32=True)
        first = call.cu_seqlens_q[entry]
        return self.delta[:, (first // PAD + entry) * PAD + row - first]


def make_backward_buffers(q: Tensor, call: Call, with_dq: bool = True) -> BackwardBuffers:
    heads, columns = q.shape[-2], block_d(q.shape[-1])
    padded = PAD * slots_of(q, call.cu_seqlens_q, PAD)
    delta, lse2 = q.new_empty((2, heads, padded), dtype=torch.float32).unbind()
    if not with_dq:
        return BackwardBuffers(delta, lse2, None, None)
    units = heads * (q.shape[0] if call.cu_seqlens_q is None else 1)  # at least the key heads of all entries
    dq_accum = q.new_empty((heads, padded, columns), dtype=torch.float32)
    return BackwardBuffers(delta, lse2, dq_accum, q.new_empty((2, units), dtype=torch.int32))


def prepare_launch(
    k: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, buffers: BackwardBuffers, call: Call
) -> Launch:
    entries, rows, _ = lengths_of(out, k, call)
    group = out.shape[-2] // k.shape[-2]
    at_once, last = grid.head_groups(out, k, call)
    arguments = (
        strided(out), strided(dout), stats(lse), None if dlse is None else stats(dlse), buffers.delta,
        buffers.lse2, buffers.dq, buffers.counters, call.cu_seqlens_q, call.keep_rate, entries, rows, buffers.padded,
        0 if buffers.counters is None else buffers.counters.numel(), AHEAD.value * at_once * group,
        last * at_once * group,
    )  # fmt: skip
    constants = {"HEAD_DIM": out.shape[-1], "BLOCK_D": block_d(out.shape[-1]), "BLOCK": PAD}
    return Launch(hopper_prepare, (buffers.padded // PAD, out.shape[-2]), arguments, constants)


def backward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    buffers: BackwardBuffers,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    call: Call,
) -> Launch:
    columns, group = block_d(q.shape[-1]), q.shape[-2] // k.shape[-2]
    tile = backward_tile(columns, call)
    queries, keys = (tile.block_m, columns), (tile.block_n, columns)
    entries, rows_q, rows_k = lengths_of(q, k, call)
    rule = mask_rule(call, tile, walks_keys=False)
    kernel: Any = hopper_backward_wide
    dq_accum: tuple[Any, ...] = ()
    with_dq: dict[str, Any] = {}
    if columns <= WIDEST_DQ_ACCUMULATOR:
        kernel, with_dq = hopper_backward, {"WITH_DQ": buffers.dq is not None}
        dq_accum = (None, None, None)
        if buffers.dq is not None:
            pieces = describe_dq_accumulator(buffers.dq, dq_columns(tile.block_m, columns))
            dq_accum = (pieces, buffers.counters, describe(dq, 64, columns))
    arguments = (
        describe(q, *queries), describe(k, *keys), describe(v, *keys), describe(dout, *queries),
        describe_rows(buffers.lse2, tile.block_m), describe_rows(buffers.delta, tile.block_m), *dq_accum,
        describe(dk, *keys), describe(dv, *keys), call.cu_seqlens_q, call.cu_seqlens_k, rule, score_arguments(call),
        dropout_arguments(call), call.scale / call.keep_rate, entries, rows_q, rows_k, k.shape[-2],
        grid.kv_heads_at_once(q, k, call, tile.block_n), grid.processors(q.device), buffers.padded,
    )  # fmt: skip
    constants = {
        "GROUP": group,
        "BLOCK_M": tile.block_m,
        "HEAD_DIM": columns,
        "STAGES": tile.num_stages,
        **with_dq,
        "num_warps": 4,
        "maxnreg": 168,
    }
    programs = (grid.count_work_tiles(k, call.cu_seqlens_k, tile.block_n),)
    return Launch(kernel, programs, arguments, constants, lists_launch(call, rule, walks_keys=False))


def dq_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    buffers: BackwardBuffers,
    dq: Tensor,
    dslope: Tensor | None,
    call: Call,
) -> Launch:
    columns = block_d(q.shape[-1])
    tile = dq_tile(columns, call)
    n_heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    entries, rows_q, rows_k = lengths_of(q, k, call)
    rule = mask_rule(call, tile.as_tile, walks_keys=True)
    arguments = (
        describe(q, 64, columns), describe(k, tile.block_n, columns), describe(v, tile.block_n, columns),
        describe(dout, 64, columns), buffers.lse2, buffers.delta, describe(dq, 64, columns),
        None if dslope is None else stats(dslope), call.cu_seqlens_q, call.cu_seqlens_k, rule, score_arguments(call),
        dropout_arguments(call), call.scale / call.keep_rate, call.keep_rate, entries, rows_q, rows_k, n_heads,
        grid.heads_at_once(q, k, call, tile.as_tile.block_m), buffers.padded,
    )  # fmt: skip
    constants = {
        "GROUP": group,
        "BLOCK_N": tile.block_n,
        "HEAD_DIM": columns,
        "K_STAGES": tile.k_stages,
        "V_STAGES": tile.v_stages,
        "num_warps": 4,
        "maxnreg": 168,
    }
    programs = (grid.count_work_tiles(q, call.cu_seqlens_q, tile.as_tile.block_m),)
    return Launch(hopper_backward_dq, programs, arguments, constants, lists_launch(call, rule, walks_keys=True))


def finish_launch(buffers: BackwardBuffers, dq: Tensor, k: Tensor, call: Call) -> Launch:
    entries, rows, _ = lengths_of(dq, k, call)
    columns, slots = block_d(dq.shape[-1]), buffers.padded // PAD
    tile = backward_tile(columns, call)
    heads = grid.total_kv_heads(k, call)
    at_once, last = grid.head_groups(dq, k, call)
    # the backward itself has converted the other blocks (``backward.dq_accumulator``)
    n_blocks = slots * dq.shape[-2] // heads * (heads - last * at_once)
    arguments = (
        buffers.dq, strided(dq), call.cu_seqlens_q, call.scale / call.keep_rate, entries, rows, buffers.padded,
        slots, dq.shape[-2],
    )  # fmt: skip
    piece = int(dq_columns(tile.block_m, columns))
    constants = {"HEAD_DIM": dq.shape[-1], "BLOCK_D": columns, "BLOCK": PAD, "COLUMNS": piece}
    return Launch(hopper_finish, (n_blocks,), arguments, constants)
