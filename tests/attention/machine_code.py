"""What a compiled kernel takes of a chip, read from its binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, bytes of stack (spills live there), instructions that spill or
    reload, bytes of shared memory, columns of tensor memory; whether products run one by one: where the assembler
    cannot follow what is in flight, it puts a wait behind every instruction of Hopper's matrix unit; and how often in a
    step all warps of a partition wait for each other: Triton adds what it takes to be missing."""

    registers: int
    stack: int
    spills: int
    shared: int
    tensor_memory: int
    serial: bool = False
    meetings: int = 0


def resources_of(kernel: Any) -> Resources:
    """Read a compiled kernel's binary with the tool that Triton brings along."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump tells no registers: {said}")
    spills = len(re.findall(r"\b(?:STL|LDL)\b", said))
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    products, waits = (len(re.findall(rf"\b{name}\b", said)) for name in ("HGMMA", r"WARPGROUP\.DEPBAR"))
    serial = products > 16 and waits >= products
    meetings = meetings_of(said)
    return Resources(int(found[1]), int(found[2]), spills, kernel.metadata.shared, tensor_memory, serial, meetings)


def meetings_of(sass: str) -> int:
    """Barriers of a partition's warps in an innermost loop with products of Hopper's matrix unit: the most in any."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    jumps = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]
    steps = [
        [text for at, text in code if first <= at <= last]
        for first, last in jumps
        if first < last and not any(first <= a < b <= last and (a, b) != (first, last) for a, b in jumps)
    ]
    return max((sum("BAR.SYNC" in x for x in step) for step in steps if any("HGMMA" in x for x in step)), default=0)
