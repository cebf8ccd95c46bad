"""Compares implementations of attention: checks each against fp32 on the inputs that it is timed on, then times it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flash_train.attention import RngState, attention
from flash_train.profiling.attention.cases import Case
from flash_train.profiling.attention.peers import OWN, Attention, build

Timer = Callable[[Callable[[], Any]], float]  #: returns the milliseconds of a call

ROUNDS = 7  #: timed rounds of each implementation in a case
ALLOWED_ERROR = 1e-2  #: with bf16 operands the error is between 2e-3 and 5e-3


def check(name: str, call: Attention, case: Case, tensors: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the relative error (Frobenius; the largest of output and gradients) in a random batch row and key head.

    Heads are independent: one key head and its queries are cheap to compute in fp32 at any length. Every implementation
    draws a different dropout mask. So with dropout, ours is compared under the reference's mask and the others without
    dropout.
    """
    q, k, v = tensors
    rng = None
    if case.dropout:
        if name in OWN:
            rng = RngState(int(torch.randint(1 << 31, ())))
        else:
            case = replace(case, dropout=0.0)
        call = build(name, case, q.device, rng)
    out = call(q, k, v)
    dout = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, tensors, dout))

    row = None if case.lengths else int(torch.randint(case.batch, ()))
    head, group = int(torch.randint(case.n_kv_heads, ())), case.n_heads // case.n_kv_heads
    if rng is not None:
        rng = replace(rng, entry=row or 0, head=head * group)

    def part(x: Tensor) -> Tensor:
        heads = x.shape[-2] // case.n_kv_heads
        x = x if row is None else x[row : row + 1]
        return x[..., head * heads : (head + 1) * heads, :].detach().float()

    exact = [part(x).requires_grad_() for x in tensors]
    spec, packing = case.spec(q.device), case.packing(q.device)
    reference = attention(exact[0], exact[1], exact[2], spec, packing=packing, rng=rng, backend="chunked")
    want = (reference, *torch.autograd.grad(reference, exact, part(dout)))
    return max(((part(a) - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def measure(
    names: Sequence[str], case: Case, timer: Timer, device: torch.device | str = "cuda"
) -> list[dict[str, Any]]:
    """Time the implementations; return a record per implementation and direction.

    If a call fails or its result is wrong, its record has a reason and no rate.

    All are built and checked first. Then each is timed in `ROUNDS` rounds on the same inputs, and its rate uses the
    median time. A card's clock depends on the work just before, so a fixed order would favour some implementations:
    each round has another random order, the same in every run. Rates are model FLOPs over the time; the backward has
    2.5 times the FLOPs of the forward. A sparse case is also timed without its pattern: ``time_to_dense`` is the ratio.
    """
    from triton.errors import TritonError

    tensors = case.inputs(device)
    timed: dict[str, _TimedImplementation] = {}
    failed: dict[str, dict[str, Any]] = {}

    def attempt(name: str, step: Callable[[str], None]) -> None:
        try:
            step(name)
        except torch.AcceleratorError:  # this process has lost the device: no later call would run
            raise
        except (RuntimeError, ValueError, TritonError) as failure:
            failed[name] = {"reason": str(failure).strip().splitlines()[0]}

    def prepare(name: str) -> None:
        call = build(name, case, device)
        error = check(name, call, case, tensors)
        if not error < ALLOWED_ERROR:  # NaN fails too
            failed[name] = {"error": error, "reason": "wrong result"}
            return
        timed[name] = _TimedImplementation(
            error, call, None if case.density == 1 else build(name, replace(case, density=1.0), device)
        )

    def time_round(name: str) -> None:
        timed[name].time_round(tensors, timer)

    for name in names:
        attempt(name, prepare)
    draw = Random(case.name)
    for _ in range(ROUNDS):
        for name in draw.sample(list(timed), len(timed)):
            if name not in failed:
                attempt(name, time_round)
    records = []
    for name in names:
        base = {"case": case.name, "implementation": name, "dropout": case.dropout, "density": case.density}
        if name in failed:
            records.append(base | {"direction": "forward"} | failed[name])
        else:
            records += [base | found for found in timed[name].records(case.flops)]
    return records


@dataclass
class _TimedImplementation:
    """An implementation with a correct result, and its milliseconds per round, forward and backward."""

    error: float
    call: Attention
    dense: Attention | None  #: without the case's pattern
    times: list[tuple[float, float]] = field(default_factory=list)
    dense_times: list[tuple[float, float]] = field(default_factory=list)

    def time_round(self, tensors: tuple[Tensor, Tensor, Tensor], timer: Timer) -> None:
        self.times.append(_time(self.call, tensors, timer))
        if self.dense is not None:
            self.dense_times.append(_time(self.dense, tensors, timer))

    def records(self, flops: float) -> list[dict[str, Any]]:
        found = []
        for i, (direction, work) in enumerate((("forward", 1.0), ("backward", 2.5))):
            ms = median(times[i] for times in self.times)
            record = {"direction": direction, "ms": ms, "tflops": work * flops / ms / 1e9, "error": self.error}
            if self.dense is not None:
                record["time_to_dense"] = ms / median(times[i] for times in self.dense_times)
            found.append(record)
        return found


def _time(call: Attention, tensors: tuple[Tensor, Tensor, Tensor], timer: Timer) -> tuple[float, float]:
    """Return the milliseconds of forward and backward."""
    forward = timer(lambda: call(*tensors))
    out = call(*tensors)
    dout = torch.randn_like(out)
    return forward, timer(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True))


def add_ratios(records: list[dict[str, Any]]) -> None:
    """Add to the records of one case the ratio of rates to each peer; None if the peer has no rate."""
    rates = {(row["implementation"], row["direction"]): row.get("tflops") for row in records}
    peers = sorted({name for name, _ in rates} - set(OWN))
    for row in records:
        if row.get("tflops"):
            for peer in peers:
                theirs = rates.get((peer, row["direction"]))
                row[f"ratio_to_{peer}"] = row["tflops"] / theirs if theirs else None
