"""The contract: every backend must compute a case, which is one attention call, within an allowed error.

The rule is FlashAttention's. The largest error against fp64 may be twice PyTorch's error in the same precision (three
times for gradients), plus the error of rounding the result and, in the backward, two numbers of each row. PyTorch's
error is the largest over up to ``PROBLEMS`` problems of the same kind. Inputs are random. Uninitialised memory and rows
that belong to no entry are NaN, so that missing writes and wrong reads show. The folder ``cases`` has named cases and
draws random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flash_train.attention import attention
from flash_train.attention.dense.reference import reference_attention
from flash_train.attention.packing import entries
from tests.support.attention.cases.problem import Case, Problem, arrange, build
from tests.support.attention.same_dtype import same_dtype_attention

KERNELS = ("flash", "triton", "hopper")  #: backends that sum dP in fp32
PROBLEMS = 6  #: problems of one kind; in a single one PyTorch's error may be small by chance


@dataclass(frozen=True)
class Error:
    """Largest error of one tensor, and the largest allowed error."""

    tensor: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def run(case: Case, backend: str, device: str, poison: bool = True) -> list[Error]:
    """Run forward and backward of the case and compare them with fp64.

    Args:
        poison: fill new tensors with NaN, as ``poisoned_memory`` does.

    Raises:
        AssertionError: infinities or exact zeros in wrong places.
    """
    problem = build(case, device)
    leaves = {
        name: arrange(name, x, case).requires_grad_(_requires_grad(name, case)) for name, x in problem.inputs.items()
    }
    with poisoned_memory() if poison else nullcontext():
        out, lse = attend(problem, case, leaves, backend)
        ours = collect_results(problem, case, leaves, out, lse)
    rounds_dp = backend not in KERNELS
    exact, theirs, rounding = _expected(problem, case, rounds_dp)
    assert torch.isfinite(torch.stack(list(theirs.values()))).all(), f"PyTorch overflows: {case.source}"
    _assert_exact(problem, ours, exact)
    found = _distances(ours, exact)
    errors = _compare(found, theirs, rounding)
    for redraw in range(1, PROBLEMS):
        if all(error.ok for error in errors):  # more problems can only allow more
            break
        _, *more = _expected(build(case, device, redraw), case, rounds_dp)
        theirs, rounding = (_larger(*both) for both in zip((theirs, rounding), more, strict=True))
        errors = _compare(found, theirs, rounding)
    return errors


def _compare(found: dict[str, Tensor], theirs: dict[str, Tensor], rounding: dict[str, Tensor]) -> list[Error]:
    """Apply the rule to each tensor, given our error, PyTorch's error and the error of rounding."""
    table = torch.stack([torch.stack([x[name] for name in found]) for x in (found, theirs, rounding)]).tolist()
    return [
        Error(name, error, (3 if name.startswith("d") else 2) * same + floor)
        for name, error, same, floor in zip(found, *table, strict=True)
    ]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, ``torch.empty`` and similar functions fill tensors with NaN, and integer tensors with a fixed number."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*args: Any, **options: Any) -> Tensor:
            x = allocate(*args, **options)
            if x.dtype != torch.bool:
                x.detach().fill_(float("nan") if x.is_floating_point() else 0x5A)
            return x

        return fill

    where = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    with ExitStack() as stack:
        for owner, name in where:
            stack.enter_context(patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def _requires_grad(name: str, case: Case) -> bool:
    return case.learns or name in "qkv"


def attend(problem: Problem, case: Case, leaves: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp, or None for calls without it."""
    options = {"packing": problem.packing, "alibi_slopes": leaves.get("slopes"), "sinks": leaves.get("sinks")}
    tensors = (leaves["q"], leaves["k"], leaves["v"], problem.spec)
    if backend == "sdpa":
        return attention(*tensors, **options, backend=backend), None
    rng = problem.rng if problem.spec.dropout else None
    if case.uses == "plain":
        return attention(*tensors, **options, rng=rng, backend=backend), None
    return attention(*tensors, **options, rng=rng, backend=backend, return_lse=True)


def _expected(
    problem: Problem, case: Case, rounds_dp: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The exact results, PyTorch's largest errors in the case's dtype, and the errors of rounding."""
    leaves, out, lse = _reference(problem, case, torch.float64)
    exact = collect_results(problem, case, leaves, out, lse)
    eps = torch.finfo(case.dtype).eps
    rounding = {name: eps * (_largest(x.nan_to_num(0, 0, 0)) + 0.3) for name, x in exact.items()}
    if lse.requires_grad:
        for name, x in _rounding_of_rows(problem, case, leaves, out, lse, rounds_dp).items():
            rounding[f"d{name}"] = rounding[f"d{name}"] + x
    same = collect_results(problem, case, *_reference(problem, case, case.dtype, same_dtype_attention))
    return exact, _distances(same, exact), rounding


def _rounding_of_rows(
    problem: Problem, case: Case, leaves: dict[str, Tensor], out: Tensor, lse: Tensor, rounds_dp: bool
) -> dict[str, Tensor]:
    """The error of each gradient from rounding two numbers of each row: the log-sum-exp, and D = sum(dout * out).

    Gradients of scores are P * (dP - D + dlse) with P = exp(S - lse), where the log-sum-exp is fp32. An error of the
    log-sum-exp scales the row, so it acts like a relative error of dout and dlse. An error of D acts like an error of
    dlse; if a row attends to a single key, D cancels dP and PyTorch's autograd may be exact by chance. With
    ``rounds_dp``, matrix products round dP to the dtype of the inputs, as they do in plain PyTorch.
    """
    eps, eps32 = torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps
    uses_out, uses_lse = case.uses != "lse", case.uses in ("both", "lse")
    dout, dlse = problem.dout.double().nan_to_num(0) * uses_out, problem.dlse.double() * uses_lse
    terms = dout * out.detach()
    # each term is rounded to the dtype of out, and each partial sum to fp32
    error_of_d = (eps + eps32 * terms.shape[-1] ** 0.5) * terms.norm(dim=-1).transpose(-1, -2)
    if rounds_dp:
        error_of_d = error_of_d + eps / 2 * terms.sum(-1).abs().transpose(-1, -2)
    error_of_lse = eps32 * (lse.detach().nan_to_num(0, 0, 0).abs() + 1)

    def cost(names: list[str], sign: Tensor | float = 1.0) -> dict[str, Tensor]:
        by_row = (error_of_lse * sign).transpose(-1, -2)[..., None]
        weights = [dout * by_row, (dlse * error_of_lse + error_of_d) * sign]
        return _gradients({name: leaves[name] for name in names}, [out, lse], weights)

    costs = {name: _largest(x) for name, x in cost(["q", "k", "v"]).items()}
    few = [name for name, x in leaves.items() if name not in costs and x.requires_grad]
    if few:  # each number is a sum over all rows, whose errors have random signs
        flips = torch.Generator(problem.device).manual_seed(0)
        signs = (torch.randint(0, 2, lse.shape, generator=flips, device=problem.device) * 2 - 1 for _ in range(4))
        probes = [cost(few, sign) for sign in signs]
        costs |= {name: 4 * _largest(torch.stack([p[name] for p in probes]).square().mean(0).sqrt()) for name in few}
    return costs


def _reference(
    problem: Problem, case: Case, dtype: torch.dtype, function: Callable[..., Any] = reference_attention
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    leaves = {
        name: x.detach().to(dtype, copy=True).requires_grad_(_requires_grad(name, case))
        for name, x in problem.inputs.items()
    }
    out, lse = function(
        leaves["q"], leaves["k"], leaves["v"], problem.spec, problem.packing, problem.rng.as_tensor(problem.device),
        origin=problem.rng.origin, entries=problem.rng.entries, alibi_slopes=leaves.get("slopes"),
        sinks=leaves.get("sinks"),
    )  # fmt: skip
    return leaves, out, lse


def collect_results(
    problem: Problem, case: Case, leaves: dict[str, Tensor], out: Tensor, lse: Tensor | None
) -> dict[str, Tensor]:
    """Output, log-sum-exp if there is one, and all gradients, in fp64."""
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    weights = {"out": problem.dout, "lse": problem.dlse}
    wanted = {"both": ("out", "lse"), "plain": ("out",)}.get(case.uses, (case.uses,))
    used = [name for name in wanted if name in results and results[name].requires_grad]
    grads = _gradients(leaves, [results[name] for name in used], [weights[name] for name in used])
    named = results | {f"d{name}": grad for name, grad in grads.items()}
    return {name: x.detach().double() for name, x in named.items()}


def _gradients(leaves: dict[str, Tensor], outputs: list[Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    """Gradients by name of all tensors that require one; 0 if no output depends on the tensor."""
    learning = {name: x for name, x in leaves.items() if x.requires_grad}
    if not outputs:
        return {name: torch.zeros_like(x) for name, x in learning.items()}
    grads = torch.autograd.grad(
        outputs, list(learning.values()), [w.to(x.dtype) for w, x in zip(weights, outputs, strict=True)],
        allow_unused=True, materialize_grads=True, retain_graph=True,
    )  # fmt: skip
    return dict(zip(learning, grads, strict=True))


def _distances(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Largest error of each result over finite exact values; NaN and infinity in the result count."""
    return {name: _largest(torch.where(exact[name].isinf(), 0.0, x - exact[name])) for name, x in results.items()}


def _larger(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.maximum(a[name], b[name]) for name in a}


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _assert_exact(problem: Problem, ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Check that infinities are where the reference has them, and that rows without any pair are exactly 0."""
    for name, x in ours.items():
        assert torch.equal(torch.isinf(x), torch.isinf(exact[name])), (
            f"{name}: infinities in other places than the reference"
        )
    seeing, seen = _reached(problem)
    for name, rows in (("out", seeing), ("dq", seeing), ("dk", seen), ("dv", seen)):
        assert (ours[name][~rows] == 0).all(), f"{name}: rows that must be exactly 0 are not"


def _reached(problem: Problem) -> tuple[Tensor, Tensor]:
    """Which queries attend to any key, (..., heads), and which keys any query attends to, (..., kv_heads)."""
    q, k = problem.inputs["q"], problem.inputs["k"]
    seeing, seen = (torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device) for x in (q, k))
    for entry in entries(q, k, problem.packing):
        visible = problem.spec.mask.dense(entry, q.shape[-2], q.device).expand(q.shape[-2], -1, -1)
        rows, columns = slice(entry.q_row, entry.q_row + entry.len_q), slice(entry.k_row, entry.k_row + entry.len_k)
        per_group = visible.any(1).unflatten(0, (k.shape[-2], q.shape[-2] // k.shape[-2])).any(1)
        (seeing if problem.packing else seeing[entry.batch])[rows] = visible.any(2).t()
        (seen if problem.packing else seen[entry.batch])[columns] = per_group.t()
    return seeing, seen
