"""`parallel.check=true`: before training, one step on all devices is compared with the same step on one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from flash_train.cli.components.trainer import strategy_of
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.parallel import ParallelPlan
from flash_train.cli.memory.check import memory_of_rank
from flash_train.cli.run.build import Run
from flash_train.data.dataset import IGNORE_INDEX, Batch, as_row, collate
from flash_train.distributed.dims import ParallelDims
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import free_memory
from flash_train.training import StepSeed
from flash_train.training.step_check import Agreement, CheckedStep, compare, take_step, take_step_alone

ROWS = 4  # data ranks from the fifth on get rows without labels, which one device need not compute
SHORTEST = 4096  # tokens; layers are left out before the row gets shorter than this
USABLE = 0.9  # share of a device's memory that the check may use


@dataclass(frozen=True)
class CheckSize:
    """The size of the step to compare: tokens of a row, and layers of the model."""

    seq_len: int
    layers: int


def check_parallel(config: DictConfig, step: Step, run: Run) -> None:
    """Take one step on all devices and on one device, print how far they differ, and end the run if they disagree.

    The weights are drawn from the run's seed. The rows are the run's first, unless the step does not fit on one device:
    then they are shorter, or only the first layers are computed.

    Args:
        step: the settings of the run's step.

    Raises:
        UsageError: the steps disagree.
    """
    plan = run.plan
    size = largest_size(step, plan, memory_of_rank(config, run.device))
    checked = CheckedStep(
        model=replace(step.model, n_layers=size.layers),
        batches=rows_of(run, plan, size),
        precision=config.precision,
        attention=run.attention[0],
        memory=config.memory.mode,
        seed=config.seed,
        context=plan.dims.context,
    )
    trainer = one_step_trainer(config, plan)
    shards = isinstance(trainer.strategy, ShardedStrategy)
    with trainer.init_module(empty_init=shards or None):
        module = checked.module()
    if not shards:
        checked.draw_weights(module.model)
    together = take_step(checked, module, trainer)
    is_first, device = trainer.is_global_zero, trainer.strategy.root_device
    del module, trainer
    free_memory()
    found: list[Any] = [None]
    if is_first:
        exact = take_step_alone(checked, device, exact=True)
        free_memory()
        alone = exact if config.precision == "fp32" else take_step_alone(checked, device, exact=False)
        free_memory()
        found = [compare(together, alone, exact, config.precision)]
        print(describe(found[0], plan, size, step), flush=True)
    dist.broadcast_object_list(found, 0)
    agreement: Agreement = found[0]
    if not agreement.holds:
        raise UsageError(
            f"parallel.check=true: the step on {plan.dims.ranks} devices is not the step on one: {agreement.worst} has "
            f"{agreement.error:.3g} times one device's own error; please report it with config.yaml"
        )


def describe(found: Agreement, plan: ParallelPlan, size: CheckSize, step: Step) -> str:
    """One line on what was compared, and how far it differs."""
    part = "all" if size.layers == step.model.n_layers else f"the first {size.layers}"
    dropout = ", the same dropout masks" if found.holds and step.model.attention_dropout else ""
    return (
        f"parallel.check: a step of {plan.dims.ranks} devices and of one, rows of {size.seq_len:,} tokens, {part} "
        f"layers: loss {found.losses[0]:.6f} and {found.losses[1]:.6f}, largest error {found.error:.2f} of one "
        f"device's own ({found.worst}){dropout}"
    )


def largest_size(step: Step, plan: ParallelPlan, limit: int | None) -> CheckSize:
    """The largest step that fits on one device, in fp32: the run's, or shorter rows, or fewer layers."""
    for size in sizes(step, plan.dims.context):
        whole = replace(
            step,
            model=replace(step.model, n_layers=size.layers),
            seq_len=size.seq_len,
            accumulate=2,  # gradients are added up over rows
            precision="fp32",
            lengths=None,
            dims=ParallelDims(1, 1, 1),
        )
        # the prediction has AdamW's two moments, and the check has none
        moments = 2 * PRECISIONS["fp32"].weight_bytes * whole.model.num_parameters
        if limit is None or predict(whole).peak_bytes - moments <= USABLE * limit:
            return size
    return size


def sizes(step: Step, context: int) -> Iterator[CheckSize]:
    """All sizes, largest first; the devices that share a row divide its tokens."""
    seq_len, layers = step.seq_len, step.model.n_layers
    yield CheckSize(seq_len, layers)
    while seq_len // 2 >= SHORTEST and seq_len // 2 * step.batch_size % context == 0:
        seq_len //= 2
        yield CheckSize(seq_len, layers)
    while layers > 1:
        layers //= 2
        yield CheckSize(seq_len, layers)


def rows_of(run: Run, plan: ParallelPlan, size: CheckSize) -> list[Batch]:
    """The first rows of the run, a batch for each data rank, cut to the size; further ranks' have no labels."""
    batches = []
    for rank in range(plan.dims.data_ranks):
        batch = run.data.rows_at(rank % ROWS * plan.batch_size, plan.batch_size)
        if batch["tokens"].shape[1] > size.seq_len:
            batch = shorten(batch, size.seq_len)
        if rank >= ROWS:
            batch["labels"].fill_(IGNORE_INDEX)
        batches.append(batch)
    return batches


def shorten(batch: Batch, seq_len: int) -> Batch:
    """The first tokens of each row. The first document has half of them, so that all devices of a row share it."""
    rows = []
    for number, place in enumerate(batch["places"]):
        lengths = [seq_len // 2]
        for length in batch["lengths"]:
            if sum(lengths) < seq_len:
                lengths.append(min(length, seq_len - sum(lengths)))
        if sum(lengths) < seq_len:
            lengths.append(seq_len - sum(lengths))
        tokens, labels = (batch[name][number, :seq_len].numpy().copy() for name in ("tokens", "labels"))
        capacity = (len(batch["cu_seqlens"]) - 1) // len(batch["places"]) + 2
        rows.append({**as_row(tokens, labels, lengths, capacity), "place": place})
    return collate(rows)


def one_step_trainer(config: DictConfig, plan: ParallelPlan) -> Trainer:
    """A Trainer of the run's devices and precision that takes one step and writes nothing."""
    return Trainer(
        default_root_dir=str(Path(config.run_dir)),
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy_of(config, plan),
        precision=PRECISIONS[config.precision].lightning,  # type: ignore[arg-type]
        max_steps=1,
        max_epochs=-1,
        callbacks=[StepSeed(config.seed)],
        deterministic=config.trainer.deterministic,
        use_distributed_sampler=False,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
