"""The speed of attention over a row that several ranks share, as a fraction of the ideal.

The ideal time is one rank's time divided by the number of ranks.

Each way is checked against fp32 on the inputs that it is timed on, before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_train.attention import AttentionSpec, Causal, Packing, RngState, attention, attention_flops
from flash_train.attention.parallel import Method, SharedRow, can_divide_heads, plan_row, shared_attention
from flash_train.profiling.attention.cases import log_normal_lengths

SEEDS = range(10)  #: of the packed rows
ROUNDS = 5  #: timed rounds of each way; the ways take turns
LONG = 5e14  #: model FLOPs of a forward that takes about a second on one GPU: two rounds are enough
LIMITS = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  #: times one rank's own error
FLOOR = 1e-3  #: relative error that is always allowed; with bf16 operands one rank's is between 2e-3 and 5e-3
QUEUED = "queued_"  #: prefix of the figures of a call that the host has queued behind others
QUEUED_CALLS = 5
BUSY_CYCLES = 120_000_000  #: about 60 ms, in which the host queues the calls
MASK = RngState(7, 11)  #: of dropout


@dataclass(frozen=True)
class SharedCase:
    """A causal row in bf16.

    Attributes:
        name: without the dropout.
        lengths: of its documents.
        heads, kv_heads, head_dim: of the attention.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int = 128
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        """Model FLOPs of a forward on the whole row."""
        return attention_flops(sum(n * n for n in self.lengths), self.heads, self.head_dim) / 2

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(Causal(), dropout=self.dropout)


def shared_cases(tiny: bool = False) -> Iterator[SharedCase]:
    """Yield the cases: single documents and packed rows, each without and with dropout; `tiny` ones are for CPUs."""
    tokens, heads = (1024, 8) if tiny else (1, 1)  # what the sizes are divided by
    for dropout in (0.0, 0.1):
        end = f"-dropout{dropout}" if dropout else ""
        for n, h, kv in ((131_072, 32, 8), (32_768, 32, 8), (16_384, 16, 16)):
            n, h, kv = n // tokens, h // heads, kv // heads
            yield SharedCase(f"h{h}/{kv}-n{n}{end}", (n,), h, kv, dropout=dropout)
        for seed in SEEDS:
            n, h, kv = 131_072 // tokens, 32 // heads, 8 // heads
            lengths = log_normal_lengths(n, seed)
            yield SharedCase(f"h{h}/{kv}-packed{n}-seed{seed}{end}", lengths, h, kv, dropout=dropout)


def scaling_cases(ranks: int, tiny: bool = False) -> Iterator[SharedCase]:
    """Yield rows that grow with the ranks, then long rows, as one document and packed; `tiny` ones are for CPUs."""
    heads, kv_heads = (8, 1) if tiny else (64, 8)
    short, long = (128 * ranks, 512) if tiny else (8192 * ranks, 262_144)
    rows = [(short, (short,), ""), *((short, log_normal_lengths(short, seed), f"-seed{seed}") for seed in range(3))]
    rows += [(long, (long,), ""), (long, log_normal_lengths(long, 1), "-seed1")]
    for dropout in (0.0, 0.1):
        end = f"-dropout{dropout}" if dropout else ""
        for n, lengths, seed in rows:
            kind = "packed" if seed else "n"
            yield SharedCase(f"h{heads}/{kv_heads}-{kind}{n}{seed}{end}", lengths, heads, kv_heads, dropout=dropout)


@dataclass(frozen=True)
class Way:
    """One way to compute a case: q, k, v to the output, and the rows of the whole output that it computes."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    rows: Tensor | slice

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(*self.inputs)

    def both(self) -> tuple[Tensor, ...]:
        """Return the output, and the gradients of q, k and v."""
        out = self.call(*self.inputs)
        return (out, *torch.autograd.grad(out, self.inputs, self.gradient))


def measure_shared(case: SharedCase, group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Check and time a case on all ranks of the group, which call it together.

    Returns:
        A record for each way and direction. ``share`` is the one-rank time over (ranks times the time), and keys with
        the prefix `QUEUED` are of queued calls; a wrong way has a ``reason`` and no time.
    """
    torch.manual_seed(0)  # the same tensors on all ranks
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, gradient = (torch.randn(case.tokens, h, case.head_dim, device=device).to(dtype) for h in heads)
    rng = MASK if case.dropout else None
    cu = torch.tensor([0, *case.lengths]).cumsum(0).int().to(device)
    packing = Packing(cu, cu, lengths=case.lengths)
    backend = "auto" if device.type == "cuda" else "reference"

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, case.spec, packing=packing, rng=rng, backend=backend)

    begin = time.perf_counter()
    plan = plan_row(case.lengths, case.tokens, group.size())
    plan_ms = (time.perf_counter() - begin) * 1e3

    def together(method: Method) -> Way:
        row = SharedRow(plan, group, device, method)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return shared_attention(q, k, v, case.spec, row, rng=rng, backend=backend)

        return _way((q, k, v), gradient, row.own_positions, call)

    ways = {"one": _way((q, k, v), gradient, slice(None), alone)}
    ways |= {method: together(method) for method in _methods(case, group.size())}
    right = _check(ways, case, (q, k, v, gradient), packing, group)
    times = _time({name: ways[name] for name in ways if right[name]["correct"]}, group, device, case.flops > LONG)
    records = []
    for name in ways:
        for direction, factor in (("forward", 1.0), ("forward+backward", 3.5)):
            record: dict[str, Any] = {
                "case": case.name, "kind": "attention", "tokens": case.tokens,
                "documents": len(case.lengths), "dropout": case.dropout,
                "ranks": group.size(), "way": name, "direction": direction, "error": right[name]["error"],
                "imbalance": plan.imbalance, "plan_ms": plan_ms,
            }  # fmt: skip
            if name not in times or "one" not in times:
                records.append(record | {"reason": "wrong result"})
                continue
            shared = 1 if name == "one" else group.size()
            for prefix, ms in times[name][direction].items():
                one = times["one"][direction][prefix]
                record[f"{prefix}ms"], record[f"{prefix}tflops"] = ms, factor * case.flops / shared / ms / 1e9
                record[f"{prefix}share"] = one / shared / ms
            records.append(record)
    return records


