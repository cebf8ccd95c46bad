"""How kernels read a mask: the blocks that they visit and the pairs that attend, compared with the mask itself.

``python -m tests.support.attention.readers 200`` draws random masks. For each it interprets a kernel that uses
``flash_train.attention.kernels.device.mask`` the way the attention kernels do.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_train.attention.kernels.arguments import mask_rule
from flash_train.attention.kernels.call import Bounds, Call
from flash_train.attention.kernels.device.mask import (
    block_start,
    count_edges,
    edge_block,
    key_visits,
    query_visits,
    visible,
)
from flash_train.attention.kernels.device.schedule import load_entry
from flash_train.attention.kernels.tile_lists import lists_launch
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.attention.masks import PARTIAL, SKIPPED, WHOLE, Causal, Full, Mask, Window
from flash_train.attention.packing import Entry, Packing, entries
from tests.support.attention.cases.drawn import SMALL, terms
from tests.support.attention.cases.problem import Case, build
from tests.support.attention.cases.recipes import Blocks, Documents

#: lengths above 128, the block size of maps that masks choose themselves
LENGTHS, SIDES = range(161), range(100)
TILES = (Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 128, 4, 1))
NAMES = {SKIPPED: "skipped", PARTIAL: "partial", WHOLE: "whole"}


@triton.jit
def read_mask(
    states, pairs, cu_q, cu_k, mask, n_entries, seqlen_q, seqlen_k, entry, head, n_blocks_k,
    WIDTH: tl.constexpr, WALKS_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per block of queries (WALKS_KEYS) or of keys: adds the state of each block that it visits.

    ``states`` is int32 (query blocks, key blocks). ``pairs`` is int32 (WIDTH, WIDTH), the result of ``visible``.
    """
    own = tl.program_id(0)
    seq = load_entry(entry, cu_q, cu_k, n_entries, seqlen_q, seqlen_k, WALKS_KEYS)
    if WALKS_KEYS:
        visits = key_visits(mask, seq, head, own * BLOCK_M, tl.arange(0, 128), BLOCK_M, BLOCK_N)
        m = own * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        n = tl.arange(0, WIDTH)[None, :]
    else:
        visits = query_visits(mask, seq, head, own * BLOCK_N, tl.arange(0, 128), BLOCK_M, BLOCK_N)
        m = tl.arange(0, WIDTH)[None, :]
        n = own * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    for block in range(visits.clear_from, visits.clear_to):
        _visit(states, visits, mask, block, own, n_blocks_k, 2, WALKS_KEYS, BLOCK_M, BLOCK_N)
    for i in range(0, count_edges(visits)):
        _visit(states, visits, mask, edge_block(visits, mask, i), own, n_blocks_k, 1, WALKS_KEYS, BLOCK_M, BLOCK_N)
    tl.store(pairs + m * WIDTH + n, visible(mask, seq, head, m, n).to(tl.int32))


