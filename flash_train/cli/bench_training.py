"""Training speed, compared with a peer, on one GPU: ``python scripts/bench_training.py --out FILE``.

The peer is a Llama of transformers with liger-kernel's operations, PyTorch's scaled dot product attention and fused
AdamW. Its layers are checkpointed if our memory mode recomputes anything. Both start with the same weights in bf16, see
the same tokens (one random row of the case's length) and take the same steps; ours run in Lightning's Trainer, as in
flash-train. A rate is recorded only if the losses of all steps agree.

FILE is written after every case. A second start with the same commit, GPU and versions continues after the last case.
The exit status is 0 only if all cases have their rates.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from flash_train.attention import attended_pairs
from flash_train.cli.bench.records import (
    COMPARED_VERSIONS,
    LOSS_TOLERANCE,
    Records,
    add_options,
    environment_of,
    measure_cases,
    selected_cases,
)
from flash_train.cli.components.model_config import build_model_config
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.environment import grow_segments, quieten_lightning
from flash_train.cli.config.errors import ArgumentParser, UnavailableError, one_line_errors
from flash_train.model import ModelConfig, Transformer
from flash_train.model.ops import IGNORE_INDEX
from flash_train.model.pretrained import load_pretrained, save_pretrained
from flash_train.records import device_name, memory_use, peak_flops, peak_memory, reset_peak_memory
from flash_train.records.memory_use import free_memory
from flash_train.training import CausalLMModule, OptimizerConfig, build_trainer
from flash_train.training.callbacks import Throughput
from flash_train.training.callbacks.base import find_callback
from flash_train.training.callbacks.step_times import PARTS

VOCAB_SIZE = 32768
ATTENTION = "flash"
WARM_UP = 2  # steps: the first compiles, the second is the first with the allocator's blocks in place
# The defaults of PyTorch's AdamW, but no weight decay: ours would not decay the norms.
OPTIMIZER = OptimizerConfig(
    lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=0, min_lr_ratio=1.0, gradient_clip=None, master="none"
)


@dataclass(frozen=True)
class TrainingCase:
    seq_len: int
    memory: str
    steps: int

    @property
    def name(self) -> str:
        return f"1b3-n{self.seq_len}-{self.memory}"


CASES = (
    TrainingCase(16384, "none", 12),
    TrainingCase(65536, "selective", 6),
    TrainingCase(131072, "selective", 5),
)


def shape() -> ModelConfig:
    return build_model_config(compose_config(("model=1b3", f"model.vocab_size={VOCAB_SIZE}")), VOCAB_SIZE, None)


def first_weights(folder: Path) -> Path:
    """Write the weights that every run starts with, in bf16, as a folder of transformers' Llama."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Transformer(shape()).to(torch.bfloat16)
    return save_pretrained(model, shape(), folder, max_seq_len=max(case.seq_len for case in CASES))


def tokens_of(case: TrainingCase) -> Tensor:
    """One row, int64 (1, seq_len)."""
    return torch.randint(0, VOCAB_SIZE, (1, case.seq_len), generator=torch.Generator().manual_seed(1))


