"""Runs the contract under the Triton interpreter, which is chosen per process: prints a JSON line per case."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from tests.attention.contract import CASES, run

INTERPRETED = [*CASES, *(replace(case, dtype=torch.float16) for case in CASES if case.name in ("gqa", "packed-cross"))]


def main() -> None:
    for case in INTERPRETED:
        try:
            result = [vars(error) | {"ok": error.ok} for error in run(case, "flash", "cpu")]
        except (AssertionError, RuntimeError, ValueError, TypeError):
            result = traceback.format_exc()
        print(json.dumps({"case": str(case), "result": result}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
