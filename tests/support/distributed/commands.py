"""`flash-train` on several ranks of this machine, each with a tiny model on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from flash_train.training.callbacks.checkpoint import read_checkpoint
from tests.support.cli.runs import ROOT, TINY_MODEL

PROGRAM = "tests.support.distributed.failing_run"


def write_corpus(folder: Path) -> Path:
    """Write forty documents of uneven length."""
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox " * (i + 1), encoding="utf-8")
    return folder


def overrides(corpus: Path, run_dir: Path, *more: str) -> list[str]:
    """Return the arguments of a run of eight steps, each with four rows, that saves every second one."""
    return [
        *("data=text", f"data.path={corpus}", f"data.cache_dir={corpus}_cache", "data.val_batches=1"),
        *("seq_len=64", "batch_size=1", "global_batch=4", "max_steps=8", "log_every=1", "hardware=cpu"),
        *("logger=none", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=null", "trainer.progress_bar=false"),
        *("callbacks.sample.tokens=0", f"run_dir={run_dir}", *TINY_MODEL, *more),
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(arguments: list[str], *, fault: str = "0 0 none", torchrun: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a run. With arguments of `torchrun`, that starts the ranks, otherwise Lightning."""
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *launcher, "-m", PROGRAM, *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    """Wait until all processes of a run have ended: its exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=timeout)  # the ranks share the pipes, so it waits for all of them
    finally:
        process.kill()
    return process.returncode, out, err


def train(arguments: list[str]) -> None:
    """Run `flash-train`, which must succeed."""
    code, _, err = finish(start(arguments), timeout=180)
    assert code == 0, err[-3000:]


def weights_of(run_dir: Path, step: int) -> dict[str, list[float]]:
    state = read_checkpoint(run_dir / "checkpoints" / f"step-{step:06}.ckpt")["state_dict"]
    return {name: value.flatten().tolist() for name, value in state.items()}
