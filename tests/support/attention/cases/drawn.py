"""Random cases of the contract, drawn by hypothesis or from a seed.

``variant`` draws what a kernel is compiled for, and ``problem`` everything else. Both make each decision by a function
``pick(options)``: ``draw(sampled_from(options))`` in a hypothesis strategy, ``Random(seed).choice`` in ``fuzz``.

``python -m tests.support.attention.cases.drawn 100`` runs 100 cases that hypothesis draws, always the same ones, in the
Triton interpreter, and shrinks the first that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_train.attention.masks import Causal, Full, Window
from tests.support.attention.cases.problem import STRIDED, Case
from tests.support.attention.cases.recipes import Blocks, Documents, Nodes, Recipe, Rule
from tests.support.attention.contract import run

Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Limits:
    """The sizes and dtypes to draw from."""

    lengths: Sequence[int]
    head_dims: Sequence[int]
    heads: Sequence[tuple[int, int]]
    dtypes: Sequence[torch.dtype]
    entries: int
    block_sizes: Sequence[int]
    rules: Sequence[str] = ("parity", "budget")
    far: bool = False  #: also draw tensors of some gigabytes, whose rows are far apart


#: for the Triton interpreter and the dense backends, on a CPU
SMALL = Limits(
    lengths=(0, 1, 2, 3, *range(4, 71, 3), 16, 32, 48, 64),
    head_dims=(1, 2, 5, 8, 16, 16, 16, 24, 32, 33, 48, 64),
    heads=((1, 1), (2, 2), (2, 1), (3, 1), (4, 2)),
    dtypes=(torch.float32, torch.float32, torch.float16),
    entries=3,
    block_sizes=(16, 16, 32, 32, 64, 24),
)

#: for a GPU: lengths cross several tiles
CARD = Limits(
    lengths=(0, 1, 2, 3, *range(5, 130, 7), *range(130, 700, 31), 16, 64, 128, 144, 256, 512, 640),
    head_dims=(1, 3, 8, 16, 24, 32, 40, 64, 64, 65, 80, 96, 111, 128, 128, 128, 160, 192, 255, 256),
    heads=((1, 1), (2, 2), (2, 1), (3, 1), (4, 2)),
    dtypes=(torch.bfloat16, torch.bfloat16, torch.float16, torch.float32),
    entries=3,
    block_sizes=(16, 32, 64, 128, 128, 256, 48),
    far=True,
)

#: for Hopper's kernels on a GPU: head dimensions that TMA supports, and blocks of whole tiles
HOPPER = replace(
    CARD,
    head_dims=(8, 16, 40, 64, 64, 64, 72, 96, 128, 128, 128, 136, 192, 256),
    dtypes=(torch.bfloat16, torch.bfloat16, torch.float16),
    block_sizes=(128, 128, 256),
)

#: for Hopper's kernels in the emulator
HOPPER_SMALL = replace(HOPPER, lengths=(0, 1, 2, 3, *range(5, 330, 27), 16, 64, 128, 144, 256), far=False)

MOST_FAR_ROWS = 180  #: over all entries: 6 GB

BANDS = ("full", "causal", "causal", "window", "causal-window", "left", "right")


@dataclass(frozen=True)
class Variant:
    """The settings that kernels are compiled for: a case without lengths, bounds and contents.

    Triton also specialises for integers that are 1 or divisible by 16, and for aligned addresses. ``aligned`` says
    whether the integers that differ between draws of this variant are divisible by 16.
    """

    case: Case
    band: str
    aligned: bool
    limits: Limits


def variant(pick: Pick, limits: Limits) -> Variant:
    """Draw the settings that kernels are compiled for."""
    heads, kv_heads = pick(limits.heads)
    head_dim = pick(limits.head_dims)
    dtype = pick(limits.dtypes)
    dropout = pick((0.0, 0.0, 0.1, 0.5, 0.93))
    # the backward has separate code for dlse and dout
    slopes = pick(("", "", "heads", "entries"))
    small = dtype != torch.float16 or max(limits.lengths) < 100  # else PyTorch's own slope gradients overflow
    case = Case(
        "draw", (), heads, kv_heads, head_dim,
        v_head_dim=pick((None, None, None, *limits.head_dims)),
        terms=terms(pick, limits),
        scale=pick((None, None, None, 0.3)),
        softcap=pick((0.0, 0.0, 0.0, 1.5)),
        dropout=dropout,
        slopes=slopes,
        sinks=pick((False, False, True)),
        learns=pick((True, True, True, False)) and (small or not slopes),
        packed=pick((False, True)),
        strided=pick(("", "", "", "", "wide", *STRIDED)),
        dout=pick(("dense", "dense", "dense", "row", "scalar", *STRIDED)),
        uses=pick(("both", "both", "plain", "out", "lse")),
        dtype=dtype,
    )  # fmt: skip
    return Variant(case, pick(BANDS), pick((True, False)), limits)


def problem(variant: Variant, pick: Pick) -> Case:
    """Draw the lengths, bounds, coordinates and contents of one call of the variant."""
    case, limits = variant.case, variant.limits
    count = pick(range(1, limits.entries + 1))
    usual = [n for n in limits.lengths if _divisible(n) == variant.aligned]
    lengths: list[tuple[int, int]] = []
    for _ in range(count if case.packed else 1):
        len_q = pick(limits.lengths if case.packed else usual)
        len_k = len_q if pick((True, True, False)) else pick(limits.lengths if case.packed else usual)
        lengths.append((len_q, len_k))
    if not case.packed:
        lengths = lengths * count
    tail = tuple(_tail(sum(pair[side] for pair in lengths), variant.aligned, pick) for side in (0, 1))
    case = replace(case, lengths=tuple(lengths), tail=tail if case.packed else (0, 0))
    # the log-sum-exp is fp32: its rounding error grows with the scores, and dominates if the inputs are fp32, too
    largest = 2.0 if case.dtype == torch.float32 else 4.0
    far = pick(("", "", "", "q", "k", "v", "dout"))
    rows = max(case.layout.rows(side) * (1 if case.packed else count) for side in (0, 1))
    return replace(
        case,
        far=far if limits.far and rows <= MOST_FAR_ROWS and case.dtype.itemsize == 2 else "",
        band=_band(variant, pick),
        origin=_origin(variant, pick) if case.dropout else (0, 0, 0, 0),
        spread=pick((1.0, 1.0, 1.0, largest)),
        seed=pick(range(2**31)),
    )


def for_hopper(case: Case) -> Case:
    """The case with settings that Hopper's kernels support.

    These are v as wide as q, an aligned origin, contiguous columns, and one block pattern for heads that share keys.
    """
    from flash_train.attention.kernels.portable.tiles import block_d  # Triton exists for Linux only

    v_head_dim = case.v_head_dim
    if v_head_dim is not None and block_d(v_head_dim) != block_d(case.head_dim):
        v_head_dim = None
    entry, head, query, key = case.origin
    strided = "wide" if case.strided == "columns" else case.strided
    origin = (entry, head, query // 16 * 16, key // 16 * 16)
    pieces = -(-case.pieces // 16) * 16
    terms = case.terms
    if case.heads != case.kv_heads:
        terms = tuple(replace(term, per_head=False) if isinstance(term, Blocks) else term for term in terms)
    return replace(case, v_head_dim=v_head_dim, origin=origin, pieces=pieces, strided=strided, terms=terms)


@st.composite
def cases(draw: st.DrawFn, limits: Limits = SMALL) -> Case:
    """A hypothesis strategy for cases."""

    def pick(options: Sequence[Any]) -> Any:
        return draw(st.sampled_from(options))

    return problem(variant(pick, limits), pick)


def terms(pick: Pick, limits: Limits, numbers: Sequence[int] = (0, 0, 0, 1, 1, 2)) -> tuple[Recipe, ...]:
    """Draw no, one or two mask terms, at most one of each kind, since block sizes must agree."""
    longest = max(limits.lengths)
    size = (pick(limits.block_sizes), pick(limits.block_sizes))
    blocks = Blocks(
        size,
        density=pick((0.15, 0.5, 0.9)),
        per_head=pick((False, True)),
        shape=tuple(-(-longest // side) for side in size),
    )
    documents = Documents(pick((3, 13, longest // 2)), shared=pick((False, True)), ordered=pick((True, True, False)))
    nodes = Nodes(pick((1, 2, 9, 31, 32, 33, 64)), per_entry=pick((False, True)))
    rules = tuple(Rule(name) for name in limits.rules)
    kinds = (blocks, documents, nodes, *rules)
    number = pick(numbers)
    first = pick(range(len(kinds)))
    chosen = (kinds[first], kinds[(first + pick(range(1, len(kinds)))) % len(kinds)])
    return chosen[:number]


def _band(variant: Variant, pick: Pick) -> Full | Causal | Window:
    if variant.band == "full":
        return Full()
    if variant.band == "causal":
        return Causal()
    longest = max(variant.limits.lengths)
    bounds = [n for n in (0, 1, 2, 3, 5, 9, 16, 31, 32, 64, 77, 144, 301, 512) if n <= longest]
    usual = [n for n in bounds if _divisible(n) == variant.aligned and n != 1]
    left, right = pick(usual), pick(usual)
    if variant.band == "causal-window":
        return Window(left, 0)
    return Window(None if variant.band == "right" else left, None if variant.band == "left" else right)


def _origin(variant: Variant, pick: Pick) -> tuple[int, int, int, int]:
    """Draw the coordinates of a shard, multiples of 16 if aligned."""
    entry, head = (pick((0, 16, 2**30)) if variant.aligned else pick((2, 3, 2**31 - 5)) for _ in range(2))
    query, key = (16 * pick(range(9)) if variant.aligned else 2 + pick(range(13)) for _ in range(2))
    return entry, head, query, key


def _tail(total: int, aligned: bool, pick: Pick) -> int:
    """Draw the rows past the last entry. The total is divisible by 16 if and only if ``aligned``."""
    tail = pick((0, 0, 1, 5, 37))
    if aligned:
        return tail + -(total + tail) % 16
    return tail + (1 if _divisible(total + tail) else 0)


def _divisible(n: int) -> bool:
    return n % 16 == 0


def main(draws: int) -> None:
    torch.set_num_threads(1)
    made = 0

    @settings(max_examples=draws, deadline=None, derandomize=True, database=None)
    @given(cases(SMALL))
    def holds(case: Case) -> None:
        nonlocal made
        made += 1
        wrong = [error for error in run(case, "triton", "cpu") if not error.ok]
        assert not wrong, f"{case.source}: {wrong}"

    holds()
    print(f"{made} draws, derandomised")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
