"""Callbacks for any `Trainer`. Some need another callback before them, and raise ValueError in `setup` without it."""

from flash_train.training.callbacks.checkpoint import AtomicCheckpointIO, StepCheckpoint, newest_checkpoint
from flash_train.training.callbacks.cuda_graph import CudaGraph
from flash_train.training.callbacks.kernel_times import KernelTimes, ProfiledStep
from flash_train.training.callbacks.memory_snapshot import MemorySnapshot, RecordedStep, SnapshotOnError
from flash_train.training.callbacks.missed_validation import CompletingFitLoop, MissedValidation
from flash_train.training.callbacks.nonfinite import NonFiniteLoss, NonFiniteLossError
from flash_train.training.callbacks.progress import RichProgress
from flash_train.training.callbacks.record import RunRecord
from flash_train.training.callbacks.requeue import SlurmRequeue
from flash_train.training.callbacks.sample import ClosingSample
from flash_train.training.callbacks.step_seed import StepSeed
from flash_train.training.callbacks.step_times import StepTimes
from flash_train.training.callbacks.stop import SaveOnSignal, StopAfter
from flash_train.training.callbacks.throughput import Throughput

__all__ = [
    "AtomicCheckpointIO",
    "ClosingSample",
    "CompletingFitLoop",
    "CudaGraph",
    "KernelTimes",
    "MemorySnapshot",
    "MissedValidation",
    "NonFiniteLoss",
    "NonFiniteLossError",
    "ProfiledStep",
    "RecordedStep",
    "RichProgress",
    "RunRecord",
    "SaveOnSignal",
    "SlurmRequeue",
    "SnapshotOnError",
    "StepCheckpoint",
    "StepSeed",
    "StepTimes",
    "StopAfter",
    "Throughput",
    "newest_checkpoint",
]
