"""Compiles the optimizer's kernel for a chip, without a GPU, and prints what each format needs.

python -m tests.support.optim.compiled [CHIP ...]
"""

import re
import sys
from itertools import product

import torch
import triton

from flash_train.optim import kernel
from flash_train.optim.launch import OPTIONS
from tests.support.attention.compiled import AbsentDevice
from tests.support.attention.machine_code import resources_of

FORMATS = [
    (torch.bfloat16, moment, master)
    for moment, master in product((torch.bfloat16, torch.float32, torch.uint8), ("none", "exact", "stochastic"))
] + [(torch.float32, moment, "none") for moment in (torch.float32, torch.uint8)]
CHIPS = ("80", "90", "100", "120")


def main(chips: list[str]) -> None:
    driver = AbsentDevice()
    triton.runtime.driver.set_active(driver)
    table = torch.empty(7, dtype=torch.int64)
    number = torch.empty(1, dtype=torch.int32)
    for chip, (weight, moment, master) in product(chips or CHIPS, FORMATS):
        driver.capability = (int(chip) // 10, int(chip) % 10)
        compiled = kernel.adamw_kernel.warmup(
            table, 1, table, number, number, number, torch.empty((), dtype=torch.float32), 0.1, 0.1, 0.9, 0.95, 1.1,
            1e-8, 3, 17, 17, 2, WEIGHT=kernel.TYPES[weight], MOMENT=kernel.TYPES[moment], MASTER=master, ALIGNED=True,
            PLANE=kernel.PLANE, grid=(1,), **OPTIONS,
        )  # fmt: skip
        found, fused = resources_of(compiled), len(re.findall(r"fma\.\w+\.f32", compiled.asm["ptx"]))
        print(
            f"sm_{chip} {weight} {moment} {master}: {found.registers} registers, {found.spills} spills, {fused} fused",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
