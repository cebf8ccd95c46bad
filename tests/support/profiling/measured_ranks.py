"""The memory of a training step on each of several ranks: predicted and measured.

    python -m tests.support.profiling.measured_ranks --ranks 2                       # one rank's tensors, on a CPU
    torchrun --nproc-per-node 2 -m tests.support.profiling.measured_ranks --gpu      # larger steps, on GPUs

Each line has a step's name, its predicted and its measured peak, and the error. Names as arguments choose some steps.

On GPUs the measurement is `torch.cuda.max_memory_allocated`. On a CPU one process is the first rank of a fake process
group, whose collectives move nothing. PyTorch's profiler counts the tensors. The fused operations and the attention run
with kernels that do nothing, as in `tests.support.fused`: what a step allocates does not depend on its values.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from flash_train.attention.kernels.families import fastest_on
from flash_train.attention.parallel.head_groups import HeadGroup, head_groups
from flash_train.cli.memory.check import workspace_of
from flash_train.data.dataset import as_row, collate
from flash_train.distributed import gradient_sums
from flash_train.distributed.dims import ParallelDims, data_share
from flash_train.distributed.leave import leave_groups
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.model import ModelConfig
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.allocations import Recording, moments
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.training import CausalLMModule, OptimizerConfig, StepSeed
from tests.support.fused import fused_on_cpu, no_products

MEASURED = "measured"  # the phase of the measured optimizer step, the second
MIB = 2**20
CAPACITY = 8  # documents that the boundaries of a row have room for

SMALL = ModelConfig(
    vocab_size=1024, n_layers=4, width=256, n_heads=4, n_kv_heads=2, head_dim=64, mlp_width=704, tied_embeddings=False
)
TIED = replace(SMALL, tied_embeddings=True, qk_norm=True, residual_dropout=0.1, n_kv_heads=4)


def small_steps(ranks: int) -> dict[str, Step]:
    """Steps of 2 ranks, or of a multiple, that a CPU can take."""
    whole, sharded = ParallelDims(ranks, 1), ParallelDims(1, ranks)
    row = ParallelDims(1, ranks, ranks)
    base = Step(SMALL, 512, dims=whole)
    long = replace(base, seq_len=512 * ranks, dims=row)
    many = replace(SMALL, n_heads=16, n_kv_heads=8, head_dim=32)
    steps = {
        "ddp": base,
        "ddp-true-checkpoint": replace(base, precision="bf16-true", memory="checkpoint", seq_len=256),
        "ddp-accumulate-tied": replace(base, model=TIED, accumulate=3),
        "ddp-context": replace(base, dims=replace(whole, context=ranks), seq_len=512 * ranks),
        "fsdp": replace(base, dims=sharded),
        "fsdp-true": replace(base, dims=sharded, precision="bf16-true"),
        "fsdp-checkpoint": replace(base, dims=sharded, memory="checkpoint"),
        "fsdp-short": replace(base, dims=sharded, memory="checkpoint", seq_len=128),
        "fsdp-fp32-selective-tied": replace(base, dims=sharded, precision="fp32", memory="selective", model=TIED),
        "fsdp-accumulate": replace(base, dims=sharded, accumulate=2, batch_size=2, seq_len=256),
        "fsdp-true-accumulate": replace(base, dims=sharded, precision="bf16-true", accumulate=2, seq_len=256),
        "fsdp-keep": replace(base, dims=sharded, memory="checkpoint", keep=0.5),
        "fsdp-8bit": replace(base, dims=sharded, precision="bf16-true", moments="8bit"),
        "fsdp-stochastic": replace(base, dims=sharded, precision="bf16-true", master="stochastic", moments="fp32"),
        "gather": long,
        "gather-batch": replace(long, seq_len=512, batch_size=ranks),
        "gather-whole": replace(long, seq_len=512, batch_size=ranks + 1),  # a document for each rank, and a shared one
        "gather-true-checkpoint": replace(long, precision="bf16-true", memory="checkpoint"),
        "gather-selective-tied": replace(long, memory="selective", model=TIED),
        "gather-groups": replace(long, model=many, memory="checkpoint", seq_len=1024 * ranks, precision="bf16-true"),
        "ulysses": replace(long, method="ulysses"),
        "ulysses-selective": replace(long, method="ulysses", memory="selective"),
        "ulysses-repeat": replace(long, method="ulysses", model=replace(SMALL, n_kv_heads=1)),
        "ulysses-groups": replace(
            long, model=many, method="ulysses", memory="checkpoint", seq_len=1024 * ranks, precision="bf16-true"
        ),
    }
    if ranks > 2:
        hybrid = ParallelDims(ranks // 2, 2)
        steps |= {
            "hsdp": replace(base, dims=hybrid),
            "hsdp-true-accumulate": replace(base, dims=hybrid, precision="bf16-true", accumulate=2, seq_len=256),
            "hsdp-context": replace(base, dims=replace(hybrid, context=2), seq_len=2048),
        }
    return steps


def large_steps(ranks: int) -> dict[str, Step]:
    """Steps that fill part of a card with 80 GB."""
    b1 = ModelConfig(
        vocab_size=32768, n_layers=24, width=2048, n_heads=16, n_kv_heads=16, head_dim=128, mlp_width=5632,
        tied_embeddings=False,
    )  # fmt: skip
    b8 = ModelConfig(
        vocab_size=32768, n_layers=8, width=4096, n_heads=32, n_kv_heads=8, head_dim=128, mlp_width=14336,
        tied_embeddings=False,
    )  # fmt: skip
    whole, sharded, row = ParallelDims(ranks, 1), ParallelDims(1, ranks), ParallelDims(1, ranks, ranks)
    base = Step(b1, 8192, dims=whole, precision="bf16-true")
    return {
        "ddp": base,
        "ddp-mixed-checkpoint": replace(base, precision="bf16-mixed", memory="checkpoint"),
        "ddp-accumulate": replace(base, memory="selective", accumulate=2),
        "ddp-context": replace(base, dims=replace(whole, context=ranks), seq_len=32768, memory="selective"),
        "fsdp": replace(base, dims=sharded),
        "fsdp-mixed": replace(base, dims=sharded, precision="bf16-mixed"),
        "fsdp-checkpoint": replace(base, dims=sharded, memory="checkpoint"),
        "fsdp-mixed-accumulate": replace(
            base, dims=sharded, precision="bf16-mixed", memory="checkpoint", accumulate=2, batch_size=2, seq_len=4096
        ),
        "fsdp-keep": replace(base, dims=sharded, memory="checkpoint", keep=0.5),
        "fsdp-8bit": replace(base, dims=sharded, moments="8bit"),
        "fsdp-offload": replace(base, dims=sharded, offload_optimizer=True),
        "fsdp-inputs": replace(base, dims=sharded, seq_len=16384, memory="checkpoint", offload=1.0),
        "fsdp-wide": replace(base, model=b8, dims=sharded, precision="bf16-mixed", memory="selective"),
        "gather": replace(base, dims=row, seq_len=32768, memory="selective"),
        "gather-none": replace(base, dims=row, seq_len=16384),
        "gather-long": replace(base, model=b8, dims=row, seq_len=131072, memory="checkpoint"),
        "gather-batch": replace(base, dims=row, seq_len=16384, batch_size=2, memory="selective"),
        "ulysses": replace(base, dims=row, method="ulysses", seq_len=32768, memory="selective"),
        "ulysses-long": replace(base, model=b8, dims=row, method="ulysses", seq_len=131072, memory="checkpoint"),
    }


class Rows(pl.LightningDataModule):
    """Random rows, each a single document: what attention needs most memory for."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def train_dataloader(self) -> DataLoader:
        rank, ranks = data_share(self.trainer.strategy)
        step, count = self.step, 2 * self.step.accumulate * self.step.batch_size
        rows = []
        for number in range(count):
            generator = torch.Generator().manual_seed(number * ranks + rank)
            tokens = torch.randint(step.model.vocab_size, (step.seq_len,), generator=generator).numpy()
            rows.append(as_row(tokens, tokens, (step.seq_len,), capacity=CAPACITY))
        return DataLoader([collate(rows[i : i + step.batch_size]) for i in range(0, count, step.batch_size)], None)


