"""Measure memory in use, of the device if PyTorch reports it, else of the process; format bytes as text."""

import gc
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

GIB = 2**30


def bytes_in_words(size: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def free_memory() -> None:
    """Free what nothing uses any more; a trainer, its module and its optimizer reference each other."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def memory_use(device: torch.device) -> dict[str, float | None]:
    """Return memory figures in GiB, by name.

    Returns:
        On CUDA `memory/allocated_gib`, `memory/reserved_gib` and `memory/peak_gib` (most allocated since
        `reset_peak_memory`); on MPS `memory/allocated_gib` and `memory/reserved_gib`; elsewhere
        `memory/process_gib` and `memory/process_peak_gib`: the process's resident set, and its peak since the start.
        None if the system does not report it.
    """
    if device.type == "cuda":
        return {
            "memory/allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory/reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "memory/peak_gib": max(_earlier.get(device, 0), torch.cuda.max_memory_allocated(device)) / GIB,
        }
    if device.type == "mps":
        return {
            "memory/allocated_gib": torch.mps.current_allocated_memory() / GIB,
            "memory/reserved_gib": torch.mps.driver_allocated_memory() / GIB,
        }
    return {"memory/process_gib": _resident_gib(), "memory/process_peak_gib": _peak_resident_gib()}


def peak_memory(use: Mapping[str, float | None]) -> float | None:
    """Return the peak among the figures of `memory_use`, in GiB; None if there is none."""
    return use.get("memory/peak_gib", use.get("memory/process_peak_gib"))


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak on CUDA. A process's resident peak cannot be reset, so elsewhere this does nothing."""
    _earlier.pop(device, None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def begin_peak(device: torch.device) -> None:
    """Reset PyTorch's peak from here on; `memory_use` still reports the peak since `reset_peak_memory`."""
    if device.type == "cuda":
        _earlier[device] = max(_earlier.get(device, 0), torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)


_earlier: dict[torch.device, int] = {}  # bytes: the peak before the last `begin_peak`


def _resident_gib() -> float | None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    import resource

    return int(statm.read_text().split()[1]) * resource.getpagesize() / GIB


def _peak_resident_gib() -> float | None:
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
