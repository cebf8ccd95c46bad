"""The cases of the memory benchmark: training steps, attention alone, and the memory traffic of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

KINDS = ("step", "attention", "traffic")
LENGTHS = tuple(2**i for i in range(11, 18))  #: of training steps
OWN_LENGTHS = tuple(2**i for i in range(10, 17))  #: of attention alone
COMPARED = ("flash", "sdpa", "chunked", "standard")
TRAFFIC_LENGTHS = (4096, 16384)

#: further shapes and settings, which the grid lacks
OTHERS = {
    "odd-widths": "model=125m model.width=904 model.n_heads=8 model.n_kv_heads=8 model.head_dim=112 "
    "model.mlp_width=2416 seq_len=11111",
    "deep-and-narrow": "model=125m model.n_layers=40 model.width=512 model.n_heads=8 model.n_kv_heads=8 seq_len=16384",
    "grouped": "model=350m model.n_kv_heads=2 seq_len=16384",
    "grouped-selective": "model=1b3 model.n_kv_heads=4 memory=selective seq_len=24576",
    "head-dim-64": "model=1b3 model.n_heads=32 model.n_kv_heads=8 model.head_dim=64 memory=checkpoint seq_len=32768",
    "head-dim-256": "model=1b3 model.n_heads=8 model.n_kv_heads=8 model.head_dim=256 seq_len=8192",
    "untied": "model=125m model.tied_embeddings=false model.vocab_size=50304 seq_len=8192",
    "vocabulary": "model=350m model.vocab_size=131072 memory=checkpoint seq_len=16384",
    "normalised-heads": "model=350m model.qk_norm=true memory=selective seq_len=16384",
    "dropout": "model=350m attention.dropout=0.1 model.residual_dropout=0.1 seq_len=16384",
    "dropout-checkpoint": "model=350m attention.dropout=0.1 model.residual_dropout=0.1 memory=checkpoint seq_len=16384",
    "standard-dropout": "model=125m attention=standard attention.dropout=0.1 data.packing=concat seq_len=4096",
    "batch": "model=125m batch_size=2 seq_len=16384",
    "accumulate": "model=350m accumulate=2 seq_len=16384",
    "batch-and-accumulate": "model=125m batch_size=4 accumulate=2 memory=checkpoint seq_len=8192",
    "graph": "model=350m trainer.cuda_graph=true max_steps=3 seq_len=16384",
    "graph-and-accumulate": "model=125m batch_size=4 accumulate=2 trainer.cuda_graph=true seq_len=8192",
    "concat": "model=125m data.packing=concat seq_len=32768",
    "sdpa": "model=350m attention=sdpa seq_len=16384",
    "sdpa-checkpoint": "model=1b3 attention=sdpa memory=checkpoint seq_len=32768",
    "bf16-true": "model=1b3 precision=bf16-true seq_len=16384",
    "bf16-true-selective": "model=1b3 precision=bf16-true memory=selective seq_len=65536",
    "8b-of-4-layers": "model=8b model.n_layers=4 precision=bf16-true seq_len=16384",
    "8b-of-4-layers-checkpoint": "model=8b model.n_layers=4 memory=checkpoint seq_len=16384",
}


@dataclass(frozen=True)
class StepCase:
    """A training command, by its overrides of `flash-train`."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention: with a `direction`, its memory traffic is measured, otherwise the memory that it holds."""

    attention: str
    seq_len: int
    direction: str | None = None

    @property
    def name(self) -> str:
        kind = f"traffic-{self.direction}" if self.direction else "attention"
        return f"{kind}-{self.attention}-n{self.seq_len}"


MemoryCase = StepCase | AttentionCase


def step_cases(
    models: Sequence[str], lengths: Sequence[int], modes: Sequence[str], backends: Sequence[str], others: bool
) -> Iterator[StepCase]:
    """The grid of settings, short rows first, then the other ones."""
    for length, model, mode, attention in product(lengths, models, modes, backends):
        overrides = [f"model={model}", f"seq_len={length}", f"memory={mode}", f"attention={attention}"]
        if attention == "standard":  # the prediction assumes one document per row
            overrides.append("data.packing=concat")
        yield StepCase(f"{model}-n{length}-{mode}-{attention}", tuple(overrides))
    for name, text in OTHERS.items() if others else ():
        yield StepCase(f"other-{name}", tuple(text.split()))


def attention_cases() -> Iterator[AttentionCase]:
    for length, attention in product(OWN_LENGTHS, COMPARED):
        yield AttentionCase(attention, length)


def traffic_cases() -> Iterator[AttentionCase]:
    for length, attention, direction in product(TRAFFIC_LENGTHS, ("flash", "standard"), ("forward", "backward")):
        yield AttentionCase(attention, length, direction)
