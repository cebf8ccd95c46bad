"""A configuration's memory, before it runs: told in one line, and refused where it cannot fit."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from flash_train.attention.backends import flash_unavailable
from flash_train.attention.kernels.families import PORTABLE, fastest_on, is_own
from flash_train.cli.config.errors import OutOfMemoryError
from flash_train.cli.run.resolve import device_of, model_and_backend
from flash_train.cli.run.tokenizer import build_tokenizer
from flash_train.model import ModelConfig
from flash_train.model.recompute import MEMORY_MODES
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.prediction import Prediction, predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import bytes_in_words

#: bytes that cuBLAS keeps on a device of compute capability 9.0 or later, and on others (the defaults of
#: `CUBLAS_WORKSPACE_CONFIG`), for each thread that multiplies matrices: the one of the forward, and autograd's
WORKSPACES = (32 * 2**20, 8 * 2**20 + 128 * 2**10)
THREADS = 2
#: attentions whose memory the documents of a row decide; predicted is that of one a row, the most that it can be
BY_DOCUMENT = ("standard", "chunked")
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # Linux's limit of this process's group: bytes, or "max"
SHORTEST = 256  # tokens in a row that are still worth proposing


def step_before_run(config: DictConfig) -> tuple[Step, torch.device]:
    """What decides the memory of a configuration's steps, and where it would run, with no data and no weights read.

    Raises:
        UnavailableError: its attention backend does not run here.
    """
    device = device_of(config.trainer.accelerator)
    model_and_backend(config, 1, device)  # a mistake in the shape or the backend ends here, before a tokenizer is read
    model, backend = model_and_backend(config, build_tokenizer(config).vocab_size, device)
    return step_of(config, model, backend, device), device


def step_of(config: DictConfig, model: ModelConfig, attention: str, device: torch.device) -> Step:
    """What decides the memory of this configuration's steps; one document a row, the most that attention can need."""
    on_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_cuda else (0, 0)
    return Step(
        model,
        config.seq_len,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        precision=config.precision,
        memory=config.memory.mode,
        attention=attention,
        fused=on_cuda,
        family=(PORTABLE if config.trainer.deterministic else fastest_on(device)).name,
        whole_rows=config.data.packing == "concat",
        workspace=THREADS * WORKSPACES[0 if capability >= (9, 0) else 1] if on_cuda else 0,
    )


def check_memory(config: DictConfig, step: Step, device: torch.device) -> None:
    """Say what a step will take, and refuse one that takes more than there is, unless `force=true`.

    Of a run over several devices, or a compiled one, nothing is known beforehand; of one whose memory its documents
    decide, the most that it can take, which refuses nothing.

    Raises:
        OutOfMemoryError: it cannot fit; says what was predicted, what there is, and settings that would fit.
    """
    if config.trainer.devices * config.trainer.num_nodes > 1 or config.compile:
        return
    prediction = predict(step)
    limit = available(device)
    at_most = documents_decide(config, step)
    tell(prediction, limit, at_most)
    if limit is not None and prediction.peak_bytes > limit and not config.force and not at_most:
        raise OutOfMemoryError(
            f"seq_len={step.seq_len} batch_size={step.batch_size} memory={step.memory}: a step would take "
            f"{bytes_in_words(prediction.peak_bytes)} and there are {bytes_in_words(limit)}; "
            f"{advice(step, limit, flash_runs(step, device))}, "
            "or force=true to try all the same"
        )


def documents_decide(config: DictConfig, step: Step) -> bool:
    """Whether the memory of a step depends on the lengths of its documents, which nobody knows beforehand."""
    return config.data.packing != "concat" and (step.attention in BY_DOCUMENT or step.by_formula)


def available(device: torch.device) -> int | None:
    """Bytes that a run can have: of a CUDA device what is free, on a CPU what the machine has; else None."""
    if device.type == "cpu":
        return capacity(device)
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


@rank_zero_only
def tell(prediction: Prediction, limit: int | None, at_most: bool) -> None:
    """One line: the predicted peak and its largest parts."""
    parts = sorted(((size, kind) for kind, size in prediction.peak.parts.items() if size), reverse=True)
    largest = ", ".join(f"{kind} {bytes_in_words(size)}" for size, kind in parts[:4])
    there = "" if limit is None else f"; there are {bytes_in_words(limit)}"
    most = "at most about " if at_most else ""
    peak = bytes_in_words(prediction.peak_bytes)
    print(f"memory: {most}{peak} of tensors predicted at the peak of a step ({largest}){there}", flush=True)


def capacity(device: torch.device) -> int:
    """Bytes of the device; on a CPU those of the machine, or of the container. Takes none of them, as a CUDA context
    would."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = CONTAINER.read_text().strip() if CONTAINER.is_file() else "max"
    return machine if container == "max" else min(machine, int(container))


def flash_runs(step: Step, device: torch.device | None) -> bool:
    """Whether this project's kernels could run the step's attention."""
    dtype = PRECISIONS[step.precision].compute_dtype
    return device is not None and flash_unavailable(device, dtype, step.model.head_dim) is None


def advice(step: Step, limit: int, flash: bool) -> str:
    """The first settings that would fit, in the order of what they cost. `flash`: it could run."""
    for words, other in alternatives(step, flash):
        if predict(other).peak_bytes <= limit:
            return f"{words} would fit"
    return "nothing that changes only memory, batch_size, precision or seq_len would fit: choose a smaller model"


def alternatives(step: Step, flash: bool) -> Iterator[tuple[str, Step]]:
    """Settings that take less, in the order of what they cost; with `flash`, or else PyTorch's, where another
    attention was asked for."""
    best = "flash" if flash else "sdpa"
    if step.attention != best and not is_own(step.attention):
        better = replace(step, attention=best)
        yield f"attention={best}", better
        for words, other in alternatives(better, flash):
            yield f"attention={best} {words}", other
        return
    for mode in MEMORY_MODES[MEMORY_MODES.index(step.memory) + 1 :]:  # in the order of what they keep
        yield f"memory={mode}", replace(step, memory=mode)
    least = replace(step, memory="checkpoint")
    if step.batch_size > 1:
        one = replace(least, batch_size=1, accumulate=step.accumulate * step.batch_size)
        yield f"memory=checkpoint batch_size=1 accumulate={one.accumulate}", one
        least = one
    words = "memory=checkpoint" + (f" batch_size=1 accumulate={least.accumulate}" if step.batch_size > 1 else "")
    if step.precision != "bf16-true":
        yield f"{words} precision=bf16-true", replace(least, precision="bf16-true")
    seq_len = step.seq_len
    while (seq_len := seq_len // 2) >= SHORTEST:
        yield f"{words} seq_len={seq_len}", replace(least, seq_len=seq_len)
