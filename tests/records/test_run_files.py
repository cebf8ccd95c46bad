"""The reference of a run's files names everything that a run writes."""

import csv
import json

import pytest

from flash_train.cli.run import report
from flash_train.records.run_files import FILES, METRICS, SUMMARY
from tests.support.training.tiny_run import TinyData, tiny_module, tiny_trainer


@pytest.mark.parametrize("step_times", [True, False])
def test_all_that_a_run_writes_is_described(tmp_path, step_times):
    trainer = tiny_trainer(tmp_path, max_steps=2, step_times=step_times, val_every=1)
    module = tiny_module(val_bytes_per_token=1.0, answer_accuracy=True, chance_level=0.1)
    trainer.fit(module, datamodule=TinyData())
    with open(tmp_path / "metrics.csv", newline="") as file:
        columns = set(next(csv.reader(file))) - {"step"}
    assert columns <= set(METRICS) and {"train/loss", "val/bits_per_byte", "val/chance_level"} <= columns
    assert ("time/backward_seconds" in columns) == step_times
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) <= set(SUMMARY) and "mfu" in summary
    assert {path.name for path in tmp_path.iterdir()} <= set(FILES)


def test_files_that_a_run_reports_are_described():
    assert set(report.FILES) < set(FILES)
