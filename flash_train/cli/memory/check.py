"""Predicts the memory of a configuration before it runs, and refuses one that cannot fit."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from flash_train.attention.backends import flash_unavailable
from flash_train.attention.kernels.families import PORTABLE, fastest_on, is_own
from flash_train.cli.components.model_config import device_of, model_and_backend
from flash_train.cli.components.tokenizer import build_tokenizer
from flash_train.cli.config.errors import OutOfMemoryError
from flash_train.cli.config.parallel import parallel_plan
from flash_train.model import ModelConfig
from flash_train.model.recompute import MEMORY_MODES
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.prediction import Prediction, predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import bytes_in_words

#: bytes that cuBLAS keeps per thread on a device of compute capability 9.0 or later, and on others: the defaults of
#: `CUBLAS_WORKSPACE_CONFIG`.
#: Two threads multiply matrices: the one that runs the forward, and autograd's.
WORKSPACES = (32 * 2**20, 8 * 2**20 + 128 * 2**10)
THREADS = 2
#: attentions whose memory depends on the lengths of a row's documents; predicted is the worst case, a single document
BY_DOCUMENT = ("standard", "chunked")
#: bytes that PyTorch's allocator cannot have on each of several GPUs: an allowance for CUDA's context and NCCL
OUTSIDE = 2 * 2**30
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # Linux's memory limit for this process's group: bytes, or "max"
FREE_ON_HOST = 0.1  # the share of the host's memory that stays free
AUTO = "auto"  # `memory.keep`: as large as the memory allows; `memory.offload`: as small
SHORTEST = 256  # tokens; shorter rows are not worth proposing


def step_before_run(config: DictConfig) -> tuple[Step, torch.device]:
    """The settings that decide the memory of a step, and the device, without reading data or weights.

    Raises:
        UnavailableError: the attention backend does not run here.
    """
    device = device_of(config.trainer.accelerator)
    model_and_backend(config, 1, device)  # finds a wrong shape or backend before a tokenizer is read
    model, backend = model_and_backend(config, build_tokenizer(config).vocab_size, device)
    return step_of(config, model, backend, device), device


def step_of(config: DictConfig, model: ModelConfig, attention: str, device: torch.device) -> Step:
    """The settings that decide the memory of a step, with one document per row: the most that attention can need.

    What `parallel=auto`, `memory.keep=auto` and `memory.offload=auto` choose is still open: whole weights, and no block
    keeps everything or has its input in the host's memory.
    """
    plan = parallel_plan(config)
    return Step(
        model,
        config.seq_len,
        batch_size=config.batch_size,
        accumulate=plan.accumulate,
        precision=config.precision,
        memory=config.memory.mode,
        keep=0.0 if config.memory.keep == AUTO else config.memory.keep,
        offload=0.0 if config.memory.offload == AUTO else config.memory.offload,
        attention=attention,
        fused=device.type == "cuda",
        family=(PORTABLE if config.trainer.deterministic else fastest_on(device)).name,
        whole_rows=config.data.packing == "concat",
        workspace=workspace_of(device),
        captured=config.trainer.cuda_graph is True and device.type == "cuda",  # of `auto`, `build` decides
        master=config.optimizer.master or "exact",
        moments=config.optimizer.moments,
        offload_optimizer=config.optimizer.offload and device.type == "cuda",
        in_backward=bool(config.optimizer.in_backward),
        dims=plan.dims,
        local_ranks=config.trainer.devices,
        method=config.parallel.method,
    )


def workspace_of(device: torch.device) -> int:
    """Bytes that matrix products keep on the device."""
    if device.type != "cuda":
        return 0
    return THREADS * WORKSPACES[0 if torch.cuda.get_device_capability(device) >= (9, 0) else 1]


def check_memory(config: DictConfig, step: Step, device: torch.device, others: Iterable[tuple[str, Step]] = ()) -> None:
    """Print the predicted memory of a step, and refuse a step that cannot fit, unless `force=true`.

    There is no prediction for a compiled model. If the memory depends on the documents, the prediction is an upper
    limit; a step is refused only if it cannot fit with the documents that take the least.

    Args:
        others: other plans for the devices, each with its setting, the simplest first.

    Raises:
        OutOfMemoryError: the step cannot fit. Names the predicted and the available memory, and settings that fit.
    """
    if config.compile:
        return
    prediction = predict(step)
    limit = memory_of_rank(config, device)
    print_prediction(prediction, limit, documents_decide(config, step), step.dims.ranks)
    check_host_memory(config, prediction)
    if limit is None or config.force or least_bytes(config, step) <= limit:
        return
    on_each = " on each device" if step.dims.ranks > 1 else ""
    cheapest = advice(step, limit, flash_runs(step, device), others)
    if config.get("global_batch") is not None:  # `accumulate` follows from it
        cheapest = re.sub(r" accumulate=\d+", "", cheapest)
    raise OutOfMemoryError(
        f"seq_len={step.seq_len} batch_size={step.batch_size} memory={step.memory}: a step would take "
        f"{bytes_in_words(prediction.peak_bytes)}{on_each} and there are {bytes_in_words(limit)}; "
        f"{cheapest}, or force=true to try anyway"
    )


def check_host_memory(config: DictConfig, prediction: Prediction) -> None:
    """Refuse a step whose processes need more of the host's memory than there is, unless `force=true`.

    Raises:
        OutOfMemoryError: names the predicted memory of a process, and its share of the memory.
    """
    share = host_memory_of_rank(config.trainer.devices)
    if prediction.host_bytes > share and not config.force:
        raise OutOfMemoryError(
            f"optimizer.offload={str(config.optimizer.offload).lower()} memory.offload={config.memory.offload}: each "
            f"process would take {bytes_in_words(prediction.host_bytes)} of the host's memory, and its share is "
            f"{bytes_in_words(share)}; allowed: less of either, or force=true to try anyway"
        )


def host_memory_of_rank(processes: int) -> int:
    """Bytes of the host's memory that each of its processes may pin: a tenth stays free."""
    return int((1 - FREE_ON_HOST) * total_memory_of(torch.device("cpu"))) // processes


