"""Training with PyTorch Lightning: a module, its optimizer, callbacks, and a `Trainer` with all of them.

    module = CausalLMModule(ModelConfig(...), OptimizerConfig(lr=3e-4))
    trainer = build_trainer(run_dir="runs/first", max_steps=200)
    trainer.fit(module, datamodule=PackedDataModule(...))

The parts work in any `Trainer`: `Trainer(max_steps=200, callbacks=[StepSeed(0), Throughput(), RunRecord("runs/a")])`.
"""

from flash_train.training.callbacks import (
    AtomicCheckpointIO,
    ClosingSample,
    CudaGraph,
    MissedValidation,
    NonFiniteLoss,
    NonFiniteLossError,
    RichProgress,
    RunRecord,
    SaveOnSignal,
    SlurmRequeue,
    StepCheckpoint,
    StepSeed,
    StepTimes,
    StopAfter,
    Throughput,
    newest_checkpoint,
)
from flash_train.training.module import CausalLMModule
from flash_train.training.optimizer import OptimizerConfig
from flash_train.training.step_result import StepResult
from flash_train.training.trainer import SingleDeviceNoTeardown, build_trainer

StayingStrategy = SingleDeviceNoTeardown  # the older name, of 0.1

__all__ = [
    "AtomicCheckpointIO",
    "CausalLMModule",
    "ClosingSample",
    "CudaGraph",
    "MissedValidation",
    "NonFiniteLoss",
    "NonFiniteLossError",
    "OptimizerConfig",
    "RichProgress",
    "RunRecord",
    "SaveOnSignal",
    "SingleDeviceNoTeardown",
    "SlurmRequeue",
    "StayingStrategy",
    "StepCheckpoint",
    "StepResult",
    "StepSeed",
    "StepTimes",
    "StopAfter",
    "Throughput",
    "build_trainer",
    "newest_checkpoint",
]
