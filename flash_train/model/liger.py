"""CUDA implementations of `ops` from liger-kernel. Imported only once a tensor is on a CUDA device.

Liger's functions do not know autocast: `ops` hands them tensors already in the compute dtype.
"""

from liger_kernel.ops.rope import LigerRopeFunction
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (total, heads, head_dim); overwritten where they are contiguous. cos, sin fp32 (total, head_dim / 2)."""

    def heads_first(x: Tensor) -> Tensor:  # (total, heads, head_dim) -> (1, heads, total, head_dim), Liger's layout
        return x.unsqueeze(0).transpose(1, 2)

    q, k = LigerRopeFunction.apply(heads_first(q), heads_first(k), cos[None], sin[None], None, 1, q.shape[-1])
    return q.transpose(1, 2).squeeze(0), k.transpose(1, 2).squeeze(0)
