"""Training speed on several GPUs, compared with a peer or with one GPU.

The peer is a Llama of transformers with liger-kernel's operations and every layer checkpointed, sharded with FSDP2 and
trained with fused AdamW. Both sides start with the same weights in bf16, see the same tokens (rows of one document) and
take the same steps; ours run in Lightning's Trainer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
from flash_train.cli.bench.records import LOSS_TOLERANCE
from flash_train.cli.components.model_config import build_model_config
from flash_train.cli.config.compose import compose_config
from flash_train.cli.run.memory_check import capacity_of_rank, workspace_of
from flash_train.cli.run.memory_choice import most_kept
from flash_train.distributed.dims import ParallelDims
from flash_train.distributed.sharding import shard_like
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.model import ModelConfig, Transformer
from flash_train.model.ops import IGNORE_INDEX
from flash_train.model.pretrained import config_to_llama, llama_name
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records import device_name, memory_use, peak_flops, peak_memory, reset_peak_memory
from flash_train.records.memory_use import free_memory
from flash_train.training import CausalLMModule, OptimizerConfig

WARM_UP = 2  # steps: the first compiles, the second is the first with the allocator's blocks in place
OPTIMIZER = OptimizerConfig(
    lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=0, min_lr_ratio=1.0, gradient_clip=None, master="none"
)  # the peer's AdamW rounds bf16 weights to nearest, too
TINY = ModelConfig(64, n_layers=2, width=32, n_heads=4, n_kv_heads=2, head_dim=8, mlp_width=64, tied_embeddings=False)

Losses = tuple[list[float], list[float]]  #: of each step, and its seconds


@dataclass(frozen=True)
class ParallelCase:
    """A training run on all GPUs.

    Attributes:
        name: of the case.
        model, vocab_size: the name of a model, and its vocabulary.
        seq_len: tokens of a row.
        divided: ``sharded``: sharded weights, a row for each GPU; ``context``: sharded weights, one row;
            ``replicated``: whole weights, a row for each GPU.
        memory: what the backward recomputes; as many blocks as fit keep everything.
        steps: of the run.
        other: what it is compared with: ``transformers``, ``one`` (each GPU trains alone), or nothing.
    """

    name: str
    model: str
    vocab_size: int
    seq_len: int
    divided: str
    memory: str
    steps: int
    other: str | None = None

    def shape(self) -> ModelConfig:
        if self.model == "tiny":
            return TINY
        config = compose_config((f"model={self.model}", f"model.vocab_size={self.vocab_size}"))
        return build_model_config(config, self.vocab_size, None)

    def dims(self, ranks: int) -> ParallelDims:
        if self.divided == "replicated":
            return ParallelDims(ranks, 1)
        return ParallelDims(1, ranks, ranks if self.divided == "context" else 1)

    def strategy(self, ranks: int) -> ReplicatedStrategy | ShardedStrategy:
        dims = self.dims(ranks)
        return ReplicatedStrategy() if dims.shard == 1 else ShardedStrategy(dims.shard, context=dims.context)

    def batch(self, row: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, self.vocab_size, (1, self.seq_len), generator=torch.Generator().manual_seed(row))
        return {"tokens": tokens, "labels": torch.cat((tokens[:, 1:], torch.full((1, 1), IGNORE_INDEX)), dim=1)}


CASES = (
    ParallelCase("8b-n16384-sharded", "8b", 128256, 16384, "sharded", "selective", 7, "transformers"),
    ParallelCase("8b-n32768-sharded", "8b", 128256, 32768, "sharded", "selective", 6, "transformers"),
    ParallelCase("8b-n131072-context", "8b", 128256, 131072, "context", "selective", 4),
    ParallelCase("1b3-n16384-replicated", "1b3", 32768, 16384, "replicated", "none", 12, "one"),
)
TINY_CASES = (
    ParallelCase("tiny-n64-sharded", "tiny", 64, 64, "sharded", "selective", 3, "transformers"),
    ParallelCase("tiny-n64-context", "tiny", 64, 64, "context", "selective", 3),
    ParallelCase("tiny-n64-replicated", "tiny", 64, 64, "replicated", "none", 3, "one"),
)


class TimedSteps(pl.Callback):
    """The seconds and the loss of each step."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.wait()
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.wait()
        self.seconds.append(time.perf_counter() - self.begin)
        self.losses.append(float(pl_module.last_step.loss))


