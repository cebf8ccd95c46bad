"""Selected calls for NVIDIA's memory checker: each variant of the kernels, at the boundaries of its loops.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m tests.support.attention.sanitized triton FIRST STEP``

PyTorch's allocator places tensors in large segments, so that a read past a tensor's end often stays inside a segment.
Without it, every tensor is a separate allocation, and the checker detects such reads. ``FIRST`` and ``STEP`` choose a
part of the cases. With ``--only-run`` results are not compared, so that initcheck sees only this project's kernels and
no copies of the comparison.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch

from flash_train.attention import AttentionSpec, Causal
from flash_train.attention.functional import operands_of
from flash_train.attention.masks import Full
from tests.support.attention import decoding
from tests.support.attention.cases.drawn import for_hopper
from tests.support.attention.cases.named import BY_NAME, on_card
from tests.support.attention.cases.problem import Case, arrange, build, spread_rows
from tests.support.attention.cases.recipes import Blocks
from tests.support.attention.contract import attend, collect_results, run

#: fewer queries or keys than a tile, no queries or keys, and whole tiles
SHORT = ((0, 140), (5, 5), (70, 0), (1, 300), (128, 256), (0, 9))
NAMES = (
    "causal", "gqa", "packed-cross", "packed-empty-entries", "mqa-dropout", "alibi-packed", "everything", "strided",
    "documents-packed", "tree-packed", "blocks", "blocks-packed", "function-tensors", "sinks-only-seen", "no-queries",
)  # fmt: skip
SHORT_CASES = [
    Case(f"short-{d}", SHORT, heads=4, kv_heads=1, head_dim=d, packed=True, band=Full(), tail=(3, 2), dropout=dropout)
    for d, dropout in ((64, 0.0), (128, 0.1), (256, 0.0))
]
FAR = [Case(f"far-{name}", ((150, 150),), head_dim=128, far=name) for name in ("q", "k", "v", "dout")]


def cases(backend: str) -> list[Case]:
    found = [*(on_card(BY_NAME[name]) for name in NAMES), *SHORT_CASES, *FAR]
    found = [replace(case, dtype=torch.bfloat16) for case in found]
    return [_of_whole_tiles(case) for case in found] if backend == "hopper" else found


def _of_whole_tiles(case: Case) -> Case:
    """With blocks and head dimensions that Hopper's kernels take."""
    terms = tuple(replace(t, size=(128, 128), shape=None) if isinstance(t, Blocks) else t for t in case.terms)
    sizes = {name: (n := getattr(case, name)) and -(-n // 8) * 8 for name in ("head_dim", "v_head_dim")}
    return for_hopper(replace(case, terms=terms, **sizes))


def far_out_and_lse(backend: str) -> list[str]:
    """The operator's backward where rows of out and heads of the log-sum-exp lie far apart; what is wrong with it."""
    from flash_train.attention.kernels.hopper import launch as hopper
    from flash_train.attention.kernels.portable import launch

    family: Any = hopper if backend == "hopper" else launch
    q, k, v, dout = (torch.randn(1, 150, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    call = launch.Call(*operands_of(q, k, AttentionSpec(Causal()), None, None, (0, 0, 0, 0), None, None))
    out, lse = family.forward(q, k, v, call)
    far_lse = torch.empty(2**31 + 150, device="cuda").as_strided(lse.shape, (0, 2**31, 1))
    far_lse.copy_(lse)
    right, got = (
        family.backward(dout, None, q, k, v, *saved, call)[:3] for saved in ((out, lse), (spread_rows(out), far_lse))
    )
    errors = [(a - b).abs().max().item() for a, b in zip(got, right, strict=True)]
    return [] if max(errors) < 0.02 else [f"far out and lse: errors {errors}"]


def exercise(case: Case, backend: str) -> None:
    """Forward and backward of the case, in memory as it is allocated."""
    problem = build(case, "cuda")
    leaves = {name: arrange(name, x, case).requires_grad_() for name, x in problem.inputs.items()}
    collect_results(problem, case, leaves, *attend(problem, case, leaves, backend))


def main(backend: str, first: int = 0, step: int = 1, only_run: bool = False) -> int:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        raise SystemExit("PYTORCH_NO_CUDA_MEMORY_CACHING=1 is needed: tensors must be allocations of their own")
    failed = []
    if backend == "decode":
        for decode_case in decoding.CASES[first::step]:
            found = decoding.error(replace(decode_case, dtype=torch.bfloat16), "cuda")
            failed += [f"{decode_case.name}: {found:.2f} of what is allowed"] if not found <= 1 else []
    else:
        for case in cases(backend)[first::step]:
            if only_run:
                exercise(case, backend)
                continue
            wrong = [error for error in run(case, backend, "cuda", poison=False) if not error.ok]
            failed += [f"{case}: {wrong}"] if wrong else []
        if first == 0 and not only_run:
            failed += far_out_and_lse(backend)
    torch.cuda.synchronize()
    print(*failed, f"{backend}: {len(failed)} wrong", sep="\n", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    given = [x for x in sys.argv[1:] if x != "--only-run"]
    sys.exit(main(given[0], *map(int, given[1:]), only_run="--only-run" in sys.argv))