def least_bytes(config: DictConfig, step: Step) -> int:
    """The predicted peak with documents that take the least memory; 0 if that is not predicted."""
    if not documents_decide(config, step):
        return predict(step).peak_bytes
    if step.attention in BY_DOCUMENT or step.holds_score_matrices:
        return 0
    whole = (step.tokens,) * step.dims.context  # each device has one document, so that nothing is exchanged
    return predict(replace(step, lengths=whole)).peak_bytes


def documents_decide(config: DictConfig, step: Step) -> bool:
    """Whether the memory of a step depends on the lengths of its documents, which are not known beforehand."""
    exchanges_keys = step.dims.context > 1 and step.method != "ulysses"
    by_document = step.attention in BY_DOCUMENT or step.holds_score_matrices or exchanges_keys
    return config.data.packing != "concat" and by_document


def free_memory_of(device: torch.device) -> int | None:
    """Bytes available to a run: the free memory of a CUDA device, the whole memory of a CPU's machine, else None."""
    if device.type == "cpu":
        return total_memory_of(device)
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def memory_of_rank(config: DictConfig, device: torch.device) -> int | None:
    """Bytes available to a rank of a run, None if unknown; on several devices the same for all ranks."""
    local_ranks = config.trainer.devices
    ranks = local_ranks * config.trainer.num_nodes
    return free_memory_of(device) if ranks == 1 else total_memory_of_rank(device, ranks, local_ranks)


def total_memory_of_rank(device: torch.device, ranks: int, local_ranks: int) -> int:
    """Bytes that each of so many ranks has, if nothing else runs; `local_ranks` are on one machine."""
    if ranks == 1:
        return total_memory_of(device)
    return total_memory_of(device) - OUTSIDE if device.type == "cuda" else total_memory_of(device) // local_ranks


@rank_zero_only
def print_prediction(prediction: Prediction, limit: int | None, at_most: bool, ranks: int = 1) -> None:
    """Print the predicted peak and its largest parts in one line."""
    parts = sorted(((size, kind) for kind, size in prediction.peak.parts.items() if size), reverse=True)
    largest = ", ".join(f"{kind} {bytes_in_words(size)}" for size, kind in parts[:4])
    there = "" if limit is None else f"; there are {bytes_in_words(limit)}"
    most = "at most about " if at_most else ""
    peak = bytes_in_words(prediction.peak_bytes)
    where = " on each device" if ranks > 1 else ""
    host = f"; {bytes_in_words(prediction.host_bytes)} in the host's memory" if prediction.host_bytes else ""
    print(
        f"memory: {most}{peak} of tensors predicted at the peak of a step{where} ({largest}){there}{host}", flush=True
    )