def measure_training(case: ParallelCase, group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Train ours, and what it is compared with, on all ranks of the group, which call it together.

    Returns:
        A record for each, with the largest seconds of any rank's step; without rates, and with a ``reason``, if the
        losses of some step differ by more than `LOSS_TOLERANCE`.
    """
    ranks = group.size()
    step = step_of(case, ranks, device)
    keep = step.keep
    ways: dict[str, Callable[[], Losses]] = {"flash_train": lambda: train_ours(case, keep, device, alone=False)}
    if case.other is not None:
        ways[case.other] = (
            (lambda: train_peer(case, device))
            if case.other == "transformers"
            else (lambda: train_ours(case, keep, device, alone=True))
        )
    records: list[dict[str, Any]] = []
    for way, train in ways.items():
        free_memory()
        reset_peak_memory(device)
        losses, seconds = train()
        values = torch.tensor([losses, seconds], dtype=torch.float64, device=device)
        slowest = values.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if way in ("one", "transformers"):  # on each rank the loss of its own row
            dist.all_reduce(values, group=group)
            values /= ranks
        record: dict[str, Any] = {"case": case.name, "kind": "training", "model": case.model, "tokens": case.seq_len}
        record |= {"ranks": ranks, "divided": case.divided, "memory": case.memory, "way": way}
        record |= {"keep": None if way == "transformers" else keep, "losses": values[0].tolist()}
        record["step_seconds"] = statistics.median(slowest[1, WARM_UP:].tolist())
        record["peak_memory_gib"] = peak_memory(memory_use(device))
        if way == "flash_train":
            record["predicted_memory_gib"] = predict(step).peak_bytes / 2**30
        records.append(record)
    _add_rates(case, records, ranks, device)
    return records


def _add_rates(case: ParallelCase, records: list[dict[str, Any]], ranks: int, device: torch.device) -> None:
    with torch.device("meta"):
        flops = Transformer(case.shape()).model_flops(case.seq_len, attended_pairs((case.seq_len,)))
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
    """The step of ours, with as many blocks that keep everything as `memory.keep=auto` chooses."""
    on_cuda = device.type == "cuda"
    step = Step(
        case.shape(), case.seq_len, precision="bf16-true", memory=case.memory, attention="flash" if on_cuda else "sdpa",
        fused=on_cuda, family=fastest_on(device).name, workspace=workspace_of(device), dims=case.dims(ranks),
        master=OPTIMIZER.master,
    )  # fmt: skip
    if case.memory == "none":
        return step
    return replace(step, keep=most_kept(step, capacity_of_rank(device, ranks, ranks)) / step.model.n_layers)


def train_ours(
    case: ParallelCase, keep: float, device: torch.device, *, alone: bool
) -> tuple[list[float], list[float]]:
    """Return the losses and the seconds of the steps; ``alone`` trains on this rank's GPU without the others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    strategy: Any = SingleDeviceStrategy(device) if alone else case.strategy(ranks)
    shards = isinstance(strategy, ShardedStrategy)
    times = TimedSteps(lambda: wait(device))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder, accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1 if alone else ranks, strategy=strategy, max_steps=case.steps, precision="bf16-true",
            callbacks=[times], use_distributed_sampler=False, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with trainer.init_module(empty_init=shards or None):
            attention = "flash" if device.type == "cuda" else "sdpa"
            module = CausalLMModule(case.shape(), OPTIMIZER, attention=attention, memory=case.memory)
        module.model.keep = keep
        module.first_weights = lambda model: fill((llama_name(n), p) for n, p in model.named_parameters())
        if not shards:
            module.first_weights(module.model)
        row = rank // case.dims(ranks).context
        rows: Any = [case.batch(row)] * case.steps
        trainer.fit(module, DataLoader(rows, batch_size=None))
    return times.losses, times.seconds


def train_peer(case: ParallelCase, device: torch.device) -> Losses:
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
    settings: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=OPTIMIZER.weight_decay, fused=True, **settings)
    tokens = case.batch(dist.get_rank())["tokens"].to(device)
    losses, seconds = [], []
    for _ in range(case.steps):
        wait(device)
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return losses, seconds


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
