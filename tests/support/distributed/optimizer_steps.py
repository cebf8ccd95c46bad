"""Random optimizer steps on several ranks, compared with one process: loss and every gradient.

    python -m tests.support.distributed.optimizer_steps RANKS DRAWS [FIRST]

A draw is a model, rows of packed documents, and a division of the ranks. The ranks take one step of a Lightning
`Trainer`. One process also computes the same step by itself, in a loop of its own.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor
from torch.utils.data import DataLoader

from flash_train.attention import Packing
from flash_train.data.dataset import as_row, collate
from flash_train.distributed.dims import data_share
from flash_train.distributed.leave import leave_groups
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.model import ModelConfig, Transformer
from flash_train.model.recompute import MEMORY_MODES
from flash_train.training import CausalLMModule, OptimizerConfig, StepSeed
from flash_train.training.callbacks.step_seed import seed_of_rows

VOCABULARY = 37
LIMIT = 3.0  # times the error of one process in the same precision, the limit for gradients
# Of the largest gradient: one process's error may be 0 by chance
FLOOR = {"32-true": 2e-6, "bf16-mixed": 4e-3, "bf16-true": 4e-3}


@dataclass(frozen=True)
class Draw:
    """One random step; `sizes` are replicate, shard and context, and shard is 0 for whole weights."""

    seed: int
    sizes: tuple[int, int, int]
    method: str
    lengths: tuple[tuple[int, ...], ...]
    seq_len: int
    batch_size: int
    accumulate: int
    memory: str
    precision: str
    on_meta: bool
    config: ModelConfig

    @classmethod
    def of(cls, seed: int, ranks: int) -> Draw:
        draw = random.Random(f"{seed}/{ranks}")
        sizes = [(ranks // s, s) for s in range(1, ranks + 1) if ranks % s == 0]
        replicate, shard = draw.choice([(ranks, 0), *sizes])
        context = draw.choice([c for c in range(1, ranks + 1) if ranks % c == 0])
        kv_heads = draw.choice([1, 2, 4])
        heads = kv_heads * draw.choice([1, 2] if kv_heads > 1 else [2, 4])
        can_share_heads = heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0)
        batch_size, accumulate = draw.randint(1, 2), draw.randint(1, 3)
        seq_len = context * draw.randint(9, 40)
        rows = ranks // context * batch_size * accumulate
        config = ModelConfig(
            vocab_size=VOCABULARY, n_layers=2, width=16, n_heads=heads, n_kv_heads=kv_heads, head_dim=8, mlp_width=24,
            tied_embeddings=draw.random() < 0.5, qk_norm=draw.random() < 0.3,
            attention_dropout=draw.choice([0.0, 0.2]), residual_dropout=draw.choice([0.0, 0.1]),
        )  # fmt: skip
        return cls(
            seed=seed,
            sizes=(replicate, shard, context),
            method=draw.choice(["gather", "ulysses"]) if can_share_heads else "gather",
            lengths=tuple(_lengths(draw, seq_len) for _ in range(rows)),
            seq_len=seq_len,
            batch_size=batch_size,
            accumulate=accumulate,
            memory=draw.choice(MEMORY_MODES),
            precision=draw.choice(["32-true", *FLOOR]),
            on_meta=shard > 0 and draw.random() < 0.5,
            config=config,
        )

    def strategy(self) -> ReplicatedStrategy | ShardedStrategy:
        replicate, shard, context = self.sizes
        if shard == 0:
            return ReplicatedStrategy(context, method=self.method)
        return ShardedStrategy(shard, replicate, context, method=self.method)

    def batches(self) -> list[dict[str, Any]]:
        """The batches of the first micro-batch, one for each data rank, then the batches of the second, and so on."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        for lengths in self.lengths:
            tokens = torch.randint(0, VOCABULARY, (self.seq_len,), generator=generator)
            labels = torch.randint(0, VOCABULARY, (self.seq_len,), generator=generator)
            labels[torch.rand(self.seq_len, generator=generator) < 0.3] = -100
            row = as_row(tokens.numpy(), labels.numpy(), lengths, capacity=self.seq_len)
            rows.append({**row, "place": len(rows)})
        return [collate(rows[i : i + self.batch_size]) for i in range(0, len(rows), self.batch_size)]


def _lengths(draw: random.Random, seq_len: int) -> tuple[int, ...]:
    lengths: list[int] = []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, draw.choice([1, draw.randint(1, 20), draw.randint(1, seq_len)])))
    return tuple(lengths)


class Step(pl.LightningDataModule):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw

    def train_dataloader(self) -> DataLoader:
        rank, ranks = data_share(self.trainer.strategy)
        return DataLoader(self.draw.batches()[rank::ranks], batch_size=None)


