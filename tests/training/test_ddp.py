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


@pytest.mark.parametrize(("strategy", "rows"), [("ddp", "equal"), ("ddp", "ragged"), ("flash_replicated", "ragged")])
def test_ranks_agree_with_one_process(tmp_path, strategy, rows):
    """Also where the batches of the ranks have different shapes."""
    run_ranks("tests.support.training.two_ranks", 2, tmp_path / "two", strategy, rows)
    threads = torch.get_num_threads()
    train(tmp_path / "one", devices=1, ragged=rows == "ragged")
    torch.set_num_threads(threads)
    one_rows, one, one_weights = results(tmp_path / "one")
    two_rows, two, two_weights = results(tmp_path / "two")
    assert len(two_rows) == 3
    for a, b in zip(one_rows, two_rows, strict=True):
        for name in ("train/loss", "train/gradient_norm"):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4), name
        if rows == "ragged":
            continue
        # Both ranks' tokens count: 4 micro-batches of 32 per step.
        assert float(b["throughput/tokens_per_second"]) * float(b["time/step_seconds"]) == pytest.approx(128)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-4)
    assert two["steps"] == 3
    for name, values in one_weights.items():
        # Adam's first steps have unit size for any gradient, so this only checks that the weights did not drift apart.
        assert max(abs(a - b) for a, b in zip(values, two_weights[name], strict=True)) < 2e-3, name


def waits(tmp_path, strategy, accelerator):
    run_ranks("tests.support.training.counted_waits", 2, tmp_path, strategy, accelerator)
    first, second = (json.loads((tmp_path / f"calls-{rank}.json").read_text()) for rank in range(2))
    sums = 1 if strategy == "ddp" else 2  # of the loss, and of the squares in the norm of sharded gradients
    begin = {"all_reduce": sums + 1}  # the ranks agree once on what losses are divided by (see TokenMean)
    assert first["calls"] == second["calls"] == [begin, *[{"all_reduce": sums}] * 4]
    return first["ahead"], second["ahead"]


@pytest.mark.parametrize("strategy", ["ddp", "flash_sharded"])
def test_the_host_waits_for_other_ranks_in_no_step(tmp_path, strategy):
    assert waits(tmp_path, strategy, "cpu") == ([], [])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "flash_sharded"])
def test_the_host_is_ahead_of_the_gpu(tmp_path, strategy):
    for ahead in waits(tmp_path, strategy, "gpu"):
        assert ahead[2:] == [True] * 3
