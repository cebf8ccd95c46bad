"""Two ranks compute the same as one process from the same micro-batches, however the labels are spread."""

import csv
import json
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_ranks
from tests.support.training.two_ranks import train


def results(folder: Path) -> tuple[list[dict], dict, dict]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "summary.json").read_text()), json.loads((folder / "weights.json").read_text())


def test_ranks_agree_with_one_process(tmp_path):
    run_ranks("tests.support.training.two_ranks", 2, tmp_path / "two")
    threads = torch.get_num_threads()
    train(tmp_path / "one", devices=1)
    torch.set_num_threads(threads)
    one_rows, one, one_weights = results(tmp_path / "one")
    two_rows, two, two_weights = results(tmp_path / "two")
    assert len(two_rows) == 3
    for a, b in zip(one_rows, two_rows, strict=True):
        for name in ("train/loss", "train/gradient_norm"):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4), name
        # Both ranks' tokens count: 4 micro-batches of 32 per step.
        assert float(b["throughput/tokens_per_second"]) * float(b["time/step_seconds"]) == pytest.approx(128)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-4)
    assert two["steps"] == 3
    for name, values in one_weights.items():
        # Adam's first steps have unit size for any gradient, so this only checks that the weights did not drift apart.
        assert max(abs(a - b) for a, b in zip(values, two_weights[name], strict=True)) < 2e-3, name
