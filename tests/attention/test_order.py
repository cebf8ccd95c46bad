"""The order in which Hopper's kernels take tasks: each once, and so that no processor waits for another at the end."""

import heapq
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention.kernels.hopper import launch, tiles
from flash_train.attention.kernels.hopper.tasks import Work, find_task
from tests.attention.gluon import launch as emulate

PROCESSORS = 132
UNPACKED = SimpleNamespace(cu_seqlens_q=None, cu_seqlens_k=None)


@gluon.jit(do_not_specialize=["n_entries", "seqlen", "n_heads", "heads_at_once"])
def write_order(out, n_entries, seqlen, n_heads, heads_at_once, n_tasks, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr):
    """Entry, head and tile of each task of unpacked calls, int32 (n_tasks, 3)."""
    work = Work(None, None, n_entries, seqlen, seqlen, n_heads, heads_at_once, 132)
    for task in range(0, n_tasks):
        seq, head, row, live = find_task(gl.to_tensor(task), work, BLOCK, WALKS_KEYS, WALKS_KEYS)
        gl.store(out + 3 * task, seq.index, mask=live)
        gl.store(out + 3 * task + 1, head, mask=live)
        gl.store(out + 3 * task + 2, row // BLOCK, mask=live)


def order(entries, tokens, heads, at_once, walks_keys, block=128):
    n = -(-tokens // block)
    out = torch.full((entries * heads * n, 3), -1, dtype=torch.int32)
    emulate(write_order, 1, out, entries, tokens, heads, at_once, len(out), BLOCK=block, WALKS_KEYS=walks_keys)
    assert sorted(map(tuple, out.tolist())) == [
        (entry, head, tile) for entry in range(entries) for head in range(heads) for tile in range(n)
    ]
    return [tile for _, _, tile in out.tolist()], n


def waiting(costs):
    """The part of the time that processors wait at the end, where who is free takes the next task."""
    free = [0.0] * PROCESSORS
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return 1 - sum(free) / PROCESSORS / max(free)


@pytest.mark.parametrize(
    "entries, tokens, heads, kv_heads, head_dim",
    [(8, 2048, 16, 16, 128), (4, 4096, 16, 16, 128), (2, 8192, 16, 16, 128), (1, 16384, 16, 16, 128),
     (1, 16384, 32, 8, 128), (4, 4096, 32, 8, 128), (1, 16384, 8, 8, 256), (1, 16384, 32, 32, 64)],
)  # fmt: skip
def test_processors_end_together(entries, tokens, heads, kv_heads, head_dim, monkeypatch):
    """Causal: a tile of queries costs as many steps as there are keys before it, one of keys twice those behind it."""
    monkeypatch.setattr(launch, "processors", lambda device: PROCESSORS)
    q = torch.empty(entries, tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(entries, tokens, kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    block = 64 * (tiles.LONG if head_dim == 64 else tiles.FORWARD[head_dim]).consumers
    taken, _ = order(entries, tokens, heads, launch._heads_at_once(q, k, UNPACKED, block), True, block)
    assert waiting([1.5 + tile for tile in taken]) < 0.02
    block = tiles.BACKWARD[head_dim].block_n
    taken, n = order(entries, tokens, kv_heads, launch._kv_heads_at_once(q, k, UNPACKED, block), False, block)
    assert waiting([3.7 + 2 * heads // kv_heads * (n - tile) for tile in taken]) < 0.02


@pytest.mark.parametrize("at_once", range(1, 8))
def test_any_number_of_heads_at_once(at_once):
    order(3, 300, 2, at_once, True)
    order(2, 129, 3, at_once, False)