def _methods(case: SharedCase, ranks: int) -> tuple[Method, ...]:
    return ("gather", "ulysses") if can_divide_heads(case.heads, case.kv_heads, ranks) else ("gather",)


def _way(
    inputs: tuple[Tensor, Tensor, Tensor], gradient: Tensor, rows: Tensor | slice, call: Callable[..., Tensor]
) -> Way:
    q, k, v = (x[rows].detach().clone().requires_grad_() for x in inputs)
    return Way(call, (q, k, v), gradient[rows].clone(), rows)


def _check(
    ways: dict[str, Way],
    case: SharedCase,
    tensors: tuple[Tensor, ...],
    packing: Packing,
    group: dist.ProcessGroup,
) -> dict[str, dict[str, Any]]:
    """Compare each way with fp32, for one key head and the heads that read it. All ranks get the same verdict."""
    head = case.kv_heads // 2
    queries = case.heads // case.kv_heads
    columns = (slice(head * queries, (head + 1) * queries), slice(head, head + 1))
    q, k, v, gradient = (x[:, columns[i in (1, 2)]].float() for i, x in enumerate(tensors))
    inputs = q, k, v = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    rng = RngState(MASK.seed, MASK.offset, head=head * queries) if case.dropout else None
    backend = "auto" if q.is_cuda else "reference"
    out = attention(q, k, v, case.spec, packing=packing, rng=rng, backend=backend)
    exact = dict(zip(LIMITS, (out.detach(), *torch.autograd.grad(out, inputs, gradient)), strict=True))
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        results = dict(zip(LIMITS, way.both(), strict=True))
        errors = {}
        for tensor, value in results.items():
            part = value.detach()[:, columns[tensor in ("dk", "dv")]].float()
            whole = exact[tensor][way.rows]
            sums = torch.stack([(part - whole).square().sum(), whole.square().sum()]).double()
            if name != "one":
                dist.all_reduce(sums, group=group)
            errors[tensor] = float((sums[0] / sums[1]).sqrt())
        own = found["one"]["errors"] if found else {tensor: max(FLOOR, 5e-3) for tensor in LIMITS}
        correct = all(errors[t] <= LIMITS[t] * max(own[t], FLOOR) for t in LIMITS)  # NaN fails
        found[name] = {"errors": errors, "error": max(errors.values()), "correct": correct}
    return found


def _time(
    ways: dict[str, Way], group: dist.ProcessGroup, device: torch.device, long: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds by way, direction and kind of timing: medians over rounds of the slowest rank's times.

    The kind "" is a call from an idle GPU. `QUEUED` is a call among others that the host has queued, as in a model; a
    call that takes a second has none, because the host's share of it is nothing.
    """
    kinds = {"": _alone} if long else {"": _alone, QUEUED: _queued}
    calls = {
        (name, direction, kind): partial(timed, call, group, device)
        for name, way in ways.items()
        for direction, call in (("forward", way.forward), ("forward+backward", way.both))
        for kind, timed in kinds.items()
    }
    taken: dict[tuple[str, str, str], list[float]] = {key: [] for key in calls}
    for turn in range(-1, 2 if long else ROUNDS):  # the first round warms up
        for key, timed in calls.items():
            ms = timed()
            if turn >= 0:
                taken[key].append(ms)
    slowest = torch.tensor([taken[key] for key in calls], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ways}
    for (name, direction, kind), rounds in zip(calls, slowest.tolist(), strict=True):
        found[name].setdefault(direction, {})[kind] = median(rounds)
    return found


def _alone(call: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the milliseconds of one call, from when the host begins until the GPU has finished."""
    _wait(group, device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _queued(call: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the milliseconds of each of several calls, which the host queues while the GPU is kept busy."""
    if device.type != "cuda":
        return _alone(call, group, device)  # a CPU has no queue
    _wait(group, device)
    torch.cuda._sleep(BUSY_CYCLES)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # GPUs of different clocks sleep for different times
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begins.record()
    for _ in range(QUEUED_CALLS):
        call()
    ends.record()
    torch.cuda.synchronize(device)
    return begins.elapsed_time(ends) / QUEUED_CALLS


def _wait(group: dist.ProcessGroup, device: torch.device) -> None:
    dist.barrier(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
