"""Where the records of docs/results come from: what each one measures, its commands, and the page with its tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_train.attention.kernels.families import FAMILIES
from flash_train.records.markdown import markdown_table, paragraph

Record = Mapping[str, Any]
FOLDER = "docs/results"
COMMIT_DIGITS = 7
FASTEST = next(iter(FAMILIES))  # the family whose kernels were measured


@dataclass(frozen=True)
class Source:
    """A record of docs/results.

    Args:
        measures: what it measures, as a phrase.
        page: the page and section with its tables, as a link from docs/.
        parts: the parts of scripts/measure.sh that make it.
        commands: the commands that make it, if measure.sh has no part for it.
    """

    measures: str
    page: str
    parts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def made_by(self) -> str:
        """The commands, as inline code."""
        commands = (f"scripts/measure.sh OUT {' '.join(self.parts)}",) if self.parts else self.commands
        return ", ".join(f"`{command}`" for command in commands)


SOURCES = {
    "attention_h200": Source(
        "the attention operator and its peers", "measurements.md#the-attention-operator", ("attention",)
    ),
    "attention_h100": Source(
        "the attention operator and two peers",
        "measurements.md#the-attention-operator-on-an-h100",
        commands=(f"python scripts/bench_attention.py --implementations {FASTEST} cudnn varlen_attn --out FILE",),
    ),
    "training_peer": Source(
        "training compared with `transformers` and Liger",
        "benchmarks.md#training-compared-with-transformers-and-liger",
        ("training_peer",),
    ),
    "parallel": Source(
        "training on two GPUs, and attention over rows that they share",
        "several_gpus.md#measure-it",
        commands=(
            "torchrun --nproc-per-node 2 scripts/bench_parallel.py training --out FILE",
            "torchrun --nproc-per-node 2 scripts/bench_parallel.py attention --out FILE",
        ),
    ),
    "parallel_x4": Source(
        "training and attention on four GPUs",
        "several_gpus.md#four-gpus",
        ("parallel",),
    ),
    "transformers": Source(
        "a Llama of `transformers` with each attention",
        "transformers.md",
        commands=("python scripts/bench_transformers.py --out FILE",),
    ),
    "training": Source("training with each attention", "benchmarks.md#training", ("training",)),
    "start": Source("the time from a command to its first step", "benchmarks.md#the-first-step", ("start",)),
    "graphs": Source("short rows with and without a CUDA graph", "train.md#cuda-graphs", ("graphs",)),
    "kernels": Source("the kernels of a training step", "train.md#which-kernels-run", ("kernels",)),
    "fp8": Source("`precision=fp8` compared with `bf16-true`", "train.md#fp8", ("fp8",)),
    "updates": Source(
        "fine-tuning with each way to keep bf16 weights", "train.md#precision-and-optimizer", ("updates",)
    ),
    "long_rows": Source("one step over a single document", "long_rows.md#a-row-that-is-one-document", ("long_rows",)),
    "find_max": Source(
        "the longest row that trains",
        "benchmarks.md#the-longest-row",
        ("find_max", "find_max_offload", "find_max_80gb"),
    ),
    "memory": Source(
        "predicted and measured peaks, attention's own memory, bytes moved", "benchmarks.md#memory", ("memory",)
    ),
    "ablation": Source(
        "attention backends in a training step, by length and dropout",
        "benchmarks.md#attention-backends-in-a-training-step",
        ("ablation", "ablation_long", "ablation_dropout", "ablation_dropout_long"),
    ),
    "recall": Source(
        "associative recall",
        "benchmarks.md#associative-recall",
        commands=("python scripts/train.py experiment=recall",),
    ),
    "compile_tier": Source(
        "every kernel compiled for every chip",
        "kernels.md#versions-of-triton",
        commands=("python -m tests.support.attention.compiled --all --record FILE",),
    ),
}


@dataclass(frozen=True)
class Facts:
    """The cards, versions and commits that a record names, each in the order of the record."""

    cards: tuple[str, ...]
    torch: tuple[str, ...]
    triton: tuple[str, ...]
    commits: tuple[str, ...]

    @property
    def versions(self) -> list[str]:
        """`torch 2.11.0` and `triton 3.6.0`, as far as they are known."""
        named = {"torch": self.torch, "triton": self.triton}
        return [f"{name} {', '.join(found)}" for name, found in named.items() if found]


def facts_of(records: Sequence[Record]) -> Facts:
    """Collect the facts of all entries; an entry has them itself or among its `versions`."""
    return Facts(
        _distinct(entry.get("gpu") or entry.get("device") for entry in records),
        _distinct(version.partition("+")[0] for version in _versions(records, "torch")),
        _distinct(_versions(records, "triton")),
        _distinct(map(_short, _versions(records, "commit"))),
    )


def _versions(records: Iterable[Record], name: str) -> Iterator[str]:
    for entry in records:
        found = entry.get(name) or entry.get("versions", {}).get(name)
        if found:
            yield found


def _short(commit: str) -> str:
    """Shorten a commit, and keep the mark of changes that were not committed."""
    name, dash, mark = commit.partition("-")
    return name[:COMMIT_DIGITS] + dash + mark


def _distinct(values: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))


def source_line(name: str, records: Sequence[Record]) -> str:
    """Return the line below a table: the record, its cards, versions and commits, and the commands that make it."""
    facts = facts_of(records)
    parts = [*facts.cards, *facts.versions]
    if facts.commits:
        parts.append(f"commit{'s' * (len(facts.commits) > 1)} {', '.join(facts.commits)}")
    return paragraph(f"Record: {', '.join([f'`{FOLDER}/{name}.json`', *parts])}. Made by {SOURCES[name].made_by}.")


def index(folder: Path) -> str:
    """Return a table with a row per record: its name, a link to its tables, what it measures, card, versions and parts.

    Raises:
        ValueError: `SOURCES` lacks a record of the folder.
    """
    if unknown := sorted({path.stem for path in folder.glob("*.json")} - set(SOURCES)):
        raise ValueError(f"{', '.join(unknown)}: SOURCES of flash_train/profiling/sources.py has no such record")
    rows = []
    for name, source in SOURCES.items():
        path = folder / f"{name}.json"
        records = json.loads(path.read_text(encoding="utf-8"))["records"] if path.is_file() else []
        facts = facts_of(records)
        cards = ", ".join(facts.cards) or ("no card" if records else "not measured yet")
        parts = " ".join(f"`{part}`" for part in source.parts) or "–"
        link = f"[`{name}`]({source.page})"
        rows.append((link, source.measures, cards, ", ".join(facts.versions) or "–", parts))
    return markdown_table(("record and tables", "measures", "card", "versions", "parts of `measure.sh`"), rows, left=5)
