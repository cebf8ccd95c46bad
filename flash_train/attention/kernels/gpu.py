"""Properties of a GPU that decide tiles and grids."""

from __future__ import annotations

import functools

import torch
import triton


@functools.cache
def major_of(device: torch.device) -> int:
    """Return the major compute capability."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use."""
    with torch.cuda.device(device):
        driver = triton.runtime.driver.active
        return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 4 in the interpreter, so that it splits keys, too."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
