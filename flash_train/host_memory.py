"""The host's memory as a place for tensors of a GPU, with copies that run next to the computation."""

from __future__ import annotations

import mmap
import sys
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

Event = torch.cuda.Event | None  #: None on a CPU, where copies run at once


def empty_on_host(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory that a GPU copies from and to without the CPU (pinned); without a GPU plain memory.

    PyTorch's own pinned memory is rounded up to a power of two, which would waste up to half of it.

    Raises:
        MemoryError: the system cannot pin so much memory.
    """
    size = shape.numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    memory = torch.frombuffer(_pages(size), dtype=torch.uint8)
    memory.zero_()  # on all cores; else pinning would fetch the pages, on one core
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        if error := int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)):
            raise MemoryError(f"cannot pin {size:,} bytes of the host's memory: CUDA error {error}")
        finalizer = weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
        finalizer.atexit = False  # CUDA may have ended before
    return memory.view(dtype).view(shape)


def _pages(size: int) -> mmap.mmap:
    """Return memory of this process alone, in huge pages where the system has them: there are fewer to pin."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them takes its usual pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def to_host(x: Tensor) -> Tensor:
    """Return a contiguous copy in pinned memory."""
    return empty_on_host(x.shape, x.dtype).copy_(x)


class CopyStream:
    """A stream for copies between a GPU and the host; on a CPU they run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def running(self) -> AbstractContextManager[object]:
        """Return a context in which copies go to this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: Event) -> None:
        """Begin what follows on this stream after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def event(self) -> Event:
        """Return an event after the copies so far."""
        return None if self._stream is None else self._stream.record_event()


def computed(device: torch.device) -> Event:
    """Return an event after what the current stream computes so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_after(event: Event, device: torch.device) -> None:
    """Begin what follows on the current stream of a device after an event. Another device may be the current one."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
