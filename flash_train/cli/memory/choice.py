"""Chooses by the predicted memory what a configuration leaves open about weights, moments and activations."""

from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.in_backward import obstacle_to_step_in_backward
from flash_train.cli.memory.check import AUTO, host_memory_of_rank, least_bytes, memory_of_rank
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.prediction import extra_validation_bytes, predict
from flash_train.profiling.memory.results import RELATIVE
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import bytes_in_words


def choose_open_settings(config: DictConfig, step: Step, device: torch.device) -> Step:
    """Return the step with every setting that the configuration leaves open, the cheapest first."""
    step = choose_step_in_backward(config, step, device)
    step = choose_inputs_on_host(config, step, device)
    step = choose_optimizer_formats(config, step, device)
    return choose_kept_blocks(config, step, device)


def choose_step_in_backward(config: DictConfig, step: Step, device: torch.device) -> Step:
    """The step with weights that are updated within the backward, if it does not fit otherwise and nothing prevents it.

    Only for `optimizer.in_backward=null`. Prints what it chose in one line, and sets it in the configuration.
    """
    given, limit = config.optimizer, memory_of_rank(config, device)
    if given.in_backward is not None or limit is None or config.compile or obstacle_to_step_in_backward(config):
        return step
    otherwise = least_bytes(config, step)
    if otherwise <= limit:
        return step
    other = replace(step, in_backward=True)
    needed = least_bytes(config, other)
    if needed >= otherwise:
        return step
    given.in_backward = True
    print_in_backward(otherwise, needed, limit)
    return other


def choose_optimizer_formats(config: DictConfig, step: Step, device: torch.device) -> Step:
    """The step with the most exact optimizer that fits, where `optimizer.master` and `optimizer.moments` are null.

    With bf16 weights that is an exact master, then also 8-bit moments, then stochastic rounding with 8-bit moments. If
    none fits, it stays as it is. Prints what it chose in one line, and sets it in the configuration, so that a run
    that resumes has the same.
    """
    limit = memory_of_rank(config, device)
    given = config.optimizer
    if limit is None or config.compile or not PRECISIONS[step.precision].has_bf16_weights or given.moments is not None:
        return step
    smaller = [replace(step, moments="8bit")]
    if given.master is None:
        smaller.append(replace(step, moments="8bit", master="stochastic"))
    needed = least_bytes(config, step)
    if needed > limit:
        for other in smaller:
            if least_bytes(config, other) <= limit:
                given.master, given.moments = other.master, other.moments
                print_formats(other, needed, limit)
                return other
    return step


def choose_kept_blocks(config: DictConfig, step: Step, device: torch.device) -> Step:
    """The step with the share of blocks that `memory.keep` says; `auto` takes the largest share whose step fits.

    Prints what it chose in one line.

    Raises:
        UsageError: `memory.keep=auto` with a model that is compiled, or on a device whose memory is unknown.
    """
    if config.memory.keep != AUTO or step.memory == "none":
        return step
    limit = known_limit(config, device, "memory.keep")
    kept = most_kept(step, limit)
    print_kept(kept, step.model.n_layers, step.memory)
    return replace(step, keep=kept / step.model.n_layers)


def shortage_for_graph(config: DictConfig, step: Step, device: torch.device) -> str | None:
    """Why a captured micro-batch does not fit the memory together with a validation, with 5 % left; None if it does."""
    limit = memory_of_rank(config, device)
    if limit is None:
        return None
    needed = predict(replace(step, captured=True)).peak_bytes + extra_validation_bytes(step)
    if needed <= (1 - RELATIVE) * limit:
        return None
    return f"it would take up to {bytes_in_words(needed)} of {bytes_in_words(limit)} together with a validation"


