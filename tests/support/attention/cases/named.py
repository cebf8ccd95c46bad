"""Named cases of the contract, and random cases that once failed."""

from __future__ import annotations

from dataclasses import replace

import torch

from flash_train.attention.masks import Full, Window
from tests.support.attention.cases.problem import Case
from tests.support.attention.cases.recipes import Blocks, Documents, Nodes, Rule


def _same(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((n, n) for n in lengths)


CASES = (
    # lengths, heads and head dimensions
    Case("causal", _same(64, 64)),
    Case("full", _same(64, 64), band=Full()),
    Case("odd-length", _same(77), head_dim=24),
    Case("one-token", _same(1, 1)),
    Case("no-queries", ((0, 20),)),
    Case("no-keys", ((20, 0),), sinks=True),
    Case("longer-keys", ((37, 90),)),
    Case("fully-masked-rows", ((90, 37),)),
    Case("full-unequal", ((45, 70),), band=Full(), head_dim=8),
    Case("head-dim-1", _same(33), head_dim=1),
    Case("wider-values", _same(50), head_dim=16, v_head_dim=40),
    Case("narrower-values", ((40, 50),), head_dim=33, v_head_dim=7, heads=4),
    Case("gqa", _same(70), heads=4, kv_heads=2),
    Case("mqa-dropout", _same(70), heads=3, kv_heads=1, dropout=0.3),
    Case("large-scores", _same(50), spread=6.0),
    Case("far-from-0", _same(50), offset=300.0),
    Case("far-below-0", _same(50), offset=-300.0, band=Full(), heads=4, kv_heads=2),
    Case("far-from-0-alibi-dropout", _same(50), offset=200.0, slopes="heads", dropout=0.2),
    # memory
    Case("strided", _same(50, 50), strided="wide", dout="wide"),
    Case("strided-packed", _same(40, 30), packed=True, strided="wide", dout="wide", heads=4, kv_heads=2),
    Case("strided-rows", _same(40, 40), strided="rows", dout="rows"),
    Case("strided-heads", _same(40, 40), strided="heads", dout="heads", heads=4, kv_heads=2),
    Case("strided-columns", _same(40, 30), packed=True, strided="columns", dout="columns"),
    Case("dout-one-row", _same(40, 40), dout="row"),
    Case("dout-one-number", _same(40, 40), dout="scalar", uses="out"),
    # packing
    Case("packed", _same(40, 1, 70, 16), packed=True),
    Case("packed-gqa-dropout", _same(40, 33, 9), heads=4, kv_heads=2, packed=True, dropout=0.2),
    Case("packed-empty-entries", _same(0, 33, 0, 0, 50, 0), packed=True, tail=(21, 21)),
    Case("packed-cross", ((20, 50), (50, 20), (0, 7), (7, 0)), packed=True, dropout=0.1, tail=(5, 5)),
    Case("packed-nothing", _same(0, 0), packed=True, tail=(9, 9), sinks=True, slopes="entries"),
    # scores
    Case("scale", _same(40), scale=0.9),
    Case("softcap", _same(64), softcap=2.0, heads=4),
    Case("alibi", ((50, 64),), slopes="heads", band=Full()),
    Case("alibi-entries", _same(40, 40), slopes="entries", heads=4, kv_heads=1),
    Case("alibi-packed", ((40, 40), (0, 3), (33, 50)), slopes="entries", packed=True, tail=(9, 0), band=Window(30, 4)),
    Case("alibi-fixed", _same(40), slopes="heads", learns=False),
    Case("sinks", ((70, 50),), sinks=True),
    Case("sinks-only-seen", ((40, 30),), sinks=True, packed=True, tail=(6, 3), dropout=0.2),
    # dropout
    Case("dropout", _same(75, 75), dropout=0.1),
    Case("dropout-full", _same(75), band=Full(), dropout=0.5),
    Case("dropout-shard", _same(64), dropout=0.3, origin=(3, 2, 48, 16)),
    Case("dropout-unaligned-shard", _same(64), dropout=0.3, origin=(1, 5, 37, 3)),
    Case("dropout-pieces", ((20, 50), (0, 7), (33, 40), (16, 16)), dropout=0.3, pieces=16, packed=True, tail=(5, 9)),
    Case("dropout-pieces-padded", _same(40, 40), dropout=0.3, origin=(0, 5, 0, 0), pieces=16),
    Case("dropout-unaligned-pieces", ((20, 50), (33, 40)), dropout=0.3, pieces=1, packed=True),
    Case("dropout-most", _same(40), dropout=0.99),
    # results that the loss uses
    Case("plain-call", _same(40, 40), uses="plain"),
    Case("output-only", ((40, 30),), uses="out", softcap=3.0, slopes="heads", sinks=True),
    Case("lse-only", ((40, 30),), uses="lse", slopes="heads", sinks=True),
    # masks
    Case("window", ((90, 77),), band=Window(20, 5)),
    Case("window-causal", ((37, 90),), band=Window(7, 0)),
    Case("window-left", ((50, 40),), band=Window(12, None)),
    Case("window-right", ((40, 66),), band=Window(None, 9)),
    Case("window-of-one", _same(40), band=Window(0, 0)),
    Case("documents", _same(70, 70), terms=(Documents(),)),
    Case("documents-in-any-order", _same(50), terms=(Documents(shared=True, ordered=False),), band=Full()),
    Case("documents-packed", ((50, 50), (30, 20)), terms=(Documents(9),), packed=True, tail=(20, 4), band=Full()),
    Case("documents-cross", ((40, 66), (40, 66)), terms=(Documents(20),), band=Full()),
    # blocks of one document only
    Case("documents-long", _same(600), heads=1, kv_heads=1, terms=(Documents(400),)),
    Case("documents-long-window", ((450, 580),), terms=(Documents(400),), band=Window(300, 140)),
    Case("tree", ((9, 70), (9, 70)), terms=(Nodes(9),), band=Full(), heads=4, kv_heads=1),
    Case("tree-packed", ((9, 9), (9, 40), (20, 5)), terms=(Nodes(9, per_entry=True),), packed=True, band=Full()),
    Case("tree-of-words", ((40, 60),), terms=(Nodes(40),), band=Full()),
    Case("blocks", ((70, 90),), terms=(Blocks((32, 32), per_head=True),), band=Full()),
    Case("blocks-gqa", _same(80), terms=(Blocks((16, 64)),), band=Window(40, 12), heads=4),
    Case("blocks-packed", ((70, 80), (33, 20)), terms=(Blocks((32, 64), 0.6, True),), packed=True, tail=(0, 3)),
    Case("blocks-of-any-size", ((70, 90),), terms=(Blocks((7, 24)),), band=Window(30, None)),
    Case("blocks-empty", _same(64), terms=(Blocks((32, 32), 0.0),), band=Full(), sinks=True),
    Case("function", _same(60, 60), terms=(Rule("parity"),)),
    Case("function-tensors", ((40, 40), (30, 50)), terms=(Rule("budget"),), packed=True, band=Full(), tail=(3, 0)),
    # together
    Case(
        "everything", ((40, 60), (7, 0), (50, 33)), heads=4, kv_heads=2, v_head_dim=24, band=Window(30, 0),
        terms=(Documents(20), Blocks((32, 32), 0.8)), softcap=3.0, dropout=0.3, slopes="heads", sinks=True,
        packed=True, tail=(20, 11), strided="wide",
    ),
    Case(
        "all-terms", _same(64), heads=4, terms=(Blocks((32, 32), 0.8), Nodes(20), Documents(30), Rule("parity")),
        dropout=0.1, origin=(0, 0, 5, 0),
    ),
)  # fmt: skip

#: draws of ``tests.support.attention.fuzz`` that once failed
KEPT: tuple[Case, ...] = (
    # a map of one row: Triton 3.6 loses a 1 in a named tuple inside a named tuple
    Case(
        name="kept-453",
        lengths=((64, 64), (64, 64), (64, 64)),
        heads=3,
        kv_heads=1,
        head_dim=128,
        band=Window(left=512, right=None),
        terms=(Rule(name="parity"), Documents(mean=3, shared=False, ordered=True)),
        dropout=0.5,
        origin=(16, 16, 128, 128),
        strided="wide",
        dout="row",
        uses="plain",
        dtype=torch.float16,
        seed=202335825,
    ),
    # v_head_dim 192 with head_dim 1
    Case(
        name="kept-2600",
        lengths=((409, 124), (192, 192), (61, 61)),
        heads=3,
        kv_heads=1,
        head_dim=1,
        v_head_dim=192,
        terms=(Rule(name="parity"), Blocks(size=(48, 32), density=0.9, per_head=False, shape=(15, 22))),
        dropout=0.93,
        origin=(0, 16, 128, 16),
        learns=False,
        packed=True,
        tail=(10, 7),
        uses="lse",
        seed=2020249767,
    ),
    # v_head_dim 3 with head_dim 256: an illegal address
    Case(
        name="kept-5801",
        lengths=((626, 626), (130, 130)),
        kv_heads=1,
        head_dim=256,
        v_head_dim=3,
        band=Window(left=0, right=0),
        terms=(Blocks(size=(128, 64), density=0.15, per_head=False, shape=(6, 11)),),
        dropout=0.5,
        origin=(16, 1073741824, 112, 48),
        slopes="heads",
        sinks=True,
        packed=True,
        tail=(12, 12),
        strided="wide",
        dout="row",
        dtype=torch.bfloat16,
        seed=479395141,
    ),
    # the same, v_head_dim 16 with head_dim 128
    Case(
        name="kept-6300",
        lengths=((316, 124),),
        head_dim=128,
        v_head_dim=16,
        band=Window(left=None, right=144),
        scale=0.3,
        dropout=0.5,
        origin=(1073741824, 1073741824, 112, 112),
        learns=False,
        packed=True,
        tail=(20, 4),
        strided="wide",
        uses="lse",
        dtype=torch.bfloat16,
        seed=72937362,
    ),
    # the softcap needs more precision than one exponential gives
    Case(
        name="kept-16115",
        lengths=((657, 657), (657, 657)),
        head_dim=1,
        v_head_dim=32,
        band=Window(left=None, right=5),
        terms=(Blocks(size=(128, 16), density=0.15, per_head=True, shape=(6, 43)),),
        softcap=1.5,
        dropout=0.5,
        origin=(2147483643, 2, 3, 14),
        slopes="heads",
        dout="row",
        uses="out",
        seed=1790131112,
    ),
    # v_head_dim 1 with head_dim 40: wrong numbers
    Case(
        name="kept-17500",
        lengths=((68, 68), (68, 68), (68, 68)),
        heads=4,
        head_dim=40,
        v_head_dim=1,
        band=Full(),
        terms=(Rule(name="budget"), Rule(name="parity")),
        scale=0.3,
        dropout=0.1,
        origin=(2, 2147483643, 8, 2),
        dout="scalar",
        uses="out",
        dtype=torch.bfloat16,
        seed=496802418,
    ),
    # the same, v_head_dim 16 with head_dim 64
    Case(
        name="kept-19300",
        lengths=((117, 117), (54, 54)),
        kv_heads=1,
        head_dim=64,
        v_head_dim=16,
        band=Window(left=2, right=None),
        scale=0.3,
        dropout=0.1,
        origin=(3, 2147483643, 5, 2),
        slopes="heads",
        sinks=True,
        learns=False,
        packed=True,
        tail=(1, 1),
        strided="wide",
        uses="plain",
        dtype=torch.bfloat16,
        seed=135997876,
    ),
    # the same, v_head_dim 16 with head_dim 80: an illegal address
    Case(
        name="kept-19700",
        lengths=((144, 144), (640, 96), (68, 564)),
        heads=3,
        kv_heads=1,
        head_dim=80,
        v_head_dim=16,
        band=Window(left=None, right=77),
        softcap=1.5,
        slopes="entries",
        packed=True,
        tail=(0, 37),
        strided="wide",
        uses="lse",
        dtype=torch.bfloat16,
        seed=190256768,
    ),
)

BY_NAME = {case.name: case for case in CASES}


def in_dtypes(dtypes: tuple[torch.dtype, ...], names: tuple[str, ...] = ()) -> list[Case]:
    """The cases with these names, or all cases, in each dtype."""
    chosen = [BY_NAME[name] for name in names] or CASES
    return [replace(case, dtype=dtype) for case in chosen for dtype in dtypes]


def on_card(case: Case) -> Case:
    """The case with larger sizes, which cross several tiles of a GPU."""

    def longer(n: int) -> int:
        return 9 * n + (n > 1)

    def wider(bound: int | None) -> int | None:
        return bound and 9 * bound

    band = Window(wider(case.band.left), wider(case.band.right)) if isinstance(case.band, Window) else case.band
    sizes = {16: 128, 24: 72, 8: 64, 40: 192, 33: 129}
    return replace(
        case,
        lengths=tuple((longer(a), longer(b)) for a, b in case.lengths),
        band=band,
        terms=tuple(term.on_card() for term in case.terms),
        head_dim=sizes.get(case.head_dim, case.head_dim),
        v_head_dim=case.v_head_dim and sizes.get(case.v_head_dim, case.v_head_dim),
    )
