"""The training runs that `scripts/bench_parallel.py` measures: models, rows, and how the GPUs divide them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_train.cli.components.model_config import build_model_config
from flash_train.cli.config.compose import compose_config
from flash_train.data.dataset import as_row, collate
from flash_train.distributed.dims import ParallelDims
from flash_train.model import ModelConfig
from flash_train.model.ops import IGNORE_INDEX
from flash_train.profiling.attention.cases import log_normal_lengths
from flash_train.training import OptimizerConfig

#: the peer's AdamW rounds bf16 weights to nearest, too
LIKE_PEER = OptimizerConfig(
    lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=0, min_lr_ratio=1.0, gradient_clip=None, master="none"
)
EXACT = replace(LIKE_PEER, master="exact")
TINY = ModelConfig(64, n_layers=2, width=32, n_heads=4, n_kv_heads=2, head_dim=8, mlp_width=64, tied_embeddings=False)
SEED = 2  #: of the packed rows


@dataclass(frozen=True)
class ParallelCase:
    """A training run on all GPUs.

    Attributes:
        name: of the case.
        model, vocab_size: the name of a model, and its vocabulary.
        lengths: of a row's documents.
        divided: ``sharded``: sharded weights, a row for each GPU; ``context``: sharded weights, one row;
            ``replicated``: whole weights, a row for each GPU.
        memory: what the backward recomputes. With ``auto``, the first of selective and checkpoint that fits 70 GB.
        steps: of the run.
        other: what it is compared with: ``transformers``, ``one`` (each GPU trains alone), or nothing.
        keep: the share of blocks that keep everything; None: as many as fit.
        optimizer: its settings.
        warm_up: how many steps are not measured: the first compiles, the second is the first with the allocator's
            blocks in place.
        short: tokens of the rows that warm up, if they are shorter.
    """

    name: str
    model: str
    vocab_size: int
    lengths: tuple[int, ...]
    divided: str
    memory: str
    steps: int
    other: str | None = None
    keep: float | None = None
    optimizer: OptimizerConfig = LIKE_PEER
    warm_up: int = 2
    short: int | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return sum(self.lengths)

    def shape(self) -> ModelConfig:
        if self.model == "tiny":
            return TINY
        config = compose_config((f"model={self.model}", f"model.vocab_size={self.vocab_size}"))
        return build_model_config(config, self.vocab_size, None)

    def dims(self, ranks: int) -> ParallelDims:
        if self.divided == "replicated":
            return ParallelDims(ranks, 1)
        return ParallelDims(1, ranks, ranks if self.divided == "context" else 1)

    def batches(self, row: int) -> list[dict[str, Any]]:
        """The batch of each step: the same row, after shorter ones if `short` says so."""
        whole = self._batch(row, self.lengths)
        first = whole if self.short is None else self._batch(row, (self.short,))
        return [first] * self.warm_up + [whole] * (self.steps - self.warm_up)

    def _batch(self, row: int, lengths: tuple[int, ...]) -> dict[str, Any]:
        tokens = torch.randint(0, self.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(row))
        labels = tokens.roll(-1, dims=1)
        labels[0, torch.tensor(lengths).cumsum(0) - 1] = IGNORE_INDEX  # a document's last token
        if len(lengths) == 1:
            return {"tokens": tokens, "labels": labels}
        return collate([as_row(tokens[0].numpy(), labels[0].numpy(), lengths, len(lengths))])


def compared_cases(tiny: bool = False) -> Iterator[ParallelCase]:
    """Yield runs compared with a peer or with GPUs that train alone, and a long row; `tiny` ones are for CPUs."""
    if tiny:
        yield ParallelCase("tiny-n64-sharded", "tiny", 64, (64,), "sharded", "selective", 3, "transformers")
        yield ParallelCase("tiny-n64-context", "tiny", 64, (64,), "context", "selective", 3)
        yield ParallelCase("tiny-n64-replicated", "tiny", 64, (64,), "replicated", "none", 3, "one")
        return
    yield ParallelCase("8b-n16384-sharded", "8b", 128256, (16384,), "sharded", "selective", 7, "transformers")
    yield ParallelCase("8b-n32768-sharded", "8b", 128256, (32768,), "sharded", "selective", 6, "transformers")
    yield ParallelCase("8b-n131072-context", "8b", 128256, (131072,), "context", "selective", 4)
    yield ParallelCase("1b3-n16384-replicated", "1b3", 32768, (16384,), "replicated", "none", 12, "one")


def weak_cases(ranks: int, tiny: bool = False) -> Iterator[ParallelCase]:
    """Yield runs whose work grows with the GPUs: a row for each, and a packed row that they share.

    Every block is recomputed, as `memory.keep=auto` would keep more on more GPUs. Names have the number of GPUs, so
    that one file can hold the records of several.
    """
    model, vocab_size, tokens = ("tiny", 64, 64) if tiny else ("1b3", 32768, 32768)
    packed = (tokens // 2,) * 2 * ranks if tiny else log_normal_lengths(tokens * ranks, SEED)
    for name, lengths, divided in ((f"n{tokens}", (tokens,), "sharded"), (f"packed{tokens}", packed, "context")):
        case = f"{model}-{name}-{divided}-x{ranks}"
        yield ParallelCase(case, model, vocab_size, lengths, divided, "selective", 8, keep=0.0, optimizer=EXACT)


def long_cases(ranks: int, tiny: bool = False) -> Iterator[ParallelCase]:
    """Yield one step over a single document of 131,072 tokens a GPU: 1,048,576 on eight."""
    model, vocab_size, tokens, short = ("tiny", 64, 64, 32) if tiny else ("8b", 128256, 131072, 8192)
    name = f"{model}-n{tokens * ranks}-long-x{ranks}"
    yield ParallelCase(
        name, model, vocab_size, (tokens * ranks,), "context", "auto", 2, keep=0.0, optimizer=EXACT, warm_up=1,
        short=short * ranks,
    )  # fmt: skip