class Watch(Callback):
    """Collects the row of `Throughput`, which must be before it, at each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float | None]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        throughput = find_callback(trainer, Throughput, before=self)
        assert throughput is not None
        self.rows.append(dict(throughput.row))


def train_ours(case: TrainingCase, weights: Path) -> dict[str, Any]:
    config, state = load_pretrained(weights)
    watch = Watch()
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = build_trainer(
            run_dir=run_dir, max_steps=case.steps, precision="bf16-true", log_every=1, limit_val_batches=0,
            checkpoints=False, progress=False, step_times=True, callbacks=[watch],
        )  # fmt: skip
        with trainer.init_module():
            model = Transformer(config, attention=ATTENTION, memory=case.memory)
        model.load_state_dict(state)
        tokens = tokens_of(case)
        labels = torch.cat((tokens[:, 1:], torch.full((1, 1), IGNORE_INDEX)), dim=1)
        rows: Any = [{"tokens": tokens, "labels": labels}] * case.steps
        trainer.fit(CausalLMModule(model, OPTIMIZER), DataLoader(rows, batch_size=None))
    return {
        "losses": [row["train/loss"] for row in watch.rows],
        "seconds": [row["time/step_seconds"] for row in watch.rows],
        **{f"{part}_seconds": [row[f"time/{part}_seconds"] for row in watch.rows] for part in PARTS},
    }


def train_peer(case: TrainingCase, weights: Path) -> dict[str, Any]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaForCausalLM

    apply_liger_kernel_to_llama()
    model: Any = LlamaForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.cuda().train()
    model.config.use_cache = False
    if case.memory != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=OPTIMIZER.weight_decay, fused=True, **settings)
    tokens = tokens_of(case).cuda()
    found: dict[str, list[float]] = {name: [] for name in ("losses", "seconds", *(f"{p}_seconds" for p in PARTS[:3]))}
    for _ in range(case.steps):
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        moments[0].record()
        loss = model(input_ids=tokens, labels=tokens).loss
        moments[1].record()
        loss.backward()
        moments[2].record()
        optimizer.step()
        moments[3].record()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        found["seconds"].append(time.perf_counter() - start)
        found["losses"].append(loss.item())
        for part, begin, end in zip(PARTS, moments[:-1], moments[1:], strict=False):
            found[f"{part}_seconds"].append(begin.elapsed_time(end) / 1e3)
    return found


IMPLEMENTATIONS: dict[str, Callable[[TrainingCase, Path], dict[str, Any]]] = {
    "flash_train": train_ours,
    "transformers": train_peer,
}


def measure(case: TrainingCase, weights: Path, environment: dict[str, str | None]) -> Records:
    """A record for each implementation: with rates if both trained and their losses agree, else with a `reason`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        flops = Transformer(shape()).model_flops(case.seq_len, attended_pairs((case.seq_len,)))
    peak = peak_flops(device_name(device), torch.bfloat16)
    records: Records = []
    for name, train in IMPLEMENTATIONS.items():
        free_memory()
        reset_peak_memory(device)
        record: dict[str, Any] = {"case": case.name, "implementation": name, "seq_len": case.seq_len}
        record |= {"memory": case.memory, "steps": case.steps, **{key: environment[key] for key in COMPARED_VERSIONS}}
        try:
            found = train(case, weights)
        except torch.AcceleratorError:  # this process can no longer use the device
            raise
        except RuntimeError as failure:  # out of memory, mostly
            records.append(record | {"reason": str(failure).strip().splitlines()[0]})
            continue
        record |= {"losses": found["losses"], "peak_memory_gib": peak_memory(memory_use(device))}
        record |= {key: statistics.median(v[WARM_UP:]) for key, v in found.items() if key.endswith("_seconds")}
        records.append(record | {"step_seconds": statistics.median(found["seconds"][WARM_UP:])})
    ours, theirs = records
    if "reason" in ours or "reason" in theirs:
        for record in records:
            record.setdefault("reason", "the other did not train")
        return records
    errors = [abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    for record in records:
        record["loss_difference"] = max(errors)
        if not all(error <= LOSS_TOLERANCE for error in errors):  # NaN fails too
            record["reason"] = f"the losses differ by {max(errors):.1e}"
            continue
        seconds = record["step_seconds"]
        record |= {"tokens_per_second": case.seq_len / seconds, "mfu": flops / seconds / peak if peak else None}
    if "reason" not in ours:
        ours["ratio_to_transformers"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
    return records


def shown(records: Records) -> str:
    figures = (
        f"{record['implementation']} "
        + (
            f"{record['tokens_per_second']:,.0f} tok/s {record['peak_memory_gib']:.1f} GiB"
            if "reason" not in record
            else f"none ({record['reason']})"
        )
        for record in records
    )
    ratio = records[0].get("ratio_to_transformers")
    return ", ".join(figures) + (f"; ratio {ratio:.3f}" if ratio else "")


def unavailable() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return "bench_training: needs an NVIDIA GPU, and there is none"
    missing = [name for name in ("transformers", "liger_kernel") if importlib.util.find_spec(name) is None]
    return f"bench_training: needs {' and '.join(missing)}: pip install -e '.[test]'" if missing else None


@one_line_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/benchmarks.md")
    add_options(parser)
    options = parser.parse_args(arguments)
    wanted = selected_cases(parser, options, CASES)
    if reason := unavailable():
        raise UnavailableError(reason)
    grow_segments()
    quieten_lightning()
    environment = environment_of(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        weights: list[Path] = []

        def measure_case(case: TrainingCase) -> Records:
            if not weights:
                weights.append(first_weights(Path(folder)))
            return measure(case, weights[0], environment)

        records = measure_cases(options, CASES, wanted, environment, measure_case, shown)
    return int(any("reason" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
