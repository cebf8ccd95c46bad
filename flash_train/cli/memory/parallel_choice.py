"""Chooses by the predicted memory the plan of several devices, if a configuration leaves it open."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from flash_train.attention.parallel import can_divide_heads
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.parallel import ParallelPlan, parallel_plan
from flash_train.cli.memory.check import check_memory, memory_of_rank, step_before_run
from flash_train.cli.memory.choice import choose_open_settings
from flash_train.distributed.dims import ParallelDims
from flash_train.output import counted
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import bytes_in_words


def plan_run(config: DictConfig) -> tuple[Step, ParallelPlan, torch.device]:
    """Choose what a run's configuration leaves open, print it, and check that a step fits.

    Returns:
        The settings that decide the memory of a step, as chosen; the plan of the devices; the device.

    Raises:
        UsageError: one line that names the key at fault, or settings that would fit.
    """
    step, device = step_before_run(config)
    plan = choose_plan(config, step, device)
    step = choose_open_settings(config, of_plan(step, plan), device)
    check_memory(config, step, device, other_plans(config, step, plan))
    return step, plan, device


def of_plan(step: Step, plan: ParallelPlan) -> Step:
    """The same step with the devices divided by a plan."""
    return replace(step, dims=plan.dims, accumulate=plan.accumulate)


def choose_plan(config: DictConfig, step: Step, device: torch.device) -> ParallelPlan:
    """The plan of a run. `parallel=auto` takes the simplest one whose predicted step fits; if none does, the last one.

    Prints the plan and the reason in one line.

    Raises:
        UsageError: so many devices cannot share a row.
    """
    plan = parallel_plan(config)
    if plan.dims.ranks == 1:
        return plan
    if (obstacle := obstacle_to_sharing(step, plan.dims.context)) is not None:
        raise UsageError(f"parallel.context={plan.dims.context}: {obstacle}")
    reason = ""
    limit = memory_of_rank(config, device)
    if plan.is_open and limit is not None:
        too_large = []
        for plan in possible_plans(config, step):
            peak = predict(of_plan(step, plan)).peak_bytes
            if peak <= limit:
                break
            too_large.append(f"{describe_division(plan)} {bytes_in_words(peak)}")
        reason = f": a step takes {bytes_in_words(peak)} of {bytes_in_words(limit)} on each device"
        earlier = [text for text in too_large if not text.startswith(f"{describe_division(plan)} ")]
        reason += f"; too much: {', '.join(earlier)}" if earlier else ""
    print_plan(plan, reason)
    return replace(plan, is_open=False)


def possible_plans(config: DictConfig, step: Step) -> Iterator[ParallelPlan]:
    """The plans for a run's devices, the simplest first: whole weights, sharded weights, then shared rows too.

    A row is shared by 2, 4, … up to all devices, where row lengths and heads allow it, or by `parallel.context` devices
    if that is given. With fp16-mixed, weights are always whole. Every plan has the same rows in an optimizer step.
    """
    given = parallel_plan(config)
    ranks, shards = given.dims.ranks, config.precision != "fp16-mixed"  # scaling of the loss needs whole weights
    contexts = [config.parallel.context or 1]
    while config.parallel.context is None and ranks % (2 * contexts[-1]) == 0:
        contexts.append(2 * contexts[-1])
    whole = [ParallelDims(ranks, 1, context) for context in (contexts[:1] if shards else contexts)]
    for dims in [*whole, *(ParallelDims(1, ranks, context) for context in contexts if shards)]:
        accumulate, rest = divmod(given.accumulate * dims.context, given.dims.context)
        if rest == 0 and obstacle_to_sharing(step, dims.context) is None:
            yield replace(given, dims=dims, accumulate=accumulate, is_open=False)


def obstacle_to_sharing(step: Step, context: int) -> str | None:
    """Why this many devices cannot share a row, and what is allowed instead; None if they can."""
    heads, kv_heads = step.model.n_heads, step.model.n_kv_heads
    if step.row_tokens % context:
        return f"must divide the tokens of a batch, seq_len={step.seq_len} x batch_size={step.batch_size}"
    if context > 1 and step.attention == "sdpa" and step.model.attention_dropout > 0:
        return "attention=sdpa draws another dropout mask on each device; allowed: attention=flash, standard or chunked"
    if step.method == "ulysses" and not can_divide_heads(heads, kv_heads, context):
        return (
            f"with parallel.method=ulysses it must divide model.n_heads={heads}, and divide model.n_kv_heads="
            f"{kv_heads} or be a multiple of it; allowed: parallel.method=gather"
        )
    return None


def other_plans(config: DictConfig, step: Step, plan: ParallelPlan) -> Iterator[tuple[str, Step]]:
    """The other plans for a run's devices, each with its setting."""
    if plan.dims.ranks == 1:
        return
    for other in possible_plans(config, step):
        if other.dims != plan.dims:
            yield setting_of(config, other), of_plan(step, other)


def setting_of(config: DictConfig, plan: ParallelPlan) -> str:
    """The overrides that choose a plan instead of the configuration's."""
    dims, given = plan.dims, config.parallel
    shares_by_default = dims.shard > 1 and dims.context == dims.ranks
    mode = "ddp" if dims.shard == 1 else "context" if dims.context > 1 else "fsdp"
    setting = f"parallel={mode}"
    if given.context is not None or (dims.context > 1 and not shares_by_default):
        setting += f" parallel.context={dims.context}"
    if given.shard is not None or given.replicate is not None:
        setting += f" parallel.shard={dims.shard} parallel.replicate={dims.replicate}"
    if config.global_batch is None and plan.accumulate != parallel_plan(config).accumulate:
        setting += f" accumulate={plan.accumulate}"
    return setting


@rank_zero_only
def print_plan(plan: ParallelPlan, reason: str) -> None:
    print(f"parallel: {plan.dims.ranks} devices, {describe_plan(plan)}{reason}", flush=True)


def describe_plan(plan: ParallelPlan) -> str:
    dims = plan.dims
    copies = f", {dims.replicate} copies" if dims.shard > 1 and dims.replicate > 1 else ""
    rows = f"{dims.context} share a row" if dims.context > 1 else "a row each"
    return f"{describe_weights(plan)}{copies}, {rows}, {counted(plan.global_batch, 'row')} a step"


def describe_weights(plan: ParallelPlan) -> str:
    return f"weights sharded over {plan.dims.shard}" if plan.dims.shard > 1 else "whole weights on each"


def describe_division(plan: ParallelPlan) -> str:
    """What differs between the plans that `parallel=auto` compares."""
    weights = "sharded weights" if plan.dims.shard > 1 else "whole weights"
    return f"{weights}, {plan.dims.context} share a row:" if plan.dims.context > 1 else f"{weights}:"
