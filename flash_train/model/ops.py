"""The model's fused operations: on CUDA kernels of our own, else PyTorch; equal within rounding.

Under autocast they compute in the autocast dtype, as a linear layer would; parameters keep their own dtype.
Under `torch.compile` the plain formulas are used on every device, since Inductor fuses those itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE_INDEX = -100
CHUNK_TOKENS = 1024  # tokens whose logits exist at one time on the PyTorch path
MAX_LOGIT_TOKENS = 2048  # the same on the CUDA path: with fewer, adding up the weight's gradient begins to take time


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that activations have: autocast's where it is on for the device of `x`, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019); the result has x's dtype.

    The mean is taken in fp32 at least and the normalised value rounded before `weight`, as Llama does.
    """
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, uses: int = 1) -> tuple[Tensor, ...]:
    """A step of the residual stream: x + update (x alone without one), then its `rms_norm`, as often as it has `uses`.

    On CUDA one kernel each way, and the backward's adds up the gradients: of the normed rows one for each use, up to
    three, and that of the stream, for which x may be asked to come through here although nothing is added.
    """
    if _kernels_run(x):
        from flash_train.model.kernels import rms_norm as kernels

        return kernels.add_rms_norm(x, update, weight, eps, uses)
    x = x if update is None else x + update
    wide = x.to(_at_least_fp32(x.dtype))
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return x, *[(scaled * weight).to(x.dtype)] * uses


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) · up) @ weight.T (Shazeer 2020, arXiv:2002.05202).

    gate, up (..., width), weight (out, width). On CUDA the gated product is computed again in the backward, which runs
    once: it writes over gate and up.
    """
    if _kernels_run(gate):
        from flash_train.model.kernels import swiglu

        kind = compute_dtype(gate)
        return swiglu.swiglu_linear(gate.to(kind), up.to(kind), weight.to(kind))
    return F.linear(F.silu(gate) * up, weight)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q and k (total, heads, head_dim) by the tables cos, sin, fp32 (total, head_dim / 2).

    Each token has its own row of the tables, so that positions may restart anywhere. May overwrite q and k, and the
    backward the gradients that it is given.
    """
    if _kernels_run(q):
        from flash_train.model.kernels import rotary

        return rotary.apply_rotary(q, k, cos, sin)
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross entropies of `hidden @ weight.T` over labels other than -100, without ever holding all logits.

    hidden (tokens, width), weight (vocab_size, width), labels int64 (tokens,). Returns a scalar, fp32 (fp64 if hidden
    is fp64). Backward through it runs once.
    """
    hidden = hidden.to(compute_dtype(hidden))
    if hidden.is_cuda and hidden.dtype != torch.float64:
        return _fused_linear_cross_entropy(hidden, weight, labels)
    total = torch.zeros((), dtype=_at_least_fp32(hidden.dtype), device=hidden.device)
    for rows, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        # Recomputing a chunk's logits in the backward is what keeps only one chunk alive.
        total = total + checkpoint(
            _chunk_cross_entropy, rows, weight, targets, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from flash_train.model.kernels import cross_entropy

    return cross_entropy.linear_cross_entropy(hidden, weight, labels)


def _chunk_cross_entropy(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(rows, weight)
    logits = logits.to(_at_least_fp32(logits.dtype))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _kernels_run(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling()
