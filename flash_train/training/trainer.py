"""`build_trainer`: a `Trainer` with all callbacks. The module and the callbacks also work in any other `Trainer`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from flash_train.checks import as_integer, check_name
from flash_train.precision import PRECISIONS
from flash_train.training.callbacks import (
    AtomicCheckpointIO,
    ClosingSample,
    CompletingFitLoop,
    CudaGraph,
    MissedValidation,
    NonFiniteLoss,
    RichProgress,
    RunRecord,
    SaveOnSignal,
    SlurmRequeue,
    StepCheckpoint,
    StepSeed,
    StepTimes,
    StopAfter,
    Throughput,
)


class SingleDeviceNoTeardown(SingleDeviceStrategy):
    """A single device that keeps the model and the optimizer when the run ends.

    Lightning's strategy copies both to host memory in `teardown`, up to 16 bytes per parameter.
    """

    def teardown(self) -> None:
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


#: options of `Trainer` that `build_trainer` sets, and its own argument for each
SET_BY_OTHERS = {
    "accumulate_grad_batches": "accumulate",
    "check_val_every_n_epoch": "val_every",
    "default_root_dir": "run_dir",
    "enable_checkpointing": "checkpoints",
    "enable_model_summary": "nothing: there is none",
    "enable_progress_bar": "progress",
    "log_every_n_steps": "log_every",
    "max_epochs": "max_steps",
    "num_sanity_val_steps": "nothing: there are none",
    "plugins": "nothing: checkpoints are written by AtomicCheckpointIO",
    "use_distributed_sampler": "nothing: the data module deals the rows",
    "val_check_interval": "val_every",
}


def build_trainer(
    *,
    run_dir: str | Path,
    max_steps: int,
    seed: int = 0,
    accumulate: int = 1,
    precision: str = "fp32",
    accelerator: str = "auto",
    devices: int | list[int] | str = 1,
    strategy: str | Strategy = "auto",
    log_every: int = 10,
    val_every: int | None = None,
    limit_val_batches: float | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int | None = 2,
    async_checkpoints: bool = False,
    checkpoints: bool = True,
    stop_after: int | None = None,
    deterministic: bool = False,
    inference_mode: bool = True,
    progress: bool = True,
    step_times: bool = False,
    cuda_graph: bool | str = "auto",
    generate: Any | None = None,
    summary: dict[str, Any] | None = None,
    logger: Logger | Iterable[Logger] | None = None,
    callbacks: Iterable[Callback] = (),
    **trainer_options: Any,
) -> Trainer:
    """Assemble the `Trainer` of a run.

    Args:
        run_dir: folder for metrics.csv, summary.json, plots, and checkpoints/; it is made when the run begins.
        accelerator, devices, strategy: as in Lightning's `Trainer`.
        max_steps: optimizer steps of the whole schedule; `stop_after` ends this run earlier with the same schedule.
        seed: for all random numbers during training (see `StepSeed`).
        accumulate: micro-batches per optimizer step.
        precision: fp32, bf16-mixed, bf16-true, fp16-mixed (CUDA only), or fp8, which is bf16-true for the `Trainer`
            (see `flash_train.model.fp8.to_fp8`).
        log_every, val_every, checkpoint_every: optimizer steps. `val_every=None` validates at the end only, and
            `limit_val_batches=0` never; `checkpoint_every=None` saves at the end only.
        keep_checkpoints: how many checkpoints to keep, the newest; None keeps all.
        async_checkpoints: write checkpoints while training continues (see `StepCheckpoint`).
        checkpoints: False saves none.
        deterministic: raise where PyTorch has no deterministic implementation.
        progress: show a progress bar, and at the end a summary.
        inference_mode: give False if validation shares compiled code with training.
        step_times: measure forward, backward, optimizer and attention separately (see `StepTimes`).
        cuda_graph: `auto`, True or False: replay the launches of a micro-batch (see `CudaGraph`).
        generate: takes the trained module and returns a text, printed at the end of the run.
        summary: more entries for summary.json.
        logger: None, or one or several Lightning loggers.
        callbacks: additional callbacks.
        trainer_options: any other argument of `Trainer`.

    Raises:
        TypeError: an option of `Trainer` that this function sets itself.
        ValueError: an argument is out of range, or the device cannot train in this precision.
    """
    if given := sorted(SET_BY_OTHERS.keys() & trainer_options.keys()):
        others = ", ".join(f"{name} (give {SET_BY_OTHERS[name]})" for name in given)
        raise TypeError(f"build_trainer sets these options of Trainer itself: {others}")
    check_name("precision", precision, PRECISIONS)
    max_steps = as_integer("max_steps", max_steps, 1)
    accumulate = as_integer("accumulate", accumulate, 1)
    log_every = as_integer("log_every", log_every, 1)
    on_cuda = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    if precision == "fp16-mixed" and not on_cuda:
        raise ValueError("precision=fp16-mixed: must be fp32, bf16-mixed or bf16-true without an NVIDIA GPU")

    standard: list[Callback] = [StepSeed(seed), NonFiniteLoss(), *([StepTimes()] if step_times else []), Throughput()]
    standard += [
        CudaGraph(cuda_graph),
        StopAfter(stop_after),
        SaveOnSignal(),
        SlurmRequeue(),
        RunRecord(run_dir, summary),
    ]
    if progress:
        standard.append(RichProgress())
    standard += [*callbacks, ClosingSample(generate)] if progress else [*callbacks]
    standard.append(MissedValidation())
    if checkpoints:
        standard.append(
            StepCheckpoint(
                Path(run_dir) / "checkpoints",
                every=checkpoint_every,
                keep=keep_checkpoints,
                asynchronous=async_checkpoints,
            )
        )
    trainer = Trainer(
        default_root_dir=str(run_dir),
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=PRECISIONS[precision].lightning,  # type: ignore[arg-type]
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=log_every,
        # In micro-batches. With an interval beyond the end, only the stop at max_steps validates.
        val_check_interval=val_every * accumulate if val_every else max_steps * accumulate + 1,
        check_val_every_n_epoch=None,
        limit_val_batches=limit_val_batches,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=inference_mode,
        deterministic=deterministic,
        logger=logger or False,
        callbacks=standard,
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=progress,
        enable_checkpointing=checkpoints,
        enable_model_summary=False,
        **trainer_options,
    )
    loop = CompletingFitLoop(trainer, max_epochs=-1)
    loop.epoch_loop = trainer.fit_loop.epoch_loop
    trainer.fit_loop = loop
    return trainer