@triton.jit
def _visit(
    states, visits, mask, block, own, n_blocks_k, state,
    WALKS_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if WALKS_KEYS:
        at = own * n_blocks_k + block_start(visits, mask, block, BLOCK_N) // BLOCK_N
    else:
        at = block_start(visits, mask, block, BLOCK_M) // BLOCK_M * n_blocks_k + own
    tl.store(states + at, tl.load(states + at) + state)  # visiting a block twice gives an invalid state


@dataclass(frozen=True)
class Reading:
    """One head of one entry: states of blocks, int8 (query blocks, key blocks), and attended pairs (len_q, len_k)."""

    states: Tensor
    pairs: Tensor


@dataclass(frozen=True)
class Question:
    """A mask and the call that uses it: rows of the query and key tensors, entries, packing and heads."""

    mask: Mask
    rows: tuple[int, int]
    entries: list[Entry]
    packing: Packing | None
    n_heads: int

    @classmethod
    def of(cls, case: Case) -> Question:
        problem = build(case, "cpu")
        q, k = problem.inputs["q"], problem.inputs["k"]
        rows = (q.shape[-3], k.shape[-3])
        return cls(problem.spec.mask, rows, entries(q, k, problem.packing), problem.packing, case.heads)

    def read(self, which: int, head: int, tile: Tile, walks_keys: bool) -> Reading:
        """Read the mask of one head of one entry with the kernel."""
        entry = self.entries[which]
        rows, columns = -(-entry.len_q // tile.block_m), -(-entry.len_k // tile.block_n)
        states = torch.zeros(rows, columns, dtype=torch.int32)
        width = triton.next_power_of_2(max(rows * tile.block_m, columns * tile.block_n, 1))
        pairs = torch.full((width, width), 7, dtype=torch.int32)
        if rows and columns:
            rule = mask_rule(self.call, tile, walks_keys)
            for lists in lists_launch(self.call, rule, walks_keys):
                lists.run()
            read_mask[(rows if walks_keys else columns,)](
                states, pairs, self.call.cu_seqlens_q, self.call.cu_seqlens_k, rule, len(self.entries), *self.rows,
                which, head, columns, width, walks_keys, tile.block_m, tile.block_n,
            )  # fmt: skip
        asked = pairs[: entry.len_q, : columns * tile.block_n]
        assert not asked[:, entry.len_k :].any(), "a key past the sequence's end attends"
        pairs = pairs[: entry.len_q, : entry.len_k]
        assert (pairs <= 1).all(), "a pair was not evaluated"
        return Reading(states.to(torch.int8), pairs)

    @property
    def call(self) -> Call:
        """The mask as arguments of the operator."""
        cu_q, cu_k = (None, None) if self.packing is None else (self.packing.cu_seqlens_q, self.packing.cu_seqlens_k)
        lowered, blocks = self.mask.lower(), self.mask.block_map(*self.rows, self.packing is not None)
        states, sizes = (None, (-1, -1)) if blocks is None else (blocks.states, blocks[1:])
        return Call(
            cu_q, cu_k, None, None, None, None, states, lowered.tensors, lowered.terms,
            Bounds(lowered.left, lowered.right, lowered.tail, *sizes), (0, 0, 0, 0), 0, 1.0, 0.0, 256,
        )  # fmt: skip

    def expected(self, which: int, head: int, tile: Tile, walks_keys: bool) -> Reading:
        """The same reading, computed from the mask itself."""
        entry, call = self.entries[which], self.call
        dense = _of_head(self.mask.dense(entry, self.n_heads), head)
        if (
            call.block_map is not None and not call.has_lists
        ):  # tiles do not divide the blocks: the map is one more term
            left, right = (None if bound < 0 else bound for bound in call.bounds[:2])
            band = Window(left, right).blocks(entry, tile.block_m, tile.block_n)[0]
            return Reading(band.clamp(max=PARTIAL), dense)
        states = _of_head(self.mask.blocks(entry, tile.block_m, tile.block_n, self.n_heads), head)
        if call.block_map is not None:  # blocks that the map skips, and blocks past its end, are not visited
            known = F.pad(_of_head(call.block_map[which if call.block_map.shape[0] > 1 else 0], head), (0, 1, 0, 1))
            rows = torch.arange(states.shape[0]) * tile.block_m // call.bounds[3]
            columns = torch.arange(states.shape[1]) * tile.block_n // call.bounds[4]
            rows, columns = rows.clamp(max=known.shape[0] - 1), columns.clamp(max=known.shape[1] - 1)
            known = known[rows][:, columns]
            states = torch.where(known == SKIPPED, SKIPPED, states)
            if call.terms and call.bounds[2] < 0:
                left, right = (None if bound < 0 else bound for bound in call.bounds[:2])
                band = Window(left, right).blocks(entry, tile.block_m, tile.block_n)[0]
                known = torch.where(band == WHOLE, known, known.clamp(max=PARTIAL))
                run = _first_run(known) if walks_keys else _first_run(known.T).T
                states = torch.where(run, WHOLE, states)
        return Reading(states.to(torch.int8), dense)


def _first_run(known: Tensor) -> Tensor:
    """The first run of consecutive whole blocks among the visited blocks of each row."""
    run = torch.zeros(known.shape, dtype=torch.bool)
    for row, states in zip(run, known.tolist(), strict=True):
        visited = [column for column, state in enumerate(states) if state != SKIPPED]
        first = next((place for place, column in enumerate(visited) if states[column] == WHOLE), len(visited))
        for column in itertools.takewhile(lambda column, states=states: states[column] == WHOLE, visited[first:]):
            row[column] = True
    return run


def _of_head(x: Tensor, head: int) -> Tensor:
    return x[head if x.shape[0] > 1 else 0]


def check(question: Question, which: int, head: int, tile: Tile, counts: Counter[str]) -> None:
    """Compare the kernel with the mask, for kernels that loop over keys and kernels that loop over queries."""
    entry = question.entries[which]
    for walks_keys in (True, False):
        expected = question.expected(which, head, tile, walks_keys)
        said = question.read(which, head, tile, walks_keys)
        where = f"{'keys' if walks_keys else 'queries'} of {question.mask}, {entry}, head {head}, {tile}"
        state = said.states.repeat_interleave(tile.block_m, 0).repeat_interleave(tile.block_n, 1)
        state = state[: entry.len_q, : entry.len_k]
        # the kernels evaluate pairs in partial blocks only
        attended = (state == WHOLE) | ((state == PARTIAL) & (said.pairs == 1))
        assert torch.equal(attended, expected.pairs), f"pairs differ: {where}"
        states = expected.states
        if not walks_keys:  # these kernels mask the end of the queries instead
            if entry.len_q % tile.block_m:
                states[-1] = states[-1].clamp(max=PARTIAL)
            if entry.len_k % tile.block_n and states.shape[1]:
                last = states[:, -1]  # the loop does not end here: the block may be whole up to the end
                states[:, -1] = torch.where(last == SKIPPED, SKIPPED, said.states[:, -1].clamp(min=PARTIAL))
        assert torch.equal(said.states, states), f"blocks differ: {where}\n{said.states}\n{states}"
        if question.call.has_lists and question.call.terms and question.call.bounds.tail < 0:
            counts["whole in spite of terms"] += int((said.states == WHOLE).sum())
        for state in (SKIPPED, PARTIAL, WHOLE):
            counts[f"{'keys' if walks_keys else 'queries'} {NAMES[state]}"] += int((said.states == state).sum())


@st.composite
def questions(draw: st.DrawFn) -> tuple[Case, Tile, int]:
    """A call with a random mask, a tile, and the number of the entry to read."""

    def pick(options: Sequence[Any]) -> Any:
        return draw(st.sampled_from(options))

    packed, count = pick((False, True)), pick((1, 2, 3))
    lengths = [(pick(LENGTHS), pick(LENGTHS)) for _ in range(count if packed else 1)]
    left, right = ((pick(SIDES) if pick((False, True)) else None) for _ in range(2))
    # long documents and small blocks, so that some blocks are inside one document
    long_documents = (Documents(80), Blocks(pick(((16, 16), (32, 16))), 0.8))
    case = Case(
        "question",
        tuple(lengths) if packed else tuple(lengths * count),
        head_dim=1,
        band=pick((Full(), Causal(), Window(left, right), Window(left, right), Window(left, 0))),
        terms=long_documents if pick((False, False, True)) else terms(pick, SMALL, numbers=(0, 1, 1, 2)),
        packed=packed,
        tail=(pick((0, 5)), pick((0, 5))) if packed else (0, 0),
        seed=pick(range(2**31)),
    )
    return case, pick(TILES), pick(range(count))


def main(draws: int) -> None:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()

    @settings(max_examples=draws, deadline=None, derandomize=True, database=None)
    @given(questions())
    def agree(drawn: tuple[Case, Tile, int]) -> None:
        case, tile, which = drawn
        counts["draws"] += 1
        counts.update(f"of {type(term).__name__}" for term in case.terms)
        question = Question.of(case)
        if question.call.has_lists:
            tile = tile.within(*question.call.bounds[3:])
        for head in range(case.heads):
            check(question, which, head, tile, counts)

    agree()
    print(json.dumps(counts))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