class MarkStep(pl.Callback):
    """Calls `begin` and `end` around the second optimizer step."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.accumulate:
            self.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * self.accumulate - 1:
            self.end()


class CudaPeak(MarkStep):
    peak = 0

    def begin(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()


class ProfiledPeak(MarkStep):
    def __init__(self, accumulate: int) -> None:
        super().__init__(accumulate)
        self.recording = Recording(torch.device("cpu"), [])

    def begin(self) -> None:
        self.recording.scopes.begin(MEASURED)

    def end(self) -> None:
        self.recording.scopes.begin("end")

    def fullest(self) -> int:
        """Return the peak of the measured step, in bytes."""
        found = moments(self.recording.allocations(), lambda allocation: "tensors", self.recording.scopes)
        return max(moment.total for phase, moment in found if phase == MEASURED)


@dataclass(frozen=True)
class Found:
    """Bytes on the rank that needs most."""

    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Unwatched:
    """A strategy whose other ranks do not exist."""

    def _watch_ranks(self) -> None:
        pass


class ReplicatedOnOneProcess(Unwatched, ReplicatedStrategy):
    """DDP that takes its own gradients for the mean: PyTorch's fake process group returns no tensors."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        wrapped = super()._setup_model(model)
        wrapped.register_comm_hook(None, _own_gradients)
        return wrapped


