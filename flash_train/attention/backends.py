"""Choose the implementation that runs a call, and explain why others cannot run it."""

from __future__ import annotations

import functools
import importlib.util

import torch

from flash_train.attention.dense.sdpa import sdpa_unavailable
from flash_train.attention.kernels.families import FAMILIES, is_own
from flash_train.attention.spec import AttentionSpec
from flash_train.attention.tracing import assume_constant_result
from flash_train.checks import check_name

MAX_HEAD_DIM = 256


@assume_constant_result
def backend_names() -> tuple[str, ...]:
    """Return every value that ``backend`` may have.

    ``flash`` means this project's kernels: each call uses the first family in ``kernels.families`` that can run it. The
    name of a family selects its kernels alone.
    """
    return ("auto", "flash", *reversed(FAMILIES), "sdpa", "standard", "chunked", "reference")


#: the names of all backends
BACKENDS = backend_names()


def flash_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why this project's kernels cannot run here, or None if they can.

    ``head_dim`` is the larger of q's and v's. It may be symbolic under ``torch.compile``, because this function only
    compares it with numbers.
    """
    missing = _triton_unavailable()
    if missing is not None:
        return missing
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim={head_dim} is outside 1..{MAX_HEAD_DIM}"
    return _inputs_unavailable(device, dtype)


@assume_constant_result
def _inputs_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot read tensors of this dtype on this device, or None if they can."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {dtype} is none of float32, float16, bfloat16"
    if device.type == "cuda":
        return _gpu_unavailable(device)
    if device.type == "cpu" and interpreting():
        if dtype == torch.bfloat16:
            return "the Triton interpreter computes bfloat16 wrongly; use float32 or float16 there"
        return None
    return f"there is no NVIDIA GPU, the tensors are on {device.type}"


@assume_constant_result
def _triton_unavailable() -> str | None:
    return None if _has_triton() else "Triton is not installed (it exists for Linux only)"


@functools.cache  # every call needs the result, and the look-up is slow
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _gpu_unavailable(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "the device is not an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        return f"the GPU has compute capability {major}.{minor} and the kernels need 8.0 (Ampere) or later"
    return None


@assume_constant_result
def family_unavailable(backend: str, device: torch.device) -> str | None:
    """Return why the family of this name cannot run on the device, or None if it can; None also for other names."""
    return FAMILIES[backend].unavailable(device) if backend in FAMILIES else None


def resolve_backend(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    spec: AttentionSpec | None = None,
    sinks: bool = False,
    exact: bool = False,
) -> tuple[str, str]:
    """Return the name of the backend that runs, and why it was chosen.

    Args:
        name: one of ``BACKENDS``. ``auto`` uses this project's kernels if they can run, else ``sdpa``, else
            ``reference``.
        head_dim: the larger of q's and v's.
        spec: what to compute; None means a computation that every backend can do.
        sinks: whether there are sinks.
        exact: whether the call needs the log-sum-exp or this project's own dropout mask.

    Raises:
        ValueError: an unknown name, or a named backend that cannot run here. A named backend is never replaced.
    """
    check_name("backend", name, backend_names())
    spec = AttentionSpec() if spec is None else spec
    if name == "auto" or is_own(name):
        device = torch.device(device)
        reason = flash_unavailable(device, dtype, head_dim)
        if reason is None:
            reason = family_unavailable(name, device)
        if reason is None:
            return "flash" if name == "auto" else name, "this project's kernels run here"
        if name != "auto":
            able = _usable_backends(device, dtype, head_dim, spec, sinks, exact)
            raise ValueError(f"the {name} backend cannot run here: {reason}; {able} can")
    if name in ("auto", "sdpa"):
        missing = sdpa_unavailable(spec, sinks=sinks, exact=exact)
        if missing is None:
            return "sdpa", "as asked" if name == "sdpa" else f"flash cannot run: {reason}"
        if name == "sdpa":
            able = _usable_backends(torch.device(device), dtype, head_dim, spec, sinks, exact)
            raise ValueError(f"the sdpa backend cannot run this: {missing}; {able} can")
        return "reference", f"flash cannot run: {reason}; sdpa cannot run either: {missing}"
    return name, "as asked"


def _usable_backends(
    device: torch.device, dtype: torch.dtype, head_dim: int, spec: AttentionSpec, sinks: bool, exact: bool
) -> str:
    """List the backends that can run a call, by names that both ``backend=`` and ``attention=`` (commands) accept."""
    reasons = {
        "flash": flash_unavailable(device, dtype, head_dim),
        "sdpa": sdpa_unavailable(spec, sinks=sinks, exact=exact),
    }
    able = [name for name, reason in reasons.items() if reason is None]
    # `reference` can also run the call, but is unsuitable for training
    return f"{', '.join([*able, 'standard'])} and chunked"


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, which requires ``TRITON_INTERPRET=1`` before Triton is imported."""
    import triton

    return bool(triton.knobs.runtime.interpret)
