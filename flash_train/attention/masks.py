"""Which keys a query attends to. Every reader of a mask (reference, kernels, FLOP counts) asks the same object."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class Mask:
    """A rule over (query position, key position) within one sequence."""

    #: whether the kernels apply the causal rule
    causal: bool = False

    def dense(self, len_q: int, len_k: int, device: torch.device | str | None = None) -> torch.Tensor:
        """The rule as a boolean tensor (len_q, len_k), True where the query attends to the key."""
        raise NotImplementedError

    def pairs(self, len_q: int, len_k: int) -> int:
        """How many (query, key) pairs attend."""
        raise NotImplementedError


@dataclass(frozen=True)
class Full(Mask):
    """Every query attends to every key."""

    def dense(self, len_q: int, len_k: int, device: torch.device | str | None = None) -> torch.Tensor:
        return torch.ones(len_q, len_k, dtype=torch.bool, device=device)

    def pairs(self, len_q: int, len_k: int) -> int:
        return len_q * len_k


@dataclass(frozen=True)
class Causal(Mask):
    """A query attends to the keys up to its own position; sequences of different length are aligned at their ends.

    Query ``i`` sees key ``j`` where ``j <= i + len_k - len_q`` (bottom-right, as flash-attn does since 2.1); with
    ``len_q > len_k`` the first queries see nothing and their output is exactly 0.
    """

    causal = True

    def dense(self, len_q: int, len_k: int, device: torch.device | str | None = None) -> torch.Tensor:
        queries = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
        return torch.arange(len_k, device=device)[None, :] <= queries

    def pairs(self, len_q: int, len_k: int) -> int:
        seeing = min(len_q, len_k)  # queries that see at least one key: the last `seeing` of them
        return seeing * (len_k - seeing) + seeing * (seeing + 1) // 2
