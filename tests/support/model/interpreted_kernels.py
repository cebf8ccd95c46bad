"""The model's kernels in Triton's interpreter, compared with PyTorch's formulas in fp64 and in the same precision.

A test runs this script, since the interpreter must be chosen before Triton is imported. It uses fp32 and fp16, which
the interpreter computes correctly.
"""

import sys
from collections.abc import Callable

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_train.model.kernels import cross_entropy, rms_norm, rotary, swiglu
from flash_train.model.ops import IGNORE_INDEX, add_rms_norm, apply_rotary

Function = Callable[..., tuple[Tensor, ...]]


def gradients(function: Function, inputs: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Results and gradients, in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(*leaves)
    torch.autograd.backward(results, [u.to(r.dtype) for u, r in zip(upstream, results, strict=True)])
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [x.detach().double() for x in (*results, *found)]


def wrong(name: str, ours: Function, plain: Function, inputs: list[Tensor], upstream: list[Tensor]) -> int:
    exact = gradients(plain, [x.double() for x in inputs], upstream)
    errors = [
        [(got - reference).norm().item() for got, reference in zip(found, exact, strict=True)]
        for found in (gradients(ours, inputs, upstream), gradients(plain, inputs, upstream))
    ]
    allowed = [2.0] * len(upstream) + [3.0] * len(inputs)
    bad = [i for i, factor in enumerate(allowed) if not errors[0][i] <= factor * errors[1][i] + 1e-7]
    print(f"{name}: {'wrong in ' + str(bad) if bad else 'right'} {[f'{e:.0e}' for e in errors[0]]}")
    return len(bad)


def norms(dtype: torch.dtype) -> int:
    failed = 0
    for shape in ((37, 96), (3, 2500), (5, 4, 64)):
        draw = torch.Generator().manual_seed(1)
        x, update, *upstream = (torch.randn(shape, generator=draw).to(dtype) for _ in range(6))
        weight = (torch.rand(shape[-1], generator=draw) + 0.5).to(dtype)
        for uses in (1, 2, 3):
            for added in (True, False):
                inputs = [x, weight, *([update] if added else [])]

                def plain(x: Tensor, weight: Tensor, update: Tensor | None = None, uses: int = uses) -> tuple:
                    return add_rms_norm(x, update, weight, 1e-5, uses)

                def ours(x: Tensor, weight: Tensor, update: Tensor | None = None, uses: int = uses) -> tuple:
                    return rms_norm.add_rms_norm(x, update, weight, 1e-5, uses)

                failed += wrong(f"norm {shape} {dtype} {uses} {added}", ours, plain, inputs, upstream[: 1 + uses])
    return failed


def mlps(dtype: torch.dtype) -> int:
    failed = 0
    for shape in ((37, 96), (3, 2500), (5, 4, 64)):
        draw = torch.Generator().manual_seed(4)
        gate, up = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
        weight = (torch.randn(24, shape[-1], generator=draw) / shape[-1] ** 0.5).to(dtype)
        upstream = [torch.randn(*shape[:-1], 24, generator=draw)]
        failed += wrong(
            f"mlp {shape} {dtype}",
            lambda g, u, w: (swiglu.swiglu_linear(g * 1, u * 1, w),),  # gradients are written over what it is given
            lambda g, u, w: (F.linear(F.silu(g) * u, w),),
            [gate, up, weight],
            upstream,
        )
    return failed


def rotations(dtype: torch.dtype) -> int:
    failed = 0
    for tokens, q_heads, k_heads, head_dim in ((37, 4, 4, 64), (5, 6, 2, 128), (3, 3, 1, 80), (1, 1, 1, 2)):
        draw = torch.Generator().manual_seed(5)
        q, k, *upstream = (torch.randn(tokens, h, head_dim, generator=draw).to(dtype) for h in (q_heads, k_heads) * 2)
        angles = 100 * torch.rand(tokens, head_dim // 2, generator=draw)
        cos, sin = angles.cos(), angles.sin()
        failed += wrong(
            f"rotary {tokens} {q_heads} {k_heads} {head_dim} {dtype}",
            lambda q, k, cos=cos, sin=sin: rotary.apply_rotary(q * 1, k * 1, cos, sin),  # written over
            lambda q, k, cos=cos, sin=sin: apply_rotary(q, k, cos, sin),
            [q, k],
            upstream,
        )
    return failed


def losses(dtype: torch.dtype) -> int:
    failed = 0
    cross_entropy.BLOCK = 128
    cross_entropy.MAX_LOGIT_TOKENS = 64  # the last chunk is not whole
    for tokens, width, vocab_size in ((150, 32, 300), (64, 16, 96), (1, 16, 32)):
        draw = torch.Generator().manual_seed(2)
        hidden = torch.randn(tokens, width, generator=draw).to(dtype)
        weight = (torch.randn(vocab_size, width, generator=draw) / width**0.5).to(dtype)
        labels = torch.randint(vocab_size, (tokens,), generator=draw)
        if tokens > 1:
            labels[::7] = IGNORE_INDEX
        upstream = [torch.tensor(3.0 / tokens)]

        def plain(hidden: Tensor, weight: Tensor, labels: Tensor = labels) -> tuple:
            logits = F.linear(hidden, weight)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return (F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"),)

        def ours(hidden: Tensor, weight: Tensor, labels: Tensor = labels) -> tuple:
            return (cross_entropy.linear_cross_entropy(hidden, weight, labels),)

        failed += wrong(f"loss {tokens} {vocab_size} {dtype}", ours, plain, [hidden, weight], upstream)
    return failed


def uncommon() -> int:
    """Results that are not used, rows that are strided or not there, labels that there are not."""
    draw = torch.Generator().manual_seed(3)
    x, update, up = (torch.randn(6, 10, 8, generator=draw).transpose(0, 1) for _ in range(3))
    weight = torch.rand(16, generator=draw)[::2]
    failed = 0
    for used in ((0,), (1,), (2, 3), (0, 3)):

        def some(results: tuple, used: tuple = used) -> tuple:
            return tuple(results[i] for i in used)

        failed += wrong(
            f"norm, of whose results {used} are used",
            lambda x, w, u: some(rms_norm.add_rms_norm(x, u, w, 1e-5, 3)),
            lambda x, w, u: some(add_rms_norm(x, u, w, 1e-5, 3)),
            [x, weight, update],
            [up] * len(used),
        )
    nothing = torch.zeros(0, 8, requires_grad=True)
    rms_norm.add_rms_norm(nothing, None, weight, 1e-5)[1].sum().backward()
    hidden, head = torch.randn(3, 8, generator=draw), torch.randn(20, 8, generator=draw)
    for label in (20, 25, -1):
        loss = cross_entropy.linear_cross_entropy(hidden, head, torch.tensor([0, label, 5]))
        failed += not loss.isnan()
    gate, up, down = (torch.randn(4, 8, generator=draw, requires_grad=True) for _ in range(3))
    out = swiglu.swiglu_linear((gate * 1).T, (up * 1).T, down.T[:, :4])  # strided
    failed += not torch.allclose(out, F.linear(F.silu(gate.T) * up.T, down.T[:, :4]), atol=1e-6)
    out.sum().backward(retain_graph=True)
    try:
        out.sum().backward()
        failed += 1
    except RuntimeError as error:
        failed += "modified by an inplace operation" not in str(error)
    again = swiglu.swiglu_linear(gate * 2, up * 1, down)
    (gradient,) = torch.autograd.grad(again.sum(), gate, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), gate)
        failed += 1
    except RuntimeError as error:
        failed += "does not require grad" not in str(error)
    q, k, table = (torch.randn(shape, generator=draw) for shape in ((3, 6, 4), (6, 2, 4), (6, 2)))
    strided, written = q.transpose(0, 1), k.clone()  # (tokens, heads, head_dim): a copy is turned, k where it lies
    turned = rotary.apply_rotary(strided, written, table.cos(), table.sin())
    plain = apply_rotary(strided, k, table.cos(), table.sin())
    failed += not all(torch.allclose(x, y, atol=1e-6) for x, y in zip(turned, plain, strict=True))
    failed += not torch.equal(written, turned[1]) or torch.equal(strided, turned[0])
    with torch.inference_mode():
        rotary.apply_rotary(q * 1, k[:3] * 1, table[:3].cos(), table[:3].sin())
    rotary.apply_rotary(q[:0], k[:0], table[:0], table[:0])
    same = rotary.apply_rotary(k[:3] * 1, k[:3] * 1, table[:3].cos(), table[:3].sin())[0]
    x = k[:3].clone()
    failed += not all(torch.equal(y, same) for y in rotary.apply_rotary(x, x, table[:3].cos(), table[:3].sin()))
    q, k, given = (torch.randn(6, 2, 4, generator=draw, requires_grad=True) for _ in range(3))
    found, expected = (
        torch.autograd.grad(sum(rotate(q * 1, k * 1, table.cos(), table.sin())), (q, k), given.detach().clone())
        for rotate in (rotary.apply_rotary, apply_rotary)
    )  # of a sum, whose terms are given the same gradient
    failed += not all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, expected, strict=True))
    twice = gate * 1
    for first, second in ((twice, twice), (twice[:3], twice[1:]), (gate, up)):  # neither may be written over
        kept = [x.detach().clone() for x in (first, second)]
        ours, exact = swiglu.swiglu_linear(first, second, down), F.linear(F.silu(first) * second, down)
        found, expected = (torch.autograd.grad(x.square().sum(), gate, retain_graph=True)[0] for x in (ours, exact))
        failed += not torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        failed += not all(torch.equal(x, y) for x, y in zip((first, second), kept, strict=True))
    swiglu.swiglu_linear(nothing * 1, nothing * 1, weight[None]).sum().backward()
    failed += cross_entropy.linear_cross_entropy(hidden[:0], head, torch.tensor([], dtype=torch.int64)).item() != 0
    return failed


CHECKS = (norms, mlps, rotations, losses)


def main() -> int:
    return uncommon() + sum(check(dtype) for check in CHECKS for dtype in (torch.float32, torch.float16))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
