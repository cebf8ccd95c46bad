"""Training speed on several GPUs, compared with a peer or with one GPU.

The peer is a Llama of transformers with liger-kernel's operations and every layer checkpointed, sharded with FSDP2 and
trained with fused AdamW. Both sides start with the same weights in bf16, see the same tokens (rows of one document) and
take the same steps; ours run in Lightning's Trainer.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from flash_train.attention import attended_pairs
from flash_train.attention.kernels.families import fastest_on
from flash_train.cli.bench.parallel_cases import LIKE_PEER, ParallelCase
from flash_train.cli.bench.records import LOSS_TOLERANCE
from flash_train.cli.memory.check import host_memory_of_rank, total_memory_of_rank, workspace_of
from flash_train.cli.memory.choice import fewest_on_host, most_kept, most_on_host
from flash_train.distributed.sharding import shard_like
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.model import Transformer
from flash_train.model.pretrained import config_to_llama, llama_name
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records import device_name, memory_use, peak_flops, peak_memory, reset_peak_memory
from flash_train.records.memory_use import free_memory
from flash_train.training import CausalLMModule, SaveOnSignal

SMALLEST_CARD = 70 * 10**9  #: bytes that a card of 80 GB has for a step, with room for what else is there

Measured = tuple[list[float], float]  #: the loss of each step, and the seconds of a step


class StepTimer:
    """Times the steps after ``warm_up`` together, without a synchronisation between them, so the host runs ahead."""

    def __init__(self, case: ParallelCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.losses: list[Tensor] = []

    def before_step(self) -> None:
        if len(self.losses) == self.case.warm_up:
            wait(self.device)
            self.begin = time.perf_counter()

    def after_step(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        if len(self.losses) == self.case.steps:
            wait(self.device)
            self.seconds = (time.perf_counter() - self.begin) / (self.case.steps - self.case.warm_up)

    def measured(self) -> Measured:
        return [float(loss) for loss in self.losses], self.seconds


class TimedSteps(pl.Callback):
    """Tells the timer of each step of a Trainer."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.timer.before_step()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.timer.after_step(pl_module.last_step.loss)


