"""Speed of the attention operator and its peers on one GPU: ``python scripts/bench_attention.py --out FILE``.

Every implementation is checked against fp32 on the inputs of the timing; a wrong one gets no rate. The implementations
of a case take turns, so that all of them run at the same clocks. Rates are model FLOPs (causal: half; backward: 2.5
times the forward) over the median time. FlashAttention-4 and cuDNN over packed rows run where the packages
``flash-attn-4`` and ``nvidia-cudnn-frontend`` are installed. FILE is written after every case. A second start with the
same commit, GPU and versions continues after the last case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_train.cli.bench.records import (
    COMPARED_VERSIONS,
    Records,
    add_options,
    environment_of,
    measure_cases,
    selected_cases,
)
from flash_train.cli.config.errors import ArgumentParser, UnavailableError, one_line_errors
from flash_train.profiling.attention.cases import Case, cases
from flash_train.profiling.attention.comparison import add_ratios, measure
from flash_train.profiling.attention.peers import IMPLEMENTATIONS, implementations


def measure_all(
    case: Case,
    environment: dict[str, str | None],
    timer: Callable[[Callable[[], Any]], float],
    names: Sequence[str] = (),
) -> Records:
    """The records of a case's implementations, or of the named ones, with ratios and versions."""
    wanted = [name for name in implementations(case) if not names or name in names]
    rows = measure(wanted, case, timer)
    add_ratios(rows)
    return [row | {key: environment[key] for key in COMPARED_VERSIONS} for row in rows]


def _shown(rows: Records) -> str:
    def one(row: dict[str, Any]) -> str:
        figure = f"{row['tflops']:.0f} TFLOP/s" if row.get("tflops") else f"none ({row['reason']})"
        ratio = f", {row['time_to_dense']:.3f} of dense's time" if "time_to_dense" in row else ""
        return f"{row['implementation']} {row['direction']} {figure}{ratio}"

    return "; ".join(map(one, rows))


@one_line_errors()
def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/benchmarks.md")
    add_options(parser)
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of repetitions per measurement and turn")
    parser.add_argument(
        "--implementations",
        nargs="+",
        default=(),
        choices=IMPLEMENTATIONS,
        help="measure only these",
    )
    options = parser.parse_args(arguments)
    every = list(cases())
    wanted = selected_cases(parser, options, every)
    if not torch.cuda.is_available():
        raise UnavailableError("bench_attention: needs an NVIDIA GPU, and there is none")
    from triton.testing import do_bench

    torch.manual_seed(0)
    environment = environment_of(options.commit)

    def timer(call: Callable[[], Any]) -> float:
        return do_bench(call, warmup=25, rep=options.rep, return_mode="median")

    def measure_case(case: Case) -> Records:
        return measure_all(case, environment, timer, options.implementations)

    measure_cases(options, every, wanted, environment, measure_case, _shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
