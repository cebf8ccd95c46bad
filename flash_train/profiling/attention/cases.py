"""The cases of the attention benchmark: shapes, masks, work and inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_train.attention import AttentionSpec, Causal, Full, Mask, Packing, attention_flops
from flash_train.attention.masks import BlockSparse
from flash_train.attention.patterns import random

TOKENS = 16384  #: per call, unless one sequence is longer
SPARSE_BLOCK = 128


@dataclass(frozen=True)
class Case:
    """A shape in bf16. The case is dense by default.

    With ``lengths``, it has packed documents; with ``density`` below 1, only this share of blocks is attended.
    """

    head_dim: int
    n_heads: int
    n_kv_heads: int
    seq_len: int
    causal: bool
    dropout: float = 0.0
    lengths: tuple[int, ...] = ()
    density: float = 1.0

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.seq_len)

    @property
    def name(self) -> str:
        heads = f"h{self.n_heads}" + (f"/{self.n_kv_heads}" if self.n_kv_heads != self.n_heads else "")
        length = f"packed{sum(self.lengths)}" if self.lengths else f"n{self.seq_len}"
        drop = f"-dropout{self.dropout}" if self.dropout else ""
        sparse = f"-sparse{self.density}" if self.density < 1 else ""
        return f"d{self.head_dim}-{heads}-{length}-{'causal' if self.causal else 'full'}{drop}{sparse}"

    @property
    def flops(self) -> float:
        """Model FLOPs of a forward: half of full attention if causal, and times the density if sparse."""
        squares = sum(n * n for n in self.lengths) or self.batch * self.seq_len**2
        return attention_flops(squares, self.n_heads, self.head_dim) * self.density / (2 if self.causal else 1)

    def spec(self, device: torch.device | str) -> AttentionSpec:
        """Return the mask. Its random pattern has equally many blocks in every row and is the same at every call."""
        mask: Mask = Causal() if self.causal else Full()
        if self.density < 1:
            blocks = self.seq_len // SPARSE_BLOCK
            drawn = random(blocks, blocks, round(self.density * blocks), torch.Generator().manual_seed(0))
            mask = mask & BlockSparse(drawn.to(device), SPARSE_BLOCK)
        return AttentionSpec(mask, dropout=self.dropout)

    def packing(self, device: torch.device | str) -> Packing | None:
        if not self.lengths:
            return None
        cu = torch.tensor([0, *self.lengths]).cumsum(0).int().to(device)
        return Packing(cu, cu, lengths=self.lengths)

    def inputs(self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
        """Draw random q, k, v that require gradients: (batch, seqlen, heads, head_dim), packed (total, ...)."""
        rows = (sum(self.lengths),) if self.lengths else (self.batch, self.seq_len)
        q, k, v = (
            torch.randn(*rows, heads, self.head_dim, device=device, dtype=dtype, requires_grad=True)
            for heads in (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        )
        return q, k, v


def log_normal_lengths(total: int, seed: int = 1) -> tuple[int, ...]:
    """Draw document lengths with a median near 1.5k and a long tail; they add up to ``total``."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = torch.exp(torch.randn((), generator=generator) * 1.3 + 7.3).clamp(64, 32768).item()
        lengths.append(min(int(drawn), left))
    return tuple(lengths)


def cases() -> Iterator[Case]:
    """Yield the shapes of the FlashAttention papers, then grouped heads, dropout, packed documents, block sparsity."""
    for head_dim, heads in ((128, 16), (64, 32), (256, 8)):
        for n in (2048, 4096, 16384):
            for causal in (True, False):
                yield Case(head_dim, heads, heads, n, causal)
        yield Case(head_dim, heads, heads, 32768, True)
    for n in (16384, 32768, 65536):
        yield Case(128, 32, 8, n, True)
    for causal in (True, False):
        yield Case(128, 16, 16, 16384, causal, dropout=0.1)
    yield Case(128, 16, 16, 65536, True, lengths=log_normal_lengths(65536))
    for density in (0.125, 0.25, 0.5):
        yield Case(128, 16, 16, 16384, False, density=density)