def measure_training(case: ParallelCase, group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Train ours, and what it is compared with, on all ranks of the group, which call it together.

    Returns:
        A record for each, with the seconds of a step on the slowest rank; without rates, and with a ``reason``, if the
        losses of some step differ by more than `LOSS_TOLERANCE`.
    """
    ranks = group.size()
    step = step_of(case, ranks, device)
    ways: dict[str, Callable[[], Measured]] = {"flash_train": lambda: train_ours(case, step, device, alone=ranks == 1)}
    if case.other is not None:
        ways[case.other] = (
            (lambda: train_peer(case, device))
            if case.other == "transformers"
            else (lambda: train_ours(case, step, device, alone=True))
        )
    records: list[dict[str, Any]] = []
    for way, train in ways.items():
        free_memory()
        reset_peak_memory(device)
        losses, seconds = train()
        values = torch.tensor(losses, dtype=torch.float64, device=device)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if way in ("one", "transformers"):  # on each rank the loss of its own row
            dist.all_reduce(values, group=group)
            values /= ranks
        record: dict[str, Any] = {"case": case.name, "kind": "training", "model": case.model, "tokens": case.seq_len}
        record |= {"ranks": ranks, "documents": len(case.lengths), "divided": case.divided, "way": way}
        if way != "transformers":
            record |= {"memory": step.memory, "keep": step.keep, "offload": step.offload}
        record |= {"losses": values.tolist(), "step_seconds": float(slowest)}
        record["peak_memory_gib"] = peak_memory(memory_use(device))
        if way == "flash_train":
            record["predicted_memory_gib"] = predict(step).peak_bytes / 2**30
        records.append(record)
    _add_rates(case, records, ranks, device)
    return records


def _add_rates(case: ParallelCase, records: list[dict[str, Any]], ranks: int, device: torch.device) -> None:
    with torch.device("meta"):
        flops = Transformer(case.shape()).model_flops(case.seq_len, attended_pairs(case.lengths))
    peak = peak_flops(device_name(device), torch.bfloat16)
    rows = ranks // case.dims(ranks).context
    ours, *others = records
    # A GPU that trains alone sees other rows, and has other weights after a step
    compared = 1 if case.other == "one" else case.steps
    errors = [abs(a / b - 1) for o in others for a, b in zip(ours["losses"][:compared], o["losses"], strict=False)]
    for record in records:
        record["loss_difference"] = max(errors, default=None)
        if not all(error <= LOSS_TOLERANCE for error in errors):  # NaN fails too
            record["reason"] = f"the losses differ by {max(errors):.1e}"
            continue
        seconds = record["step_seconds"]
        record["tokens_per_second"] = rows * case.seq_len / seconds
        record["mfu"] = rows * flops / ranks / seconds / peak if peak else None
    if others and "reason" not in ours:
        ours["ratio"] = others[0]["step_seconds"] / ours["step_seconds"]


def step_of(case: ParallelCase, ranks: int, device: torch.device) -> Step:
    """The step of ours, with what the case leaves open about its memory."""
    on_cuda = device.type == "cuda"
    step = Step(
        case.shape(), case.seq_len, precision="bf16-true", memory="none", attention="flash" if on_cuda else "sdpa",
        fused=on_cuda, family=fastest_on(device).name, workspace=workspace_of(device), dims=case.dims(ranks),
        master=case.optimizer.master or "exact", lengths=case.lengths,
    )  # fmt: skip
    limit = total_memory_of_rank(device, ranks, ranks)
    if case.memory == "auto":
        return _within(step, min(limit, SMALLEST_CARD), host_memory_of_rank(ranks))
    step = replace(step, memory=case.memory)
    if case.memory == "none":
        return step
    keep = most_kept(step, limit) / step.model.n_layers if case.keep is None else case.keep
    return replace(step, keep=keep)


def _within(step: Step, limit: int, on_host: int) -> Step:
    """The step that recomputes least, with the fewest inputs in the host's memory, that fits in so many bytes."""
    for memory in ("selective", "checkpoint"):
        step = replace(step, memory=memory)
        blocks = fewest_on_host(step, limit, most_on_host(step, on_host))
        step = replace(step, offload=blocks / step.model.n_layers)
        if predict(step).peak_bytes <= limit:
            break
    return step


def train_ours(case: ParallelCase, step: Step, device: torch.device, *, alone: bool) -> Measured:
    """Train ours; ``alone`` on this rank's GPU without the others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    strategy = SingleDeviceStrategy(device) if alone else strategy_of(case, ranks)
    shards = isinstance(strategy, ShardedStrategy)
    timer, signals = StepTimer(case, device), SaveOnSignal()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder, accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1 if alone else ranks, strategy=strategy, max_steps=case.steps, precision="bf16-true",
            callbacks=[signals, TimedSteps(timer)], use_distributed_sampler=False, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with trainer.init_module(empty_init=shards or None):
            attention = "flash" if device.type == "cuda" else "sdpa"
            module = CausalLMModule(case.shape(), case.optimizer, attention=attention, memory=step.memory)
        module.model.keep, module.model.offload = step.keep, step.offload
        module.first_weights = lambda model: fill((llama_name(n), p) for n, p in model.named_parameters())
        if not shards:
            module.first_weights(module.model)
        rows: Any = case.batches(case.dims(ranks).data_rank(rank))
        trainer.fit(module, DataLoader(rows, batch_size=None, pin_memory=device.type == "cuda"))
    if signals.received:  # `fit` has ended early, without an error
        raise KeyboardInterrupt
    return timer.measured()


def strategy_of(case: ParallelCase, ranks: int) -> ReplicatedStrategy | ShardedStrategy:
    dims = case.dims(ranks)
    return ReplicatedStrategy() if case.divided == "replicated" else ShardedStrategy(dims.shard, context=dims.context)


def train_peer(case: ParallelCase, device: torch.device) -> Measured:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    if device.type == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    values = config_to_llama(case.shape(), "bfloat16", case.seq_len)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**values))
    model.to(torch.bfloat16).set_attn_implementation("sdpa")
    model.config.use_cache = False
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    fill(model.named_parameters())
    # Its frequencies are no weights: they are computed where it is made
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    settings: dict[str, Any] = {"lr": LIKE_PEER.lr, "betas": LIKE_PEER.betas, "eps": LIKE_PEER.eps}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=LIKE_PEER.weight_decay, fused=True, **settings)
    tokens = case.batches(dist.get_rank())[-1]["tokens"].to(device)
    timer = StepTimer(case, device)
    for _ in range(case.steps):
        timer.before_step()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        timer.after_step(loss)
    return timer.measured()


def fill(weights: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Fill whole or sharded weights by their names in a Llama: norms with 1, others from normal(0, 0.02)."""
    with torch.no_grad():
        for name, weight in weights:
            whole = torch.ones(weight.shape, dtype=weight.dtype, device=weight.device)
            if weight.dim() > 1:
                generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
                whole.normal_(0, 0.02, generator=generator)
            weight.copy_(shard_like(whole, weight) if isinstance(weight, DTensor) else whole)


def wait(device: torch.device) -> None:
    """Wait until all ranks have finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shown(records: list[dict[str, Any]]) -> str:
    """One line on a case."""
    figures = ", ".join(
        f"{record['way']} {record['reason']}"
        if "reason" in record
        else f"{record['way']} {record['tokens_per_second']:,.0f} tok/s"
        + (f" ({record['mfu']:.1%} MFU)" if record["mfu"] else "")
        + (f" {record['peak_memory_gib']:.1f} GiB" if record["peak_memory_gib"] else "")
        for record in records
    )
    ratio = records[0].get("ratio")
    return figures + (f"; ratio {ratio:.3f}" if ratio else "")
