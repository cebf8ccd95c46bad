"""Random rows that several ranks share, against one process.

``python -m tests.support.attention.parallel.shared_rows 4 100`` draws 100 rows for 4 ranks.

The ranks are processes on the CPU that talk through gloo. Each draw compares ``shared_attention`` with ``attention`` on
the whole row: the output and the gradients of q, k, v and the sinks. Most draws are in fp64 and must agree to rounding.
The others are in bf16: there the largest error may be LIMIT_BF16 times the error of one process in bf16. The draws take
turns: both methods, with and without dropout, and rows of many documents, of one document, and with padding.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from flash_train.attention import AttentionSpec, Causal, Packing, RngState, Window, attention
from flash_train.attention.parallel.row_plan import plan_row
from flash_train.attention.parallel.shared_attention import shared_attention
from flash_train.attention.parallel.shared_row import Method, SharedRow
from flash_train.distributed.leave import leave_groups

LIMIT = 1e-10  #: in fp64: largest difference, relative to the largest value of the whole row's result, or to 1
LIMIT_BF16 = 3.0
FLOOR_BF16 = 4e-3  #: of the largest value: one process's error may be 0 by chance
BACKENDS = ("reference", "standard", "chunked")
METHODS: tuple[Method, ...] = ("ulysses", "gather")
ROWS = ("documents", "one document", "padding")


@dataclass(frozen=True)
class Draw:
    """The settings of one call."""

    seed: int
    method: Method
    lengths: tuple[int, ...]
    seq_len: int
    heads: int
    kv_heads: int
    window: int | None
    softcap: float
    dropout: float
    rng: RngState | None
    sinks: bool
    v_head_dim: int
    backend: str
    group_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, seed: int, ranks: int) -> Draw:
        pick = random.Random(seed)
        method = METHODS[seed % 2]
        dropout = 0.2 if seed // 2 % 2 else 0.0
        lengths, seq_len = _row(pick, ROWS[seed // 4 % 3], ranks)
        if method == "ulysses":
            heads = ranks * pick.choice((1, 2, 3))
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            kv_heads = pick.choice([n for n in divisors if n % ranks == 0 or ranks % n == 0])
        else:
            kv_heads = pick.choice((1, 2, 3))
            heads = kv_heads * pick.choice((1, 3))
        rng = RngState(seed, pick.choice((0, 7)), head=pick.choice((0, 5))) if dropout else None
        window = pick.choice((None, None, None, 0, 5, 40))
        softcap, sinks = pick.choice((0.0, 20.0)), pick.random() < 0.5
        return cls(
            seed, method, lengths, seq_len, heads, kv_heads, window, softcap, dropout, rng, sinks,
            v_head_dim=pick.choice((16, 8)),
            backend=pick.choice(BACKENDS),
            group_bytes=pick.choice((1, 2**30)),  # a group for each key head, or one group
            dtype=torch.bfloat16 if pick.random() < 0.25 else torch.float64,
        )  # fmt: skip

    @property
    def spec(self) -> AttentionSpec:
        mask = Causal() if self.window is None else Window(self.window, 0)
        return AttentionSpec(mask, softcap=self.softcap, dropout=self.dropout)


def _row(pick: random.Random, kind: str, ranks: int) -> tuple[tuple[int, ...], int]:
    seq_len = ranks * pick.choice((8, 16, 40, 96))
    if kind == "one document":
        return (seq_len,), seq_len
    fill = seq_len if kind == "documents" else pick.randint(1, seq_len - 1)
    lengths: list[int] = []
    while sum(lengths) < fill:
        lengths.append(min(pick.choice((1, 3, 7, 17, 33, 64, 150)), fill - sum(lengths)))
    return tuple(lengths), seq_len


def difference(draw: Draw, group: dist.ProcessGroup) -> float:
    """Return the largest difference of this rank's results, as a multiple of what is allowed; infinite for NaN."""
    numbers = torch.Generator().manual_seed(draw.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64).to(draw.dtype)

    n, heads, kv_heads = draw.seq_len, draw.heads, draw.kv_heads
    q, k = (normal(n, h, 16) for h in (heads, kv_heads))
    v, weights = (normal(n, h, draw.v_head_dim) for h in (kv_heads, heads))
    sinks = [normal(heads)] if draw.sinks else []
    exact = _on_whole_row(draw, *(x.double() for x in (weights, q, k, v, *sinks)), backend="reference")

    plan = plan_row(draw.lengths, n, group.size(), draw.window)
    own = torch.from_numpy(plan.positions(group.rank()))
    part = [x.clone().requires_grad_() for x in (q[own], k[own], v[own], *sinks)]
    row = SharedRow(plan, group, torch.device("cpu"), group_bytes=draw.group_bytes)
    options = {"method": draw.method, "rng": draw.rng, "sinks": part[3] if sinks else None}
    part_out = shared_attention(*part[:3], draw.spec, row, **options, backend=draw.backend)
    part_gradients = torch.autograd.grad(part_out, part, weights[own])
    for gradient in part_gradients[3:]:
        dist.all_reduce(gradient, group=group)

    ours = (part_out, *part_gradients)
    one = exact if draw.dtype == torch.float64 else _on_whole_row(draw, weights, q, k, v, *sinks, backend=draw.backend)
    found = []
    for a, b, c, rows in zip(ours, exact, one, (own, own, own, own, slice(None)), strict=False):
        assert a.shape == b[rows].shape, (draw, a.shape, b[rows].shape)
        assert a.dtype == draw.dtype
        scale = b.abs().max().clamp(min=1)
        allowed = (
            LIMIT * scale if draw.dtype == torch.float64 else LIMIT_BF16 * (c - b).abs().max().clamp(FLOOR_BF16 * scale)
        )
        found.append(float((a - b[rows]).abs().max() / allowed))
    return max(x if x == x else float("inf") for x in found)


def _on_whole_row(
    draw: Draw, weights: Tensor, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor, backend: str
) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of q, k, v and the sinks, of one process."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v, *sinks)]
    cu = torch.tensor([0, *draw.lengths]).cumsum(0).int()
    packing = Packing(cu, cu, lengths=draw.lengths)
    options = {"rng": draw.rng, "sinks": inputs[3] if sinks else None}
    out = attention(*inputs[:3], draw.spec, packing=packing, **options, backend=backend)
    return (out, *torch.autograd.grad(out, inputs, weights))


def check(rank: int, ranks: int, draws: int, store: str) -> None:
    """Run all draws as one of the ranks.

    Raises:
        AssertionError: a draw that differs, on all ranks.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        methods, largest = Counter[str](), 0.0
        for seed in range(draws):
            draw = Draw.of(seed, ranks)
            worst = torch.tensor(difference(draw, dist.group.WORLD), dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if float(worst) > 1:
                raise AssertionError(f"{ranks} ranks differ by {float(worst):.1e} of what is allowed: {draw}")
            methods[draw.method] += 1
            largest = max(largest, float(worst))
        if rank == 0:
            counts = ", ".join(f"{methods[method]} {method}" for method in METHODS)
            print(f"{ranks} ranks: {counts}; largest difference {largest:.2f} of what is allowed", flush=True)
        dist.barrier()
    finally:
        leave_groups()


def main(ranks: int, draws: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(check, (ranks, draws, str(Path(folder, "store"))), nprocs=ranks)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
