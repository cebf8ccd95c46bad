"""The resources that a compiled kernel uses, read from its binary."""

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
    """The resources of a compiled kernel.

    Attributes:
        registers: per thread.
        stack: bytes per thread, which hold spilled registers.
        spills: number of instructions that spill or reload.
        shared: bytes of shared memory.
        tensor_memory: columns of tensor memory.
        serial: whether products run one by one. If the assembler cannot prove which products are in flight, it adds a
            wait after each HGMMA instruction.
        meetings: barriers of all warps of a partition per loop step. Triton adds those that it considers missing.
        divisions: divisions in loops whose divisor may be 0 (``unsafe_divisions``).
    """

    registers: int
    stack: int
    spills: int
    shared: int
    tensor_memory: int
    serial: bool = False
    meetings: int = 0
    divisions: int = 0


def resources_of(kernel: Any) -> Resources:
    """Read a compiled kernel's binary with the cuobjdump that Triton includes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no registers: {said}")
    spills = len(re.findall(r"\b(?:STL|LDL)\b", said))
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    products, waits = (len(re.findall(rf"\b{name}\b", said)) for name in ("HGMMA", r"WARPGROUP\.DEPBAR"))
    serial = products > 16 and waits >= products
    meetings = meetings_of(said)
    divisions = unsafe_divisions(kernel.asm["ttir"]) if "ttir" in kernel.asm else 0
    return Resources(
        int(found[1]), int(found[2]), spills, kernel.metadata.shared, tensor_memory, serial, meetings, divisions
    )


def unsafe_divisions(ttir: str) -> int:
    """How many integer divisions inside loops have a divisor that may be 0.

    Constants, the kernel's arguments (sizes of pages and blocks) and maxima are never 0. Software pipelining computes
    the first steps of a loop before the loop, even if the loop has no steps. A division by 0 is undefined there, and
    the compiler may drop the guard of a load that depends on it. In source, write ``i // tl.maximum(n, 1)``.
    """
    lines = ttir.splitlines()
    defined = {name: rest for line in lines for name, rest in re.findall(r"^\s*(%\w+) = (.*)", line)}

    def never_zero(value: str) -> bool:
        if value not in defined:  # an argument of the kernel
            return True
        rest = defined[value]
        source = re.match(r"(?:tt\.splat|tt\.broadcast|tt\.expand_dims|arith\.extsi) (%\w+)", rest)
        if source:
            return never_zero(source[1])
        return rest.startswith(("arith.constant", "arith.maxsi"))

    found, loops = 0, []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if re.search(r"\b(scf\.for|scf\.while)\b", line):
            loops.append(indent)
        elif loops and line.strip().startswith("}") and indent <= loops[-1] and " do {" not in line:
            loops.pop()
        divided = re.search(r"arith\.(?:div|rem)[su]i %\w+, (%\w+)", line)
        found += bool(divided and loops and not never_zero(divided[1]))
    return found


def meetings_of(sass: str) -> int:
    """Largest number of barriers of a partition's warps in any innermost loop with HGMMA instructions."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    jumps = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]
    steps = [
        [text for at, text in code if first <= at <= last]
        for first, last in jumps
        if first < last and not any(first <= a < b <= last and (a, b) != (first, last) for a, b in jumps)
    ]
    return max((sum("BAR.SYNC" in x for x in step) for step in steps if any("HGMMA" in x for x in step)), default=0)
