"""Runs the contract in the Triton interpreter, which needs its own process, and prints one JSON line per case.

``python -m tests.support.attention.interpreter 0 2`` runs every second case from the first.
"""

from __future__ import annotations

import json
import sys
import traceback

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch

from tests.support.attention.cases.named import CASES, KEPT, in_dtypes
from tests.support.attention.contract import run

HALF = ("gqa", "packed-cross", "everything", "softcap", "alibi-packed", "dropout-unaligned-shard", "narrower-values")
INTERPRETED = [
    *CASES,
    *in_dtypes((torch.float16,), HALF),
    # the interpreter computes bfloat16 wrongly, and it is slow for long calls
    *(case for case in KEPT if case.dtype != torch.bfloat16 and max(map(max, case.lengths)) <= 128),
]


def main(first: int = 0, step: int = 1) -> None:
    torch.set_num_threads(1)
    for case in INTERPRETED[first::step]:
        try:
            result = [vars(error) | {"ok": error.ok} for error in run(case, "triton", "cpu")]
        except (AssertionError, RuntimeError, ValueError, TypeError):
            result = traceback.format_exc()
        print(json.dumps({"case": str(case), "result": result}), flush=True)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
