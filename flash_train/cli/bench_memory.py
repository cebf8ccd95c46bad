"""Measured and predicted memory on one device: ``python scripts/bench_memory.py --out FILE [KEY=VALUE …]``.

There are three kinds of cases. All run in this process, as starting one takes longer than most cases:
  step       a training run of two steps, as flash-train builds it: its measured and its predicted peak
  attention  one call, forward and backward: the memory that it holds besides its inputs, at growing lengths
  traffic    one call: the bytes that the GPU's memory moved, by ncu, and the bytes that the algorithm needs

A step that is predicted not to fit is recorded but not run. FILE is written after every case. A second start with the
same commit, GPU and versions continues after the last case. The exit status is 0 only if every measured step is within
5 % or 64 MiB of its prediction, whichever is more. KEY=VALUE are overrides for every step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig

from flash_train.attention.traffic import flash_traffic, standard_traffic
from flash_train.cli.bench.memory_cases import (
    KINDS,
    LENGTHS,
    AttentionCase,
    MemoryCase,
    StepCase,
    attention_cases,
    step_cases,
    traffic_cases,
)
from flash_train.cli.bench.records import COMPARED_VERSIONS, Records, add_options, environment_of, measure_cases
from flash_train.cli.config import hardware
from flash_train.cli.config.choices import choices_of
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.environment import grow_segments, quieten_lightning
from flash_train.cli.config.errors import ArgumentParser, UnavailableError, is_out_of_memory, one_line_errors
from flash_train.cli.config.overrides import read
from flash_train.cli.config.validate import validate
from flash_train.cli.memory.check import free_memory_of, step_before_run
from flash_train.cli.run.build import build
from flash_train.cli.run.memory_files import only_measure, settings
from flash_train.model.recompute import MEMORY_MODES
from flash_train.profiling.attention import dram_traffic
from flash_train.profiling.attention.memory import HEAD_DIM, HEADS, exponents, own_bytes
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.results import allowed_error, compared, own_sizes
from flash_train.records.memory_use import bytes_in_words, free_memory
from flash_train.training.callbacks import MemorySnapshot, RecordedStep

# The first step creates the optimizer's state, the second has it. Cases of their own measure CUDA graphs.
FIXED = (
    "max_steps=2", "logger=none", "trainer.checkpoints=false", "trainer.progress_bar=false", "trainer.cuda_graph=false",
    "force=true",
)  # fmt: skip
TRAFFIC = {"flash": flash_traffic, "standard": standard_traffic}


class Peak(Callback):
    """Records the peak of the device's memory. Frees the model at the end: Lightning would copy it to the host."""

    def __init__(self) -> None:
        self.measured: dict[str, int] = {}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        stats = torch.cuda.memory_stats(pl_module.device)
        self.measured = {
            "measured_bytes": stats["allocated_bytes.all.peak"],
            "requested_bytes": stats["requested_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
        }
        self._free(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._free(trainer, pl_module)

    def _free(self, trainer: Trainer, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for parameter in pl_module.parameters():
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)


def measure_step(case: StepCase, given: Sequence[str]) -> dict[str, Any]:
    """The record of a training run: its `status` is ok, oom, failed or unavailable, with a `reason` unless it is ok."""
    config = compose_config((*FIXED, *given, *case.overrides))
    validate(config)
    record: dict[str, Any] = {"case": case.name, "kind": "step", "overrides": list(case.overrides)}
    try:
        step, device = step_before_run(config)
    except UnavailableError as error:
        return record | {"status": "unavailable", "reason": str(error)}
    if config.trainer.cuda_graph is True and device.type != "cuda":
        return record | {"status": "unavailable", "reason": "a CUDA graph needs an NVIDIA GPU"}
    predicted, limit = predict(step).peak_bytes, free_memory_of(device)
    record |= {"predicted_bytes": predicted, "available_bytes": limit}
    if limit is not None and predicted > limit:
        reason = f"{bytes_in_words(predicted)} predicted, {bytes_in_words(limit)} available"
        return record | {"status": "unavailable", "reason": reason}
    before, start = allocated_bytes(device), time.monotonic()
    found = _outcome(config, device)
    return record | found | {"seconds": time.monotonic() - start, "left_bytes": allocated_bytes(device) - before}


def _outcome(config: DictConfig, device: torch.device) -> dict[str, Any]:
    from triton.errors import TritonError

    try:
        found = _run(config, device)
    except torch.AcceleratorError:  # this process can no longer use the device
        raise
    except (RuntimeError, ValueError, TritonError) as error:
        if is_out_of_memory(error):
            return {"status": "oom", "reason": str(error).splitlines()[0]}
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"status": "ok"} | found


def _run(config: DictConfig, device: torch.device) -> dict[str, Any]:
    """Train, and return the measured peak: by the allocator on CUDA, else by PyTorch's profiler in the last step."""
    peak = Peak()
    recorded: list[RecordedStep] = []
    with tempfile.TemporaryDirectory() as folder:
        run = build(config, Path(folder))
        on_cuda = device.type == "cuda"
        only_measure(run.trainer, peak if on_cuda else MemorySnapshot(recorded.append, steps=(config.max_steps,)))
        run.trainer.fit(run.module, datamodule=run.data)
    measured = peak.measured if on_cuda else {"measured_bytes": recorded[-1].profile.peak_bytes}
    dropout = {"dropout": config.attention.dropout, "packing": config.data.packing}
    return settings(config, run) | dropout | measured


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors hold on a CUDA device once all garbage is freed; 0 on other devices."""
    free_memory()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure_attention(case: AttentionCase, device: torch.device) -> dict[str, Any]:
    record = {"case": case.name, "kind": "attention", "attention": case.attention, "seq_len": case.seq_len}
    allocated_bytes(device)
    try:
        return record | {"status": "ok", "own_bytes": own_bytes(case.attention, case.seq_len, device)}
    except torch.OutOfMemoryError as error:
        return record | {"status": "oom", "reason": str(error).splitlines()[0]}
    except ValueError as error:  # a backend that does not run here
        return record | {"status": "unavailable", "reason": str(error)}


def measure_traffic(case: AttentionCase) -> dict[str, Any]:
    assert case.direction is not None
    count = TRAFFIC[case.attention](case.seq_len, HEADS, HEADS, HEAD_DIM, torch.bfloat16.itemsize)
    record = {
        "case": case.name, "kind": "traffic", "attention": case.attention, "seq_len": case.seq_len,
        "direction": case.direction, "algorithm_bytes": getattr(count, case.direction),
    }  # fmt: skip
    try:
        found = dram_traffic.measure(case.attention, case.seq_len, case.direction)
    except dram_traffic.Unmeasured as error:
        return record | {"status": "unavailable", "reason": str(error)}
    return record | {"status": "ok", "read_bytes": found["read"], "written_bytes": found["write"]}


def shown(records: Records) -> str:
    (record,) = records
    if record["status"] != "ok":
        return f"{record['status']} ({record['reason']})"
    if record["kind"] == "attention":
        return f"{bytes_in_words(record['own_bytes'])} besides its inputs"
    if record["kind"] == "traffic":
        moved = record["read_bytes"] + record["written_bytes"]
        return f"{bytes_in_words(moved)} moved, {bytes_in_words(record['algorithm_bytes'])} by its algorithm"
    measured, predicted = record["measured_bytes"], record["predicted_bytes"]
    reserved = f", {bytes_in_words(record['reserved_bytes'])} reserved" if "reserved_bytes" in record else ""
    left = f", {bytes_in_words(record['left_bytes'])} NOT FREED" if record["left_bytes"] > 0 else ""
    both = f"{bytes_in_words(measured)} measured, {bytes_in_words(predicted)} predicted"
    return f"{both} ({predicted / measured - 1:+.2%}){reserved}{left}, {record['seconds']:.0f} s"


def verdict(records: Records) -> tuple[str, bool]:
    """Lines on the quality of the predictions, and whether all steps that ran are within the bound."""
    steps = [record for record in records if record["kind"] == "step"]
    found, broken = compared(steps), [record for record in steps if record["status"] in ("oom", "failed")]
    outside = [record for record in found if abs(record["error_bytes"]) > allowed_error(record["measured_bytes"])]
    lines = [f"{len(found) - len(outside)} of {len(found)} steps within 5 % or 64 MiB of the predicted peak"]
    if found:
        worst = max(found, key=lambda record: abs(record["error_bytes"]) / allowed_error(record["measured_bytes"]))
        error = worst["error_bytes"] / worst["measured_bytes"]
        lines.append(f"worst: {worst['case']}, {error:+.2%} ({worst['error_bytes'] / 2**20:+,.0f} MiB)")
    for title, some in (("outside", outside), ("predicted to fit, but", broken)):
        lines += [f"{title}: {record['case']}: {shown([record])}" for record in some]
    fitted = exponents(own_sizes(records))
    lines += [f"attention={name}: n^{power:.2f}" for name, power in fitted.items() if power is not None]
    return "\n".join(lines), not outside and not broken


def split_commas(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def choices_in(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of lists of these choices."""

    def checked(text: str) -> list[str]:
        for part in split_commas(text):
            if part not in choices:
                raise argparse.ArgumentTypeError(f"{part!r}: must be one of {', '.join(choices)}")
        return split_commas(text)

    return checked


def lengths_in(text: str) -> list[int]:
    return [int(part) for part in split_commas(text)]


@one_line_errors()
def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/memory.md")
    add_options(parser)
    parser.add_argument("--kinds", type=choices_in(KINDS), default=list(KINDS), help=",".join(KINDS))
    models, attentions = choices_in((*choices_of("model"), "other")), choices_in(choices_of("attention"))
    parser.add_argument(
        "--models", type=models, default=split_commas("125m,350m,1b3,other"), help="other: further shapes and settings"
    )
    parser.add_argument("--lengths", type=lengths_in, default=list(LENGTHS), help="tokens in a row")
    parser.add_argument(
        "--memory", type=choices_in(MEMORY_MODES), default=list(MEMORY_MODES), help=",".join(MEMORY_MODES)
    )
    parser.add_argument(
        "--attention", type=attentions, default=split_commas("flash,standard"), help="backends of the steps"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of flash-train for every step")
    options = parser.parse_intermixed_args(arguments)
    every = cases_of(options)
    wanted = [case for case in every if options.only in case.name]
    if not wanted:
        parser.error(f"--only {options.only!r} and the other options leave no case")
    return _main(options, every, wanted)


def cases_of(options: argparse.Namespace) -> list[MemoryCase]:
    """The cases that the options select, in the order in which they run: steps first, as they matter most."""
    models = [name for name in options.models if name != "other"]
    steps = step_cases(models, options.lengths, options.memory, options.attention, "other" in options.models)
    found: dict[str, Iterable[MemoryCase]] = {"step": steps, "attention": attention_cases(), "traffic": traffic_cases()}
    return [case for kind in KINDS if kind in options.kinds for case in found[kind]]


def _main(options: argparse.Namespace, every: Sequence[MemoryCase], wanted: Sequence[MemoryCase]) -> int:
    grow_segments()
    quieten_lightning()
    torch.manual_seed(0)
    choice, _ = hardware.choose(hardware.detect())
    given = (f"hardware={choice}", *read(options.overrides).overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = environment_of(options.commit)
    if device.type == "cuda":
        print(f"matrix products keep {bytes_in_words(allocate_workspaces(device))}", flush=True)

    def measure_case(case: MemoryCase) -> Records:
        if isinstance(case, StepCase):
            record = measure_step(case, given)
        else:
            record = measure_traffic(case) if case.direction else measure_attention(case, device)
        return [record | {key: environment[key] for key in COMPARED_VERSIONS}]

    records = measure_cases(options, every, wanted, environment, measure_case, shown)
    text, good = verdict(records)
    print(text)
    return 0 if good else 1


def allocate_workspaces(device: torch.device) -> int:
    """Allocate the workspaces of matrix products in the forward's and the backward's thread; return their bytes.

    Otherwise the first case would be charged for them.
    """
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    del x
    return allocated_bytes(device)


if __name__ == "__main__":
    sys.exit(main())