def most_kept(step: Step, limit: int) -> int:
    """How many blocks can keep everything in so many bytes; 0 also if the step does not fit with none.

    A margin of 5 % is for fragmentation.
    """
    layers, most = step.model.n_layers, int((1 - RELATIVE) * limit)
    fits, too_many = 0, layers + 1
    while too_many - fits > 1:  # more kept blocks take more memory
        middle = (fits + too_many) // 2
        within = predict(replace(step, keep=middle / layers)).peak_bytes <= most
        fits, too_many = (middle, too_many) if within else (fits, middle)
    return fits


def choose_inputs_on_host(config: DictConfig, step: Step, device: torch.device) -> Step:
    """The step with the share of inputs in the host's memory that `memory.offload` says; `auto` takes the least.

    Prints what it chose in one line.

    Raises:
        UsageError: `memory.offload=auto` with a model that is compiled, or on a device whose memory is unknown; or
            `memory.mode=none`, whose blocks keep more than their inputs.
    """
    if step.memory == "none" and config.memory.offload != 0:
        raise UsageError(
            f"memory.offload={config.memory.offload}: with memory=none blocks keep more than their inputs; allowed: "
            "memory=selective, memory=checkpoint or memory=offload"
        )
    if config.memory.offload != AUTO:
        return step
    limit = known_limit(config, device, "memory.offload")
    most = most_on_host(step, host_memory_of_rank(config.trainer.devices))
    blocks = fewest_on_host(step, limit, most)
    print_inputs(blocks, step, limited=blocks == most < step.model.n_layers - 1)
    return replace(step, offload=blocks / step.model.n_layers)


def fewest_on_host(step: Step, limit: int, most: int) -> int:
    """How few inputs in the host's memory let the step fit in so many bytes, with 5 % left; `most` if it never does."""
    for blocks in range(most):
        if predict(_offloaded(step, blocks)).peak_bytes <= (1 - RELATIVE) * limit:
            return blocks
    return most


def most_on_host(step: Step, share: int) -> int:
    """How many blocks can have their inputs in so many bytes of the host's memory."""
    without = predict(_offloaded(step, 0)).host_bytes
    each = predict(_offloaded(step, 1)).host_bytes - without
    return _offloaded(step, max(0, share - without) // each if each else 0).inputs_on_host


def _offloaded(step: Step, blocks: int) -> Step:
    return replace(step, offload=min(1.0, blocks / step.model.n_layers))


def known_limit(config: DictConfig, device: torch.device, name: str) -> int:
    """The device's memory in bytes.

    Raises:
        UsageError: nothing can be chosen by the predicted memory; names the key that is `auto`.
    """
    limit = memory_of_rank(config, device)
    if config.compile or limit is None:
        why = "compile=true has no predicted memory" if config.compile else f"the memory of {device.type} is unknown"
        raise UsageError(f"{name}=auto: {why}; allowed: a share in [0, 1]")
    return limit


@rank_zero_only
def print_in_backward(otherwise: int, needed: int, limit: int) -> None:
    print(
        f"optimizer: weights are updated within the backward, which takes {bytes_in_words(needed)} of "
        f"{bytes_in_words(limit)}; with all gradients at once it would take {bytes_in_words(otherwise)}",
        flush=True,
    )


@rank_zero_only
def print_formats(step: Step, needed: int, limit: int) -> None:
    print(
        f"optimizer: master={step.master}, moments={step.moments}: with master=exact and moments in bf16 a step takes "
        f"{bytes_in_words(needed)} of {bytes_in_words(limit)}",
        flush=True,
    )


@rank_zero_only
def print_inputs(blocks: int, step: Step, *, limited: bool) -> None:
    size = bytes_in_words(predict(_offloaded(step, blocks)).host_bytes - predict(_offloaded(step, 0)).host_bytes)
    end = "; the host's memory is the limit" if limited else ""
    print(
        f"memory.offload: {blocks} of {step.model.n_layers} blocks have their inputs in the host's memory, {size}{end}",
        flush=True,
    )


@rank_zero_only
def print_kept(kept: int, layers: int, memory: str) -> None:
    others = f", the others what memory={memory} keeps" if kept < layers else ""
    print(f"memory.keep: {kept} of {layers} blocks keep everything{others}", flush=True)
