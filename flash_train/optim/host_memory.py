"""Tensors in the host's memory that a GPU copies from and to without the CPU."""

import weakref

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """Return a contiguous copy in pinned memory; without a GPU in plain memory.

    PyTorch's own pinned memory is rounded up to a power of two, which would waste up to half of it.

    Raises:
        MemoryError: the system cannot pin so much memory.
    """
    copy = torch.empty(x.shape, dtype=x.dtype)
    copy.copy_(x)
    if torch.cuda.is_available() and copy.numel():
        runtime, size = torch.cuda.cudart(), copy.numel() * copy.element_size()
        if error := int(runtime.cudaHostRegister(copy.data_ptr(), size, 0)):
            raise MemoryError(f"cannot pin {size:,} bytes of the host's memory: CUDA error {error}")
        finalizer = weakref.finalize(copy.untyped_storage(), runtime.cudaHostUnregister, copy.data_ptr())
        finalizer.atexit = False  # CUDA may have ended before
    return copy
