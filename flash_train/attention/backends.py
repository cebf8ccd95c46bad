"""Which implementation runs, and in words why another cannot."""

from __future__ import annotations

import importlib.util

import torch

BACKENDS = ("auto", "flash", "sdpa", "standard", "reference")
MAX_HEAD_DIM = 256


@torch.compiler.assume_constant_result
def flash_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this project's kernels cannot run here, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it exists for Linux only)"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim={head_dim} is outside 1..{MAX_HEAD_DIM}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {dtype} is none of float32, float16, bfloat16"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "the device is not an NVIDIA GPU"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 0):
            return f"the GPU has compute capability {major}.{minor} and the kernels need 8.0 (Ampere) or later"
        return None
    if device.type == "cpu" and interpreting():
        if dtype == torch.bfloat16:
            return "the Triton interpreter computes bfloat16 wrongly; use float32 or float16 there"
        return None
    return f"there is no NVIDIA GPU: the tensors are on {device.type}"


def resolve_backend(name: str, *, device: torch.device | str, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The backend that runs and why, in words.

    Args:
        name: one of ``BACKENDS``. ``auto`` takes ``flash`` where it runs, else ``sdpa``.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run here. A named backend is never replaced.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r}: must be one of {', '.join(BACKENDS)}")
    reason = flash_unavailable(torch.device(device), dtype, head_dim)
    if name == "auto":
        return (
            ("flash", "this project's kernels run here") if reason is None else ("sdpa", f"flash cannot run: {reason}")
        )
    if name == "flash" and reason is not None:
        raise ValueError(f"attention=flash cannot run here: {reason}; use attention=sdpa or attention=auto")
    return name, "as asked"


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU: ``TRITON_INTERPRET=1``, set before it is imported."""
    import triton

    return bool(triton.knobs.runtime.interpret)
