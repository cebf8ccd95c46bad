"""One of several ranks that watch each other, without Lightning; its main thread waits in no collective, as under NCCL.

python -m tests.support.distributed.watched_ranks STORE RANK RANKS ACTION
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from flash_train.distributed.leave import leave_groups
from flash_train.distributed.watch import RankWatch

TIMEOUT = 3.0


def act(action: str, rank: int, watch: RankWatch, killed: Path) -> None:
    kind, _, where = action.partition(" ")
    chosen = where == "all" or where == str(rank)
    match kind:
        case "kill" if chosen:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop" if chosen:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "error" | "shared" if chosen:
            watch.report_failure(ValueError("a mistake"), on_all_ranks=kind == "shared")
            print(f"reported by {rank}", flush=True)
            time.sleep(0.5)
            print("last words", flush=True)
            sys.exit(5)
        case "error" | "kill":
            time.sleep(600)
        case "hang" if chosen:
            sleep_for_ever()
        case "hang" | "stop":
            dist.barrier()
        case "wait":  # nobody is behind, so nobody hangs
            time.sleep(2 * TIMEOUT)
            watch.leave()
        case "leave":
            time.sleep(float(rank != 0) * rank)
            watch.leave()


def sleep_for_ever() -> None:
    time.sleep(600)


def main() -> None:
    store, action = sys.argv[1], sys.argv[4]
    rank, ranks = map(int, sys.argv[2:4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    watch = RankWatch(
        rank, ranks, "localhost", TIMEOUT, reports_first_rank=rank == 1,
        exit_status=lambda error: 5 if isinstance(error, ValueError) else 1,
    )  # fmt: skip
    watch.before_exit.append(Path(f"{store}.reason{rank}").write_text)
    dist.barrier()
    act(action, rank, watch, Path(f"{store}.killed"))
    leave_groups()


if __name__ == "__main__":
    main()
