"""What PyTorch and matplotlib read: to be set before they are imported."""

import logging
import os
import platform
import sys
from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # what PyTorch reads; the second is the older name


def grow_segments(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the CUDA allocator take segments that grow, unless the environment says how it shall be.

    Segments of fixed sizes leave gaps that the tensors of a long row do not fit into: a step of 456,640 tokens ran out
    of 139 GiB with 32 of them reserved and idle. Only on Linux can segments grow; the first fails in Windows' subsystem
    for it (pytorch/pytorch#192330).
    """
    windows = "microsoft" in platform.release().lower()
    if sys.platform == "linux" and not windows and not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"


def quieten_matplotlib() -> None:
    """Have matplotlib not say where it keeps its cache when the home folder is missing or read-only: it needs none."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def quieten_profiler(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have PyTorch's profiler, which records a step's memory on a CPU, not say when it starts and stops, and what it
    did not see begin."""
    environ.setdefault("KINETO_LOG_LEVEL", "99")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
