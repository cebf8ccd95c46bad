"""Speed on several GPUs: ``torchrun --nproc-per-node 2 scripts/bench_parallel.py attention --out FILE``.

attention: a row that the GPUs share. Each case also runs on one GPU, on every rank at the same time. The share of the
ideal is that time over the number of ranks times the shared time. Every way is checked against fp32 on the inputs of
the timing; a wrong one gets no rate. Times are medians over rounds of the slowest rank's, between barriers; planning
the row is not part of them, and has a column of its own.

scaling: the same for 64 heads, with rows of 8,192 tokens for each GPU and of 262,144 tokens.

training: runs with sharded weights compared with a peer, rows that the GPUs share, and whole weights compared with GPUs
that train alone. A rate is recorded only if the losses agree.

weak: training with 32,768 tokens a GPU. Start it with 1, 2, 4, … GPUs and the same FILE.

long: one training step over a document of 131,072 tokens a GPU, after one over a short row.

FILE is written after every case, and a second start with the same commit, GPU and versions continues after the last
one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from flash_train.cli.bench import parallel_training
from flash_train.cli.bench.parallel_cases import ParallelCase, compared_cases, long_cases, weak_cases
from flash_train.cli.bench.records import (
    COMPARED_VERSIONS,
    Records,
    add_options,
    environment_of,
    known_records,
    saving,
    selected_cases,
)
from flash_train.cli.config.environment import grow_segments, quieten_lightning
from flash_train.cli.config.errors import ArgumentParser, UnavailableError, one_line_errors
from flash_train.distributed.leave import leave_groups
from flash_train.profiling.attention.shared import QUEUED, measure_shared, scaling_cases, shared_cases

#: the training runs on so many GPUs; the second argument asks for tiny ones
TRAINING: dict[str, Callable[[int, bool], Iterable[ParallelCase]]] = {
    "training": lambda ranks, tiny: compared_cases(tiny),
    "weak": weak_cases,
    "long": long_cases,
}


@one_line_errors()
def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/several_gpus.md#measure-it")
    add_options(parser)
    parser.add_argument("what", choices=("attention", "scaling", *TRAINING), help="what to measure")
    parser.add_argument("--tiny", action="store_true", help="rows of a few hundred tokens on CPUs, to try the script")
    options = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    measure: Callable[..., Records] = measure_shared
    show = shown
    if options.what == "attention":
        every: list[Any] = list(shared_cases(options.tiny))
    elif options.what == "scaling":
        every = list(scaling_cases(ranks, options.tiny))
    else:
        every = list(TRAINING[options.what](ranks, options.tiny))
        measure, show = parallel_training.measure_training, parallel_training.shown
        grow_segments()
        quieten_lightning()
    wanted = selected_cases(parser, options, every)
    if "LOCAL_RANK" not in os.environ:
        raise UnavailableError("bench_parallel: start it with torchrun --nproc-per-node GPUS")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if not options.tiny and local >= torch.cuda.device_count():
        raise UnavailableError(f"bench_parallel: there are {torch.cuda.device_count()} NVIDIA GPUs for rank {local}")
    device = torch.device("cpu") if options.tiny else torch.device("cuda", local)
    if options.tiny:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    try:
        environment = environment_of(options.commit)
        known = [known_records(options.out, environment) if rank == 0 else []]
        dist.broadcast_object_list(known, 0)
        records: Records = known[0]
        names = [case.name for case in every]
        others = [record["case"] for record in records if record["case"] not in names]
        save = saving(options.out if rank == 0 else None, environment, others + names)
        compared = {key: environment[key] for key in COMPARED_VERSIONS}
        done = {record["case"] for record in records}
        start, longest = time.monotonic(), 0.0
        for case in (case for case in wanted if case.name not in done):
            begin = time.monotonic()
            left = [options.time_limit - (begin - start) - longest]
            dist.broadcast_object_list(left, 0)  # all ranks stop at the same case
            if left[0] < 0:
                break
            found = measure(case, dist.group.WORLD, device)
            records += [{**record, **compared} for record in found]
            save(records)
            if rank == 0:
                print(f"{case.name}: {show(found)}", flush=True)
            longest = max(longest, time.monotonic() - begin)
    finally:
        leave_groups()
    return int(any("reason" in record for record in records))


def shown(records: Records) -> str:
    """One line on a case: the milliseconds and shares of each way, forward and forward+backward, alone and queued."""
    parts = []
    for way in dict.fromkeys(record["way"] for record in records):
        own = [record for record in records if record["way"] == way]
        figures = " · ".join(_figures(record) for record in own)
        parts.append(f"{way} {figures}, error {own[0]['error']:.1e}")
    return "; ".join(parts)


def _figures(record: dict[str, Any]) -> str:
    if "ms" not in record:
        return str(record["reason"])
    kinds = [kind for kind in ("", QUEUED) if f"{kind}ms" in record]
    return "/".join(f"{record[f'{kind}ms']:.2f} ms ({record[f'{kind}share']:.3f})" for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