class ShardedOnOneProcess(Unwatched, ShardedStrategy):
    pass


def _own_gradients(_state, bucket):  # PyTorch reads the annotations, and cannot read them as text
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


def strategy_of(step: Step, on_gpu: bool) -> ReplicatedStrategy | ShardedStrategy:
    dims = step.dims
    if dims.shard == 1:
        return (ReplicatedStrategy if on_gpu else ReplicatedOnOneProcess)(dims.context, method=step.method)
    sharded = ShardedStrategy if on_gpu else ShardedOnOneProcess
    return sharded(dims.shard, dims.replicate, dims.context, method=step.method)


def measure(step: Step, folder: str, *, on_gpu: bool) -> Found:
    """Train two steps on all ranks and return the largest peak of the second; all ranks call it."""
    callback = CudaPeak(step.accumulate) if on_gpu else ProfiledPeak(step.accumulate)
    strategy = strategy_of(step, on_gpu)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="gpu" if on_gpu else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=2,
        accumulate_grad_batches=step.accumulate,
        precision=PRECISIONS[step.precision].lightning,
        callbacks=[StepSeed(0), callback],
        use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    torch.manual_seed(0)
    recorded = callback.recording.recording(nn.Module()) if isinstance(callback, ProfiledPeak) else nullcontext()
    with recorded:
        with trainer.init_module(empty_init=True if isinstance(strategy, ShardedStrategy) else None):
            optimizer = OptimizerConfig(master=step.master, moments=step.moments, offload=step.offload_optimizer)
            module = CausalLMModule(step.model, optimizer, attention=step.attention, memory=step.memory)
        module.model.keep, module.model.offload = step.keep, step.offload
        trainer.fit(module, datamodule=Rows(step))
    peak = callback.fullest() if isinstance(callback, ProfiledPeak) else callback.peak
    largest = torch.tensor(peak, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return Found(predict(step).peak_bytes, int(largest))


def small_head_groups(heads: int, kv_heads: int, transfer: int, *_: int, sends_results: bool) -> list[HeadGroup]:
    """Make several groups of the few heads of small steps."""
    return head_groups(heads, kv_heads, transfer, 2**18, sends_results=sends_results)


def on_device(step: Step, device: torch.device) -> Step:
    """Return the step with what its memory depends on of a GPU."""
    if device.type == "cpu":
        return step
    return replace(step, family=fastest_on(device).name, workspace=workspace_of(device), row_entries=CAPACITY)


def print_table(names: list[str], *, on_gpu: bool) -> None:
    """Measure the named steps, all if there are no names, and print a line for each."""
    ranks = dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    steps = large_steps(ranks) if on_gpu else small_steps(ranks)
    with tempfile.TemporaryDirectory() as folder:
        for name, step in steps.items():
            if names and name not in names:
                continue
            found = measure(on_device(step, device), folder, on_gpu=on_gpu)
            gc.collect()  # the trainer and the module reference each other
            if on_gpu:
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                predicted, measured = found.predicted / MIB, found.measured / MIB
                print(f"{name:26} {predicted:10.2f} {measured:10.2f} MiB  {found.error:+7.2%}", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        print_table(options.names, on_gpu=True)
        dist.destroy_process_group()
        return
    names = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": options.ranks,
        "LOCAL_WORLD_SIZE": options.ranks,
        "GROUP_RANK": 0,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    patch = pytest.MonkeyPatch()
    fused_on_cpu(patch, lambda *_, **__: None)
    for module in ("exchange", "gather", "ulysses"):  # the sum of rows is one kernel on a GPU
        patch.setattr(f"flash_train.attention.parallel.{module}.sum_rows", lambda *_: None)
    for module in ("attention.parallel.gather", "attention.parallel.ulysses", "profiling.memory.shared_attention_walk"):
        patch.setattr(f"flash_train.{module}.head_groups", small_head_groups)
    # On a CPU only, these allocate
    patch.setattr("flash_train.model.kernels.cross_entropy.add_product", lambda *_: None)
    patch.setitem(gradient_sums._REDUCE, dist.ReduceOp.AVG, lambda *_, **__: None)
    try:
        with no_products():  # which take memory of their own, on a CPU
            print_table(options.names, on_gpu=False)
        dist.barrier()
    finally:
        leave_groups()


if __name__ == "__main__":
    main(sys.argv[1:])