class KeepsGradients(CausalLMModule):
    """Keeps the step's gradients: by name, whole, of the mean over tokens."""

    gradients: dict[str, Tensor]

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        divisor = getattr(optimizer, "grad_scale", None)
        self.gradients = {}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
            self.gradients[name] = gradient if divisor is None else gradient / divisor


def on_ranks(draw: Draw, folder: str) -> tuple[float, float, dict[str, Tensor]]:
    """Take the step on all ranks: loss, gradient norm, gradients."""
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=draw.strategy(),
        max_steps=1,
        accumulate_grad_batches=draw.accumulate,
        precision=draw.precision,
        callbacks=[StepSeed(draw.seed)],
        use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    torch.manual_seed(draw.seed)
    with torch.device("meta" if draw.on_meta else "cpu"):
        module = KeepsGradients(
            draw.config, OptimizerConfig(gradient_clip=None), attention="reference", memory=draw.memory
        )
    module.first_weights = lambda model: (torch.manual_seed(draw.seed), model.draw_weights())
    module.model.blocks[0].register_forward_pre_hook(_check_tables)
    trainer.fit(module, datamodule=Step(draw))
    assert module.last_step is not None
    return float(module.last_step.loss), float(module.last_step.gradient_norm), module.gradients


def _check_tables(_module: Any, arguments: tuple[Any, ...]) -> None:
    """Check that no strategy casts the rotary tables; a recomputation would find them in another dtype."""
    _, cos, sin, *_ = arguments
    assert cos.dtype == sin.dtype == torch.float32


def alone(draw: Draw, precision: str) -> tuple[float, float, dict[str, Tensor]]:
    """Take the same step in this process, as a plain loop over the micro-batches."""
    torch.manual_seed(draw.seed)
    model = Transformer(draw.config, attention="reference", memory="none")
    if draw.precision == "bf16-true":
        model = model.bfloat16()  # rounds the weights, which are then the same in every precision
    model = model.to({"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32))
    total, count = 0.0, 0
    for batch in draw.batches():
        torch.manual_seed(seed_of_rows(draw.seed, batch["places"]))
        packing = Packing(batch["cu_seqlens"], batch["cu_seqlens"], lengths=batch["lengths"])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss, n = model.loss(batch["tokens"], batch["labels"], positions=batch["positions"], packing=packing)
        loss.backward()
        total, count = total + loss.item(), count + int(n)
    gradients = {name: parameter.grad.double() / max(1, count) for name, parameter in model.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    return total / max(1, count), float(norm), gradients


def difference(draw: Draw, folder: str) -> float:
    """Return the largest error of the ranks' loss, norm and gradients, in multiples of one process's own error."""
    found_alone: list[Any] = [None, None]
    for owner, precision in enumerate(("64-true", draw.precision)):  # two ranks compute at the same time
        if dist.get_rank() == owner:
            found_alone[owner] = alone(draw, precision)
    for owner in range(2):
        sent = [found_alone[owner]]
        dist.broadcast_object_list(sent, owner)
        found_alone[owner] = sent[0]
    (exact, plain), ranks = found_alone, on_ranks(draw, folder)
    floor = FLOOR[draw.precision]
    scale = max(float(gradient.abs().max()) for gradient in exact[2].values())
    found = []
    for name, right in exact[2].items():
        allowed = max(float((plain[2][name] - right).abs().max()), floor * scale)
        found.append(float((ranks[2][name] - right).abs().max()) / allowed)
    for a, b in ((ranks[0], exact[0]), (ranks[1], exact[1])):
        found.append(abs(a - b) / (floor * max(1.0, abs(b))))
    return max(x if x == x else float("inf") for x in found)


def check(rank: int, ranks: int, draws: int, first: int, folder: str) -> None:
    """Run all draws as one of the ranks.

    Raises:
        AssertionError: a draw that differs, on all ranks.
    """
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in names.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        kinds, largest = Counter[str](), 0.0
        for seed in range(first, first + draws):
            draw = Draw.of(seed, ranks)
            worst = torch.tensor(difference(draw, folder), dtype=torch.float64)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if float(worst) > LIMIT:
                raise AssertionError(f"{ranks} ranks have {float(worst):.1f} times one process's error: {draw}")
            kinds[f"{'x'.join(map(str, draw.sizes))} {draw.method if draw.sizes[2] > 1 else ''}".strip()] += 1
            largest = max(largest, float(worst))
        if rank == 0:
            counts = ", ".join(f"{kinds[kind]} of {kind}" for kind in sorted(kinds))
            print(f"{ranks} ranks: {counts}; largest error {largest:.2f} of one process's", flush=True)
        dist.barrier()
    finally:
        leave_groups()


def main(ranks: int, draws: int, first: int = 0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert Path(folder).is_dir()
        mp.spawn(check, (ranks, draws, first, folder), nprocs=ranks)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
