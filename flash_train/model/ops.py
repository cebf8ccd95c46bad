"""The model's fused operations: Triton kernels on CUDA, else PyTorch. The two agree within rounding.

Under autocast they compute in the autocast dtype, as a linear layer would; parameters keep their dtype.
Under `torch.compile` all but `linear_cross_entropy` use the plain formulas on every device, since Inductor fuses them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_train.model import products
from flash_train.model.kernels.common import IGNORE_INDEX

CHUNK_TOKENS = 1024  # tokens whose logits exist at one time on the PyTorch path; on CUDA: MAX_LOGIT_TOKENS


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of activations: autocast's if it is on for the device of `x`, else the dtype of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019), in x's dtype.

    The mean is taken in fp32 at least and the normalised value rounded before `weight`, as Llama does.
    """
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, uses: int = 1) -> tuple[Tensor, ...]:
    """Advance the residual stream: x + update (x if update is None), then its `rms_norm`.

    Returns the stream, and the normed rows `uses` times (1 to 3). Each use has a gradient of its own, so that on CUDA
    one backward kernel adds them up, together with the stream's gradient. This also helps if update is None.
    """
    if _kernels_run(x):
        from flash_train.model.kernels import rms_norm as kernels

        return kernels.add_rms_norm(x, update, weight, eps, uses)
    x = x if update is None else x + update
    wide = x.to(_at_least_fp32(x.dtype))
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return x, *[(scaled * weight).to(x.dtype)] * uses


def linear(x: Tensor, weight: Tensor, *, adds: bool = False) -> Tensor:
    """Return x @ weight.T: x (..., in), weight (out, in).

    With `adds`, the backward adds the weight's gradient to the one that is there (see `products.linear`).
    """
    kind = compute_dtype(x)
    learns = torch.is_grad_enabled() and weight.requires_grad and not torch.compiler.is_compiling()
    if learns and (adds or (_kernels_run(x) and weight.dtype != kind)):
        return products.linear(x.to(kind), weight, adds)
    return F.linear(x, weight)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, *, needs_value: bool = True, adds: bool = False) -> Tensor:
    """Compute (silu(gate) · up) @ weight.T (Shazeer 2020, arXiv:2002.05202).

    gate, up (..., width), weight (out, width). On CUDA the backward computes the gated product again. It
    writes its gradients over gate and up, so it runs once. If only its gradients matter, `needs_value=False` saves the
    forward's work on CUDA: the result then has the right shape and any numbers. `adds` is as in `linear`.
    """
    if _kernels_run(gate):
        from flash_train.model.kernels import swiglu

        kind = compute_dtype(gate)
        return swiglu.swiglu_linear(gate.to(kind), up.to(kind), weight, needs_value, adds)
    return linear(F.silu(gate) * up, weight, adds=adds)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up. On CUDA the backward writes its gradients over gate and up, so it runs once."""
    if _kernels_run(gate):
        from flash_train.model.kernels import swiglu

        return swiglu.swiglu(gate, up)
    return F.silu(gate) * up


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k (total, heads, head_dim) by the tables cos, sin, fp32 (total, head_dim / 2).

    Each token has its own row of the tables, so that positions may restart anywhere. The forward may overwrite q and k,
    and the backward its incoming gradients.
    """
    if _kernels_run(q):
        from flash_train.model.kernels import rotary

        return rotary.apply_rotary(q, k, cos, sin)
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross entropies of `hidden @ weight.T` over labels other than -100, without holding all logits at once.

    hidden (tokens, width), weight (vocab_size, width), labels int64 (tokens,). Returns a scalar, fp32 (fp64 if hidden
    is fp64). The backward runs once.
    """
    hidden = hidden.to(compute_dtype(hidden))
    if hidden.is_cuda and hidden.dtype != torch.float64:
        return _fused_linear_cross_entropy(hidden, weight, labels)
    total = torch.zeros((), dtype=_at_least_fp32(hidden.dtype), device=hidden.device)
    for rows, targets in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        # The backward recomputes a chunk's logits, so that only one chunk is in memory.
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


def _kernels_run(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and not torch.compiler.is_compiling()
