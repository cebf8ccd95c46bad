"""The rotary kernel in Triton's interpreter, compared with fp64.

A test runs this script, since the interpreter must be chosen before Triton is imported. It uses fp32 and fp16, which
the interpreter computes correctly.
"""

import sys

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch
from torch import Tensor

from flash_train.integrations.flash_attn import rotary_kernel
from tests.support.integrations.rotary_reference import rotations, turned


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).norm().item()


def wrong(dtype: torch.dtype, interleaved: bool, inplace: bool) -> int:
    """Count the calls whose result or gradient is wrong."""
    failed = 0
    for case in rotations(dtype, interleaved)[1::2]:  # an offset for each row; one offset; packed
        given = case.x.clone().requires_grad_()
        x = given * 1  # no leaf, so that it may be overwritten
        is_packed = "cu_seqlens" in case.options
        whole, positions = (x[None], case.positions[None]) if is_packed else (x, case.positions)
        out = rotary_kernel.rotated(whole, [(slice(None), case.cos, case.sin)], positions, interleaved, inplace)
        upstream = torch.randn_like(out)
        kept = upstream.clone()
        (x if inplace else out).backward(upstream.view_as(x) if inplace else upstream)
        call = (positions, interleaved)
        exact_x = case.x.double().requires_grad_()
        exact = turned(exact_x.view_as(whole), case.cos.double(), case.sin.double(), *call)
        exact.backward(upstream.double())
        plain = turned(case.x.float().view_as(whole), case.cos.float(), case.sin.float(), *call).to(dtype)
        right = (
            torch.equal(x, given) != inplace
            and torch.equal(upstream, kept)
            and error(out, exact) <= 2 * error(plain, exact)
            and error(given.grad, exact_x.grad) <= 3 * error(plain, exact)
        )
        failed += not right
        if not right:
            print("wrong:", dtype, interleaved, inplace, case.options, tuple(case.x.shape))
    return failed


def wrong_parts() -> int:
    """Queries and keys of one tensor by tables of their own; the values stay."""
    qkv, tables = torch.randn(2, 5, 3 + 2 * 2, 8), [torch.randn(6, 4) for _ in range(4)]
    steps = torch.arange(5).expand(2, 5)
    parts = [(slice(3), *tables[:2]), (slice(3, 5), *tables[2:])]
    out = rotary_kernel.rotated(qkv.clone(), parts, steps, False, True)
    expected = [turned(qkv[:, :, :3], *tables[:2], steps, False), turned(qkv[:, :, 3:5], *tables[2:], steps, False)]
    close = torch.allclose(out[:, :, :5], torch.cat(expected, 2), atol=1e-6)
    return int(not close or not torch.equal(out[:, :, 5:], qkv[:, :, 5:]))


def wrong_outside() -> int:
    """Positions past the tables give NaN."""
    parts = [(slice(None), *torch.randn(2, 2, 4))]
    out = rotary_kernel.rotated(torch.randn(1, 3, 2, 8), parts, torch.tensor([[0, 1, 2]]), False, True)
    return int(not (out[:, :2].isfinite().all() and out[:, 2].isnan().all()))


def main() -> int:
    rotary_kernel.MAX_BLOCK = 8  # two heads at a time
    failed = wrong_parts() + wrong_outside()
    for interleaved in (False, True):
        failed += wrong(torch.float32, interleaved, inplace=True) + wrong(torch.float16, interleaved, inplace=False)
    print(f"{failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
