"""`flash-train` on several ranks of this machine, each with a tiny model, on the CPU or a GPU."""

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from flash_train.training.callbacks.checkpoint import read_checkpoint
from tests.support.cli.runs import TINY_MODEL
from tests.support.processes import Process, run_ranks

PROGRAM = "tests.support.distributed.failing_run"
ALLOWED = 60.0  # seconds in which all ranks end after one has failed


class StartedRun(Process):
    """A run on several ranks; `fault` is a file that a rank touches when it fails."""

    fault: Path


def write_corpus(folder: Path) -> Path:
    """Write forty documents of uneven length."""
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox " * (i + 1), encoding="utf-8")
    return folder


def overrides(corpus: Path, run_dir: Path, *more: str, hardware: str = "cpu") -> list[str]:
    """Return the arguments of a run of eight steps, each with four rows, that saves every second one."""
    return [
        *("data=text", f"data.path={corpus}", f"data.cache_dir={corpus}_cache", "data.val_batches=1"),
        *("seq_len=64", "batch_size=1", "global_batch=4", "max_steps=8", "log_every=1", f"hardware={hardware}"),
        *("logger=none", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=null", "trainer.progress_bar=false"),
        *("callbacks.sample.tokens=0", f"run_dir={run_dir}", *TINY_MODEL, *more),
    ]


def start(
    arguments: list[str],
    *,
    fault: str = "0 0 none",
    torchrun: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> StartedRun:
    """Start a run. With arguments of `torchrun`, that starts the ranks, otherwise Lightning, or SLURM's environment."""
    at = Path(tempfile.mkdtemp()) / "fault"
    module = ["torch.distributed.run", *torchrun, "-m", PROGRAM] if torchrun else [PROGRAM]
    faults = {"FAULT": fault, "FAULT_TIME": str(at)}
    run = StartedRun(*module, *arguments, environment={**faults, **(environment or {})})
    run.fault = at
    return run


def finish(run: StartedRun) -> tuple[int, str, str]:
    """Wait until all processes of a run have ended: its exit code, standard output and standard error.

    All of them must have ended soon after one has failed.
    """
    try:
        out, err = run.communicate()
        ended = time.time()
    finally:
        run.kill()
    assert run.returncode is not None
    if run.fault.exists():
        assert ended - run.fault.stat().st_mtime < ALLOWED, f"the ranks ended late\n{err}"
    shutil.rmtree(run.fault.parent)
    return run.returncode, out, err


def train(arguments: list[str], ranks: int) -> None:
    """Run `flash-train` on several ranks, which must all succeed."""
    run_ranks("flash_train.cli.train", ranks, *arguments)


def weights_of(run_dir: Path, step: int) -> dict[str, list[float]]:
    state = read_checkpoint(run_dir / "checkpoints" / f"step-{step:06}.ckpt")["state_dict"]
    return {name: value.flatten().tolist() for name, value in state.items()}
