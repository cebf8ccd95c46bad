"""The tile scheduler of Hopper's kernels: it gives out each tile once, and all processors finish almost together."""

import heapq
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention.kernels.device.mask import MaskRule, query_visits
from flash_train.attention.kernels.hopper import grid, tiles
from flash_train.attention.kernels.hopper.scheduler import TileScheduler, find_work_tile, is_reversed, lanes, query_tile
from flash_train.attention.kernels.launch_options import launch_options
from tests.support.gluon import launch as emulate
from tests.support.tiers import slow_after

PROCESSORS = 132
UNPACKED = SimpleNamespace(cu_seqlens_q=None, cu_seqlens_k=None)


@gluon.jit(do_not_specialize=["n_entries", "seqlen", "n_heads", "heads_at_once"])
def write_order(out, n_entries, seqlen, n_heads, heads_at_once, n_tasks, BLOCK: gl.constexpr, WALKS_KEYS: gl.constexpr):
    """Entry, head and tile of each task of unpacked calls, int32 (n_tasks, 3)."""
    scheduler = TileScheduler(None, None, n_entries, seqlen, seqlen, n_heads, heads_at_once)
    for task in range(0, n_tasks):
        seq, head, row, live = find_work_tile(gl.to_tensor(task), scheduler, BLOCK, WALKS_KEYS, WALKS_KEYS)
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
    """The fraction of time that processors are idle at the end, if each free processor takes the next task."""
    free = [0.0] * PROCESSORS
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return 1 - sum(free) / PROCESSORS / max(free)


@pytest.mark.parametrize(
    "entries, tokens, heads, kv_heads, head_dim",
    slow_after(2, [
        (1, 16384, 8, 8, 256), (4, 4096, 32, 8, 128), (8, 2048, 16, 16, 128), (4, 4096, 16, 16, 128),
        (2, 8192, 16, 16, 128), (1, 16384, 16, 16, 128), (1, 16384, 32, 8, 128), (1, 16384, 32, 32, 64),
    ], unpack=True),
)  # fmt: skip
def test_all_processors_finish_at_the_same_time(entries, tokens, heads, kv_heads, head_dim):
    """Causal: a tile of queries costs one step per block of keys before it, a tile of keys two per block after it."""
    q = torch.empty(entries, tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(entries, tokens, kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    block = 64 * (tiles.LONG if head_dim == 64 else tiles.FORWARD[head_dim]).consumers
    with launch_options(processors=PROCESSORS):
        at_once = grid.heads_at_once(q, k, UNPACKED, block)
    taken, _ = order(entries, tokens, heads, at_once, True, block)
    assert waiting([1.5 + tile for tile in taken]) < 0.02
    block = tiles.BACKWARD[head_dim].block_n
    with launch_options(processors=PROCESSORS):
        at_once = grid.kv_heads_at_once(q, k, UNPACKED, block)
    taken, n = order(entries, tokens, kv_heads, at_once, False, block)
    assert waiting([3.7 + 2 * heads // kv_heads * (n - tile) for tile in taken]) < 0.02


@pytest.mark.parametrize("at_once", range(1, 8))
def test_every_tile_is_taken_once_for_any_number_of_heads(at_once):
    order(3, 300, 2, at_once, True)
    order(2, 129, 3, at_once, False)


@gluon.jit(do_not_specialize=["seqlen", "n_kv_heads", "heads_at_once", "processors"])
def write_walks(
    out, mask, seqlen, n_kv_heads, heads_at_once, processors, STEPS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The steps of each task, one program per task: int32 (n_tasks, STEPS).

    A step is the number of a tile of queries, counted over all heads; -1 fills the row after the last step.
    """
    scheduler = TileScheduler(None, None, 1, seqlen, seqlen, n_kv_heads, heads_at_once, processors)
    task = gl.program_id(0)
    seq, kv_head, start_n, live = find_work_tile(task, scheduler, BLOCK_N, False, False)
    visits = query_visits(mask, seq, kv_head.to(gl.int64) * GROUP, start_n, lanes(), BLOCK_M, BLOCK_N)
    reverse = is_reversed(task, scheduler)
    for i in range(0, GROUP * (visits.stop - visits.first)):
        head, start_m = query_tile(visits, mask, kv_head, i, reverse, GROUP, BLOCK_M)
        gl.store(out + task * STEPS + i, head * (seqlen // BLOCK_M) + start_m // BLOCK_M)


def misses(walks, processors, cached):
    """Count the misses of an LRU cache of ``cached`` tiles. Each free processor takes the next walk."""
    cache, missed, left = OrderedDict(), 0, iter(walks)
    at_work = [iter(next(left, ())) for _ in range(processors)]
    while at_work:
        remaining = []
        for walk in at_work:
            tile = next(walk, None)
            while tile is None and (following := next(left, None)) is not None:
                walk = iter(following)
                tile = next(walk, None)
            if tile is None:
                continue
            missed += tile not in cache
            cache[tile] = None
            cache.move_to_end(tile)
            if len(cache) > cached:
                cache.popitem(last=False)
            remaining.append(walk)
        at_work = remaining
    return missed


@pytest.mark.parametrize("processors", [15, 16])
def test_grouped_heads_reuse_tiles_in_the_cache(processors):
    """Causal, 4 query heads per key head: tiles are rarely read from memory again, though the queries of a key head
    are four times as large as the cache."""
    seqlen, kv_heads, group, block_m, block_n = 2048, 8, 4, 64, 128
    of_head = seqlen // block_m
    walks = torch.full((kv_heads * seqlen // block_n, group * of_head), -1, dtype=torch.int32)
    emulate(
        write_walks, len(walks), walks, MaskRule(None, 0, (), None), seqlen, kv_heads, 1, processors,
        STEPS=walks.shape[1], GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    walks = [[tile for tile in walk if tile >= 0] for walk in walks.tolist()]
    assert sorted(map(sorted, walks)) == sorted(
        [head * of_head + tile for head in range(first_head, first_head + group) for tile in range(first, of_head)]
        for first_head in range(0, kv_heads * group, group)
        for first in range(0, of_head, block_n // block_m)
    )
    tiles_of_all = kv_heads * group * of_head
    assert misses(walks, processors, of_head) < 2 * tiles_of_all
    by_head = [sorted(walk) for walk in walks]
    assert misses(by_head, processors, of_head) > 3 * tiles_of_all
