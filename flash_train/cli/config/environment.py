"""The process's environment: variables that libraries read when they are imported, and what launchers set."""

import logging
import os
import platform
import sys
import warnings
from collections.abc import Mapping, MutableMapping

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch reads both; the second is older
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
WANDB_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME")  # they name one W&B run, so several runs cannot share them


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process writes the run's files: every launcher's rank variable is 0 or not set."""
    return all(environ.get(name, "0") == "0" for name in RANK_VARIABLES)


def prepare_environment() -> None:
    """Set everything that must be set before PyTorch and matplotlib are imported."""
    grow_segments()
    quieten_profiler()
    quieten_matplotlib()


def grow_segments(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the CUDA allocator's segments grow, unless the environment configures the allocator already.

    Segments of fixed size leave gaps that the tensors of a long row do not fit into: a step of 456,640 tokens ran out
    of 139 GiB while 32 GiB were reserved and idle. Segments can grow on Linux only, and not under Windows' subsystem
    for Linux (pytorch/pytorch#192330).
    """
    windows = "microsoft" in platform.release().lower()
    if sys.platform == "linux" and not windows and not any(name in environ for name in ALLOCATOR_VARIABLES):
        environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def quieten_matplotlib() -> None:
    """Hide matplotlib's note on its cache folder, which it prints if the home folder is missing or read-only."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def quieten_profiler(environ: MutableMapping[str, str] = os.environ) -> None:
    """Hide the notes of PyTorch's profiler, which records a step's memory on a CPU."""
    environ.setdefault("KINETO_LOG_LEVEL", "99")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def quieten_lightning() -> None:
    """Hide Lightning's notes on the machine and its tips; its warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning's own code causes this warning under newer versions of PyTorch.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    # `logger=none` is a choice, and `validate_only` never has a logger: its numbers are in validation.json.
    warnings.filterwarnings("ignore", message=r"You called `self.log\(.*no logger configured")
