"""The bytes that one call of attention moves in a GPU's memory, measured by the counters of NVIDIA's `ncu`.

``ncu`` watches the process ``python -m flash_train.profiling.attention.dram_traffic BACKEND LENGTH forward|backward``.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

import torch

from flash_train.attention import attention
from flash_train.profiling.attention.memory import one_row

METRICS = {"read": "dram__bytes_read.sum", "write": "dram__bytes_write.sum"}
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}
TIMEOUT = 180  # seconds
# ncu must not lock clocks or flush caches, since a kernel may find the previous kernel's data in the cache.
OPTIONS = ["--csv", "--print-units", "base", "--profile-from-start", "off"]
OPTIONS += ["--clock-control", "none", "--cache-control", "none"]


class Unmeasured(Exception):
    """The bytes could not be measured; the message says why, in one line."""


def measure(backend: str, length: int, direction: str) -> dict[str, int]:
    """Count the bytes that the forward or the backward of one call reads from and writes to the device's memory.

    Raises:
        Unmeasured: no `ncu`, no permission to read counters, or a call that fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Unmeasured("ncu is not installed")
    command = [ncu, *OPTIONS, "--metrics", ",".join(METRICS.values()), sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            [*command, backend, str(length), direction], capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise Unmeasured(f"ncu took more than {TIMEOUT} s") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "==ERROR==" in line or "Error" in line]
        raise Unmeasured((errors or lines or [f"exit status {done.returncode}"])[-1].strip())
    return total(done.stdout)


def total(output: str) -> dict[str, int]:
    """Sum the output of `ncu --csv` over kernels: bytes by direction, and the number of kernels.

    Raises:
        Unmeasured: no kernel was recorded.
    """
    lines = output.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.DictReader(lines[begin:]) if row.get("Metric Name") in METRICS.values()]
    if not rows:
        errors = [line.strip() for line in lines if "==ERROR==" in line or "==WARNING==" in line]
        raise Unmeasured(errors[-1] if errors else "ncu recorded no kernel")
    found = {
        name: sum(_bytes(row["Metric Value"], row["Metric Unit"]) for row in rows if row["Metric Name"] == metric)
        for name, metric in METRICS.items()
    }
    return found | {"kernels": len({row["ID"] for row in rows})}


def _bytes(value: str, unit: str) -> int:
    return round(float(value.replace(",", "")) * UNITS[unit])


def run(backend: str, length: int, direction: str) -> None:
    """Run in the watched process. It compiles and allocates everything before the counters start."""
    case = one_row(length)
    q, k, v = case.inputs("cuda")
    spec, packing, dout = case.spec("cuda"), case.packing("cuda"), torch.randn_like(q)

    def forward() -> torch.Tensor:
        return attention(q, k, v, spec, packing=packing, backend=backend)

    torch.autograd.grad(forward(), (q, k, v), dout)
    out = forward()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        if direction == "forward":
            forward()
        else:
            torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
