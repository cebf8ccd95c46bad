"""Writes what the tests of this folder resume and read: a stopped run and an ablation of an earlier version.

From the root of the repository, with 0.1.0 as the earlier version::

    git worktree add /tmp/earlier d7fb8c8
    PYTHONPATH=/tmp/earlier OMP_NUM_THREADS=1 python tests/compatibility/record.py tests/compatibility/0.1.0

The folder then holds

- ``corpus.jsonl``: the documents of the run;
- ``run``: the run, stopped after `STOP_AFTER` of `MAX_STEPS` steps;
- ``expected.json``: the same run without the stop, and the machine that computed it;
- ``ablation``: two finished trials.

The file imports what 0.1.0 and the present version have in common, so that the test uses it too.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flash_train.training import CausalLMModule

STOP_AFTER, MAX_STEPS = 3, 6
OPTIONS = (
    *("data=text", "data.path=corpus.jsonl", "data.cache_dir=cache", "data.val_batches=1", "data.val_fraction=0.1"),
    *("seq_len=64", "batch_size=2", "accumulate=2", f"max_steps={MAX_STEPS}", "val_every=2"),
    *("attention.dropout=0.1", "model.residual_dropout=0.1", "optimizer.warmup_steps=2"),
    *("model.n_layers=1", "model.width=8", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=8"),
    *("model.mlp_width=16", "model.tied_embeddings=true"),
    *("trainer.checkpoint_every=1", "trainer.keep_checkpoints=1", "hardware=cpu", "logger=none"),
)
ABLATION = (
    *("sweep.seq_len=[32]", "sweep.attention=[sdpa,standard]", "data=recall", "data.n_pairs=4", "data.val_rows=4"),
    *("model.n_layers=1", "model.width=8", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=8"),
    *("model.mlp_width=16", "max_steps=3", "hardware=cpu", "logger=none"),
)
#: the columns of metrics.csv that the training decides, and the speed of the machine does not
COLUMNS = ("step", "train/loss", "train/gradient_norm", "train/learning_rate", "val/loss", "val/bits_per_byte")


@dataclass
class Observed:
    """What the runs in this process did.

    Attributes:
        batches: for each micro-batch, a hash of its tokens, labels and document boundaries, and PyTorch's seed.
        loaded: weights, optimizers and schedules before the first training step, named as in a checkpoint.
    """

    batches: list[dict[str, Any]] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)


@contextmanager
def observed() -> Iterator[Observed]:
    """Observe the training steps of all runs that happen inside the context."""
    found, original = Observed(), CausalLMModule.training_step

    @functools.wraps(original)
    def training_step(module: CausalLMModule, batch: Mapping[str, Any], batch_idx: int) -> torch.Tensor:
        if not found.loaded:
            found.loaded |= {
                "state_dict": deepcopy(module.state_dict()),
                "optimizer_states": [deepcopy(optimizer.state_dict()) for optimizer in module.trainer.optimizers],
                "lr_schedulers": [deepcopy(x.scheduler.state_dict()) for x in module.trainer.lr_scheduler_configs],
            }
        rows = hash_tensors({name: batch[name].long() for name in ("tokens", "labels", "cu_seqlens")})
        found.batches.append({"rows": rows, "seed": torch.initial_seed()})
        return original(module, batch, batch_idx)

    CausalLMModule.training_step = training_step
    try:
        yield found
    finally:
        CausalLMModule.training_step = original


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def dropout_draws() -> str:
    """A hash of PyTorch's dropout masks: builds with and without MKL draw different ones from the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        masks = torch.empty(1000, dtype=torch.bool).bernoulli_(0.9), torch.dropout(torch.ones(1000), 0.1, True)
    return hash_tensors({"bernoulli": masks[0], "dropout": masks[1]})


def machine() -> dict[str, str]:
    """What the last digits of a result on a CPU depend on."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        cpu = " ".join(re.findall(r"^(?:vendor_id|cpu family|model|stepping|flags)\s*: (.*)", text, re.M))
    return {
        "cpu": hashlib.sha256(cpu.encode()).hexdigest(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


def call(main: Callable[[], None], *arguments: str) -> None:
    """A console script in this process."""
    from hydra.core.global_hydra import GlobalHydra

    before, sys.argv = sys.argv, ["command", *arguments]
    try:
        main()
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()


def documents() -> Iterator[str]:
    """Sixteen of uneven length. They fill 14 rows; the run reads 24, so that its second half begins a new epoch."""
    for i in range(16):
        yield "the quick brown fox jumps over the lazy dog, "[: 9 + 5 * (i % 8)] + str(i) * 20


def main() -> None:
    from flash_train.cli import ablate, train

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is replaced")
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    lines = [json.dumps({"text": text}) + "\n" for text in documents()]
    Path("corpus.jsonl").write_text("".join(lines), encoding="utf-8")

    call(train.main, *OPTIONS, "run_dir=run", f"stop_after={STOP_AFTER}")
    with observed() as unbroken:
        call(train.main, *OPTIONS, "run_dir=unbroken")
    (path,) = Path("unbroken/checkpoints").iterdir()
    last = torch.load(path, weights_only=True)
    expected = {
        "machine": machine(),
        "dropout_draws": dropout_draws(),
        "metrics": Path("unbroken/metrics.csv").read_text(encoding="utf-8").splitlines(),
        "batches": unbroken.batches,
        "weights": hash_tensors(last["state_dict"]),
        "data": last["PackedDataModule"],
        "checkpoint_keys": sorted(last),
        "summary_keys": sorted(json.loads(Path("unbroken/summary.json").read_text(encoding="utf-8"))),
    }
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    call(ablate.main, *ABLATION, "run_dir=ablation")

    for scratch in ("cache", "unbroken"):
        shutil.rmtree(scratch)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.suffix in (".png", ".md", ".txt"):  # no command reads them
            path.unlink()
        elif path.suffix == ".json":
            path.write_text(path.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")


if __name__ == "__main__":
    main()
