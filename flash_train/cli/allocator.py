"""How PyTorch's CUDA allocator takes its memory."""

import os
import platform
import sys
from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # what PyTorch reads; the second is the older name


def grow_segments(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have it take segments that grow, unless the environment says how it shall be; before anything is allocated.

    Segments of fixed sizes leave gaps that the tensors of a long row do not fit into: a step of 456,640 tokens ran out
    of 139 GiB with 32 of them reserved and idle. Only on Linux can segments grow; the first fails in Windows' subsystem
    for it (pytorch/pytorch#192330).
    """
    windows = "microsoft" in platform.release().lower()
    if sys.platform == "linux" and not windows and not any(name in environ for name in VARIABLES):
        environ[VARIABLES[0]] = "expandable_segments:True"
