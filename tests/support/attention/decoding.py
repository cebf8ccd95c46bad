"""Cases of the decode kernel, compared with the reference.

``python -m tests.support.attention.decoding NAME...`` runs these in the interpreter and prints one JSON line per case.
"""

from __future__ import annotations

import json
import sys
import traceback
import zlib
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Full,
    Mask,
    RngState,
    Tree,
    Window,
    cached_attention,
)
from flash_train.attention.dense.operator import DENSE
from tests.support.attention.same_dtype import same_dtype_attention

TREE = [-1, 0, 1, 1, 2, 2, 3, 3, 4]


@dataclass(frozen=True)
class Case:
    """One call of ``cached_attention`` on caches of ``capacity`` positions, filled up to ``lengths``."""

    name: str
    lengths: tuple[int, ...]
    mask: str = "full"
    len_q: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    capacity: int = 160
    page_size: int = 0
    leftpad: tuple[int, ...] = ()
    batch_idx: tuple[int, ...] = ()
    slopes: str = ""
    sinks: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    num_splits: int = 0
    strided: bool = False  #: index tensors and slopes are views of every other element
    dtype: torch.dtype = field(default=torch.float32)


CASES = (
    Case("one-query", (160, 7, 0, 90)),
    Case("causal-queries", (150, 7, 3, 90), "causal", len_q=5, kv_heads=1),
    Case("window", (150, 33), "window", len_q=3, num_splits=3, head_dim_v=40),
    Case("leftpad-and-rows", (100, 60), "causal", leftpad=(13, 60), batch_idx=(2, 0)),
    Case("paged", (140, 77), "causal", len_q=2, page_size=10, slopes="head", sinks=True, softcap=2.0),
    Case("paged-leftpad", (140, 77), leftpad=(11, 0), page_size=32, head_dim=24),
    Case("dropout", (140, 77), "causal", len_q=7, kv_heads=4, slopes="entry", dropout=0.4),
    Case("dropout-splits", (140, 77), dropout=0.3, num_splits=9),
    Case("tree", (120, 50), "tree", len_q=9),
    Case("blocks", (120, 50), "blocks", len_q=9),
    Case("documents", (100, 140), "documents", len_q=3, leftpad=(13, 60)),
    Case("many-rows", (160,), "causal", len_q=40, heads=8),
    Case("sink-alone", (0, 5) * 8, sinks=True),  # a sequence of 5 has few numbers: enough of them for the largest error
    Case("strided-rows", (100, 60), "causal", leftpad=(13, 50), batch_idx=(2, 0), slopes="entry", strided=True),
    Case("strided-pages", (140, 77), len_q=2, page_size=10, slopes="head", sinks=True, strided=True),
)


def error(case: Case, device: str) -> float:
    """Largest error of output and log-sum-exp against the fp64 reference, divided by the allowed error.

    The allowed error is twice PyTorch's error in the case's precision, plus the rounding of the result. Errors are the
    largest over several inputs, since one query gives few numbers.
    """
    rounds = [_distances(case, device, seed) for seed in range(4)]
    return max(max(ours) / max(allowed) for ours, allowed in (zip(*r, strict=True) for r in zip(*rounds, strict=True)))


def _distances(case: Case, device: str, seed: int) -> list[tuple[float, float]]:
    """(error, allowed error) of output and log-sum-exp for inputs of this seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {seed}".encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    rows = max(case.batch_idx, default=len(case.lengths) - 1) + 1
    q = normal(len(case.lengths), case.len_q, case.heads, case.head_dim)
    k, v = (normal(rows, case.capacity, case.kv_heads, d) for d in (case.head_dim, case.head_dim_v))
    options: dict[str, Any] = {"rng": RngState(5, 7, 1, 2, 3, 4)}
    if case.page_size:
        pages = case.capacity // case.page_size
        order = torch.randperm(rows * pages, generator=generator)
        options["block_table"] = order.view(rows, pages).int().to(device)
        k, v = (torch.empty_like(x.view(-1, case.page_size, *x.shape[2:])).index_copy_(
            0, order.to(device), x.reshape(-1, case.page_size, *x.shape[2:])) for x in (k, v))  # fmt: skip
    for name, values in (("cache_leftpad", case.leftpad), ("cache_batch_idx", case.batch_idx)):
        if values:
            options[name] = torch.tensor(values, dtype=torch.int32, device=device)
    if case.slopes:
        shape = (case.heads,) if case.slopes == "head" else (len(case.lengths), case.heads)
        options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device) / 5
    if case.sinks:
        options["sinks"] = torch.randn(case.heads, generator=generator).to(device)
    spec = AttentionSpec(_mask(case, device, generator), softcap=case.softcap, dropout=case.dropout)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    if case.strided:
        lengths = _every_other(lengths)
        tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
        options |= {name: _every_other(x) for name, x in tensors.items()}

    def call(dtype: torch.dtype, backend: str, **more: Any) -> list[torch.Tensor]:
        found = cached_attention(*(x.to(dtype) for x in (q, k, v)), lengths, spec, backend=backend, **options, **more)
        return [x.double().cpu() for x in found]

    exact = call(torch.float64, "reference")
    with patch.dict(DENSE, reference=same_dtype_attention):  # as in the contract
        same = call(case.dtype, "reference")
    ours = call(case.dtype, "triton", num_splits=case.num_splits)
    found = []
    for got, want, other in zip(ours, exact, same, strict=True):
        assert torch.equal(got.isneginf(), want.isneginf()), "-inf in other places than the reference"
        finite = want.isfinite()
        rounding = (want[finite].to(case.dtype).double() - want[finite]).abs().max().item()
        allowed = 2 * (other - want)[finite].abs().max().item() + 2 * rounding
        found.append(((got - want)[finite].abs().max().item(), allowed))
    return found


def _every_other(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a strided view; the gaps hold numbers that are no valid index or slope."""
    return torch.stack([x, torch.full_like(x, 2**30)], -1)[..., 0]


def _mask(case: Case, device: str, generator: torch.Generator) -> Mask:
    if case.mask == "blocks":
        pattern = torch.rand(case.heads, 1, -(-case.capacity // 32), generator=generator) < 0.6
        return Causal() & BlockSparse(pattern.to(device), 32)
    if case.mask == "documents":
        k_ids = (torch.arange(len(case.lengths) * case.capacity) // 17).int().view(-1, case.capacity)
        q_ids = k_ids[:, 95 : 95 + case.len_q].contiguous()
        return Document(q_ids.to(device), k_ids.to(device))
    if case.mask == "tree":
        return Tree(torch.tensor(TREE, device=device))
    return {"full": Full(), "causal": Causal(), "window": Window(20, 0)}[case.mask]


def main() -> None:
    for case in (case for case in CASES if case.name in sys.argv[1:]):
        try:
            result: Any = error(case, "cpu")
        except (AssertionError, RuntimeError, ValueError, TypeError):
            result = traceback.format_exc()
        print(json.dumps({"case": case.name, "result": result}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
