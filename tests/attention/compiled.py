"""Compiles the kernels for GPUs that are absent: prints registers, stack and shared memory, a JSON line per kernel.

A stand-in driver names the target, so that Triton stops after the binary. It is fixed for a process; so is this
script's use of it. ``python -m tests.attention.compiled`` compiles what the tests assert.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from flash_train.attention.kernels import launch
from flash_train.attention.kernels.backward import attention_backward_dkdv, attention_backward_dq
from flash_train.attention.kernels.forward import attention_forward
from flash_train.attention.kernels.tiles import tiles_for

#: shared memory that one program may take, bytes
SHARED_LIMIT = {(8, 0): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (12, 0): 99 * 1024}
#: (capability, head_dim, dtype, dropout)
VARIANTS = [
    *product([(9, 0)], [64, 128, 256], [torch.bfloat16], [False, True]),
    *product([(8, 9)], [64, 128, 256], [torch.bfloat16], [True]),
    ((8, 0), 128, torch.float16, False),
    *product([(8, 9)], [128, 256], [torch.float32], [True]),
]


class AbsentDevice:
    """What Triton asks of a driver when it only compiles."""

    def __init__(self) -> None:
        self.capability = (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)

    def get_current_device(self) -> tuple[int, int]:
        return self.capability

    def get_current_stream(self, device: object = None) -> int:
        return 0


def compile_kernels(capability: tuple[int, int], head_dim: int, dtype: torch.dtype, dropout: bool):
    """The three large kernels of a causal, packed, grouped call, as compiled objects by name."""
    tiles = tiles_for(capability, dtype, head_dim, dropout, causal=True)
    threshold = 230 if dropout else 256
    q, k = torch.empty(256, 4, head_dim, dtype=dtype), torch.empty(256, 2, head_dim, dtype=dtype)
    stat, cu, rng = torch.empty(4, 256), torch.zeros(9, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    qs, ks, ls = launch._strides(q), launch._strides(k), launch._lse_strides(stat)
    lengths = (8, 256, 256)

    def constants(tile):
        return launch._constants(q, k, cu, True, threshold, tile) | {"PRECISION": "tf32x3", "grid": (1,)}

    yield (
        "forward",
        attention_forward.warmup(
            q, k, k, q, stat, cu, cu, rng, *qs, *ks, *ks, *qs, *ls, *lengths, 0.1, threshold, **constants(tiles.forward)
        ),
    )
    yield "dkdv", attention_backward_dkdv.warmup(
        q, k, k, q, stat, stat, k, k, cu, cu, rng, *qs, *ks, *ks, *qs, *ks, *ks, *ls, *lengths, 0.1, 0.1, threshold,
        **constants(tiles.dkdv),
    )  # fmt: skip
    yield "dq", attention_backward_dq.warmup(
        q, k, k, q, stat, stat, q, cu, cu, rng, *qs, *ks, *ks, *qs, *qs, *ls, *lengths, 0.1, 0.1, threshold,
        **constants(tiles.dq),
    )  # fmt: skip


def resources(kernel) -> dict[str, int]:
    """Registers, stack bytes (spills live there) and shared memory of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": kernel.metadata.shared}


def main() -> None:
    driver = AbsentDevice()
    triton.runtime.driver.set_active(driver)
    for capability, head_dim, dtype, dropout in VARIANTS:
        driver.capability = capability
        for name, kernel in compile_kernels(capability, head_dim, dtype, dropout):
            row = {
                "capability": capability,
                "head_dim": head_dim,
                "dtype": str(dtype),
                "dropout": dropout,
                "kernel": name,
            }
            print(json.dumps(row | resources(kernel)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
