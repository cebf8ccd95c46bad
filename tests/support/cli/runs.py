"""Training runs that tests start, and what these runs wrote."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import python_path

ROOT = Path(__file__).parents[3]
TINY_MODEL = [
    *("model.n_layers=1", "model.width=16", "model.n_heads=2", "model.n_kv_heads=1"),
    *("model.head_dim=16", "model.mlp_width=32"),
]


def start(*arguments: str, cwd: Path, **environ: str) -> subprocess.Popen:
    """Start `scripts/train.py` in a new process, without any variable or account of W&B."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"PYTHONPATH": python_path(), "HOME": str(cwd), **environ}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, cwd: Path, **environ: str) -> str:
    """Run `scripts/train.py`, which must succeed; returns its standard output."""
    process = start(*arguments, cwd=cwd, **environ)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def losses_of(run_dir: Path) -> dict[str, str]:
    """Training losses by step, as the digits in the file."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        return {row["step"]: row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}
