"""Speed of the attention operator beside its peers on one GPU: ``python scripts/bench_attention.py --out FILE``.

Every implementation is checked against fp32 before it is timed, on fresh random inputs; a wrong one gets no figure.
Rates are model FLOPs (causal: half; backward: 2.5 times the forward) over the median time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_train.attention import AttentionSpec, Causal, Full, Packing, RngState, attention, attention_flops
from flash_train.profiling import versions, write_json

SDPA = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
IMPLEMENTATIONS = ("triton", *SDPA)
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One case: dense unless ``lengths`` names packed documents."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    seq_len: int
    causal: bool
    dropout: float = 0.0
    lengths: tuple[int, ...] = ()

    @property
    def batch(self) -> int:
        return max(1, 16384 // self.seq_len)

    @property
    def name(self) -> str:
        heads = f"h{self.n_heads}" + (f"/{self.n_kv_heads}" if self.n_kv_heads != self.n_heads else "")
        length = f"packed{sum(self.lengths)}" if self.lengths else f"n{self.seq_len}"
        drop = f"-dropout{self.dropout}" if self.dropout else ""
        return f"d{self.head_dim}-{heads}-{length}-{'causal' if self.causal else 'full'}{drop}"

    @property
    def flops(self) -> float:
        squares = sum(n * n for n in self.lengths) or self.batch * self.seq_len**2
        return attention_flops(squares, self.n_heads, self.head_dim) / (2 if self.causal else 1)


def log_normal_lengths(total: int, seed: int = 1) -> tuple[int, ...]:
    """Document lengths with a median near 1.5k and a long tail, that add up to ``total``."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = torch.exp(torch.randn((), generator=generator) * 1.3 + 7.3).clamp(64, 32768).item()
        lengths.append(min(int(drawn), left))
    return tuple(lengths)


def shapes() -> Iterable[Shape]:
    for head_dim, heads in ((128, 16), (64, 32), (256, 8)):
        for n in (2048, 4096, 16384):
            for causal in (True, False):
                yield Shape(head_dim, heads, heads, n, causal)
    for n in (16384, 32768):
        yield Shape(128, 32, 8, n, True)
    for causal in (True, False):
        yield Shape(128, 16, 16, 16384, causal, dropout=0.1)
    yield Shape(128, 16, 16, 65536, True, lengths=log_normal_lengths(65536))


def implementation(name: str, shape: Shape) -> Call | None:
    """The call on (batch, seqlen, heads, head_dim) or packed tensors; None where there is no such case."""
    spec = AttentionSpec(Causal() if shape.causal else Full(), dropout=shape.dropout)
    packing = None
    if shape.lengths:
        cu = torch.tensor([0, *shape.lengths], device="cuda").cumsum(0).int()
        packing = Packing(cu, cu, lengths=shape.lengths)
    if name == "triton":
        return lambda q, k, v: attention(q, k, v, spec, packing=packing, backend="flash")
    if packing is not None:  # PyTorch's packed kernel is FlashAttention-2's
        return (lambda q, k, v: attention(q, k, v, spec, packing=packing, backend="sdpa")) if name == "fa2" else None

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPA[name]):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, dropout_p=shape.dropout, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return fused


def inputs(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    rows = (sum(shape.lengths),) if shape.lengths else (shape.batch, shape.seq_len)
    heads = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
    return [torch.randn(*rows, h, shape.head_dim, device="cuda", dtype=dtype, requires_grad=True) for h in heads]


def check(name: str, shape: Shape) -> float:
    """Relative error (Frobenius, the worst of output and gradients) at a length the fp32 reference can hold.

    With dropout, whose mask is its own in every implementation, this project's is held to the reference's mask and
    the others to their undropped output.
    """
    lengths = (700, 324) if shape.lengths else ()
    small = Shape(
        shape.head_dim, 4, 4 * shape.n_kv_heads // shape.n_heads or 1, 1024, shape.causal, shape.dropout, lengths
    )
    if shape.dropout and name != "triton":
        small = Shape(small.head_dim, small.n_heads, small.n_kv_heads, 1024, small.causal)
    q, k, v = tensors = inputs(small)
    spec = AttentionSpec(Causal() if small.causal else Full(), dropout=small.dropout)
    packing, rng = None, RngState(1) if small.dropout else None
    if lengths:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        packing = Packing(cu, cu, lengths=lengths)
    if rng is not None:
        out = attention(q, k, v, spec, rng=rng, backend="flash")
    else:
        call = implementation(name, small)
        assert call is not None
        out = call(*tensors)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    ref = attention(exact[0], exact[1], exact[2], spec, packing=packing, rng=rng, backend="reference")
    dout = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, tensors, dout))
    want = (ref, *torch.autograd.grad(ref, exact, dout.float()))
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def measure(name: str, shape: Shape, rep: int) -> list[dict[str, Any]]:
    """A record per direction; without a rate, and with the reason, where the result is wrong or the call fails."""
    from triton.testing import do_bench

    base = {"case": shape.name, "implementation": name, "dropout": shape.dropout}
    try:
        call = implementation(name, shape)
        if call is None:
            return []
        error = check(name, shape)
        if not error < 1e-2:  # bf16 operands land between 2e-3 and 5e-3; NaN fails too
            return [base | {"direction": "forward", "error": error, "reason": "wrong result"}]
        tensors = inputs(shape)
        forward = do_bench(lambda: call(*tensors), warmup=25, rep=rep, return_mode="median")
        out = call(*tensors)
        dout = torch.randn_like(out)
        backward = do_bench(
            lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True), warmup=25, rep=rep, return_mode="median"
        )
    except RuntimeError as failure:
        return [base | {"direction": "forward", "reason": str(failure).splitlines()[0]}]
    return [
        base | {"direction": "forward", "ms": forward, "tflops": shape.flops / forward / 1e9, "error": error},
        base | {"direction": "backward", "ms": backward, "tflops": 2.5 * shape.flops / backward / 1e9, "error": error},
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records to this JSON file")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as d128 or causal")
    parser.add_argument("--rep", type=int, default=120, help="milliseconds of repetitions per figure")
    parser.add_argument("--commit", help="recorded commit, where this is no git checkout")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_attention needs an NVIDIA GPU: none was found", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    environment = versions()
    if options.commit:
        environment["commit"] = options.commit
    records: list[dict[str, Any]] = []
    for shape in shapes():
        if options.only not in shape.name:
            continue
        rows = [row for name in IMPLEMENTATIONS for row in measure(name, shape, options.rep)]
        for direction in ("forward", "backward"):
            rates = {row["implementation"]: row.get("tflops") for row in rows if row["direction"] == direction}
            for row in rows:
                if row["direction"] == direction and row.get("tflops"):
                    for peer in SDPA:
                        row[f"ratio_to_{peer}"] = row["tflops"] / rates[peer] if rates.get(peer) else None
        records += [row | {key: environment[key] for key in ("gpu", "torch", "triton", "commit")} for row in rows]
        shown = ", ".join(
            f"{r['implementation']} {r['direction'][:3]} {r.get('tflops') or float('nan'):.0f}" for r in rows
        )
        print(f"{shape.name}: {shown}", flush=True)
    if options.out:
        write_json(options.out, {"versions": environment, "records": records})
        print(f"wrote {options.out}")
    return 0
