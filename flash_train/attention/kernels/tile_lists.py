"""Lists of the tiles that a kernel visits, from a block map: an ascending list for each row or column of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.device.mask import MaskRule
from flash_train.attention.kernels.launch import Launch
from flash_train.attention.masks import PARTIAL, SKIPPED

MAX_BLOCKS_AT_ONCE = 1024  #: blocks that a program reads in one step
_SKIPPED, _PARTIAL = tl.constexpr(SKIPPED), tl.constexpr(PARTIAL)


@triton.jit(do_not_specialize=["of_entry", "of_head", "of_row", "of_block", "n_heads", "n_rows", "n_blocks", "repeats"])
def list_tiles(
    states, of_entry, of_head, of_row, of_block, tiles, counts, n_heads, n_rows, n_blocks, repeats,
    ASKS_TERMS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Fill ``tiles`` and ``counts`` of ``MaskRule``.

    Each visited block contributes ``repeats`` tiles. The rest of a list holds tiles past the sequence's end.
    ``of_entry`` to ``of_block`` are the strides of ``states``.

    Grid (entries or 1, times heads or 1, times rows).
    """
    at = tl.program_id(0).to(tl.int64)
    row, head, entry = at % n_rows, at // n_rows % n_heads, at // n_rows // n_heads
    own = states + entry * of_entry + head * of_head + row * of_row
    capacity = n_blocks * repeats
    listed = tiles + at * capacity
    count = n_blocks * 0
    for first in range(0, n_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        state = tl.load(own + block.to(tl.int64) * of_block, mask=block < n_blocks, other=_SKIPPED)
        visited = state != _SKIPPED
        place = (count + tl.cumsum(visited.to(tl.int32), 0) - 1) * repeats
        asked = (state == _PARTIAL).to(tl.int32) if ASKS_TERMS else 0
        for i in range(repeats):
            tl.store(listed + place + i, 2 * (block * repeats + i) + asked, mask=visited)
        count += tl.sum(visited.to(tl.int32), 0)
    count *= repeats
    tl.store(counts + at, count)
    for first in range(0, capacity, BLOCKS):
        place = first + tl.arange(0, BLOCKS)
        tl.store(listed + place, 2 * capacity, mask=(place >= count) & (place < capacity))


def lists_launch(call: Call, rule: MaskRule, walks_keys: bool) -> tuple[Launch, ...]:
    """Return the launches that fill the lists of ``rule`` before its kernel runs; none if it has no lists."""
    if rule.tiles is None:
        return ()
    states = call.block_map
    assert states is not None  # the lists are of its blocks
    of_entry, of_head, of_row, of_block = states.stride()
    entries, heads, rows, n_blocks = states.shape
    if not walks_keys:
        of_row, of_block, rows, n_blocks = of_block, of_row, n_blocks, rows
    repeats = rule.capacity // max(n_blocks, 1)
    arguments = (states, of_entry, of_head, of_row, of_block, rule.tiles, rule.counts, heads, rows, n_blocks, repeats)
    constants = {
        "ASKS_TERMS": bool(rule.terms) and rule.tail is None,  # with a tail, the terms apply to its keys only
        "BLOCKS": min(triton.next_power_of_2(max(n_blocks, 1)), MAX_BLOCKS_AT_ONCE),
        "num_warps": 1,
    }
    return (Launch(list_tiles, (entries * heads * rows,), arguments, constants, made=(rule.tiles, rule.counts)),)