def total_memory_of(device: torch.device) -> int:
    """Bytes of the device, or for a CPU of the machine or container. Creates no CUDA context, as that takes memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = CONTAINER.read_text().strip() if CONTAINER.is_file() else "max"
    return machine if container == "max" else min(machine, int(container))


def flash_runs(step: Step, device: torch.device | None) -> bool:
    """Whether this project's kernels could run the step's attention."""
    dtype = PRECISIONS[step.precision].compute_dtype
    return device is not None and flash_unavailable(device, dtype, step.model.head_dim) is None


def advice(step: Step, limit: int, flash: bool, others: Iterable[tuple[str, Step]] = ()) -> str:
    """The cheapest settings that would fit, as text.

    Args:
        flash: whether this project's kernels could run.
        others: other plans for the devices; they come first, and each further setting is also tried with the last one.
    """
    plans = list(others)
    offered = [*plans]
    last = alternatives(plans[-1][1], flash) if plans else repeat(None)
    for given, with_last in zip(alternatives(step, flash), last, strict=False):
        offered.append(given)
        if with_last is not None:
            offered.append((joined(plans[-1][0], with_last[0]), with_last[1]))
    for setting, other in offered:
        if other.row_tokens % other.dims.context == 0 and predict(other).peak_bytes <= limit:
            return f"{setting} would fit"
    return "nothing that changes only memory, batch_size, precision or seq_len would fit: choose a smaller model"


def joined(first: str, second: str) -> str:
    """Join two texts of overrides; `accumulate` of the second replaces the first's."""
    if "accumulate=" in second:
        first = " ".join(word for word in first.split() if not word.startswith("accumulate="))
    return f"{first} {second}"


def alternatives(step: Step, flash: bool) -> Iterator[tuple[str, Step]]:
    """Settings that take less memory, the cheapest first.

    If the attention backend is not one of our kernels, each setting also replaces it: by `flash` if `flash` is true,
    else by `sdpa`.
    """
    best = "flash" if flash else "sdpa"
    if step.attention != best and not is_own(step.attention):
        better = replace(step, attention=best)
        yield f"attention={best}", better
        for setting, other in alternatives(better, flash):
            yield f"attention={best} {setting}", other
        return
    if step.first_kept < step.model.n_layers and step.keep > 0 and step.memory != "none":
        recomputed = replace(step, keep=0.0)
        yield "memory.keep=0", recomputed
        for setting, other in alternatives(recomputed, flash):
            yield f"memory.keep=0 {setting}", other
        return
    for mode in MEMORY_MODES[MEMORY_MODES.index(step.memory) + 1 :]:  # ordered by how much they keep
        yield f"memory={mode}", replace(step, memory=mode)
    least = replace(step, memory="checkpoint")
    if step.fused and step.offload < 1 and _fits_host(offloaded := replace(least, offload=1.0)):
        yield "memory=offload", offloaded
    if step.batch_size > 1:
        one = replace(least, batch_size=1, accumulate=step.accumulate * step.batch_size)
        yield f"memory=checkpoint batch_size=1 accumulate={one.accumulate}", one
        least = one
    setting = "memory=checkpoint" + (f" batch_size=1 accumulate={least.accumulate}" if step.batch_size > 1 else "")
    bf16 = PRECISIONS[step.precision].has_bf16_weights
    if not bf16:
        yield f"{setting} precision=bf16-true", replace(least, precision="bf16-true")
    elif step.moments != "8bit":
        yield f"{setting} optimizer.moments=8bit", replace(least, moments="8bit")
    offloaded = replace(least, precision=step.precision if bf16 else "bf16-true", offload_optimizer=True)
    if step.fused and _fits_host(offloaded):
        to_bf16 = "" if bf16 else " precision=bf16-true"
        yield f"{setting}{to_bf16} optimizer.offload=true", offloaded
    if least.accumulate == least.dims.ranks == 1 and not least.in_backward and least.precision != "fp16-mixed":
        in_backward = "optimizer.gradient_clip=null optimizer.in_backward=true"  # without clipping, another training
        yield f"{setting} {in_backward}", replace(least, in_backward=True)
        if offloaded.offload_optimizer and step.fused and _fits_host(offloaded):
            yield f"{setting}{to_bf16} optimizer.offload=true {in_backward}", replace(offloaded, in_backward=True)
    seq_len = step.seq_len
    while (seq_len := seq_len // 2) >= SHORTEST:
        yield f"{setting} seq_len={seq_len}", replace(least, seq_len=seq_len)


def _fits_host(step: Step) -> bool:
    """Whether the step uses the host's memory, and no more than there is."""
    return 0 < predict(step).host_bytes <= host_memory_of_rank(step.local_ranks or step.dims.ranks)
