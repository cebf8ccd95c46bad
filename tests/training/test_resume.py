"""A resumed run gives the same numbers as an uninterrupted one, bit for bit, with both dropouts active."""

import csv
import json
import signal
import time
from pathlib import Path

import pytest
import torch

from flash_train.training import newest_checkpoint
from tests.support.processes import Process
from tests.support.training.tiny_run import ROWS, TinyData, tiny_module, tiny_trainer


def rows(run_dir: Path) -> dict[int, str]:
    """The values that must not change, as text, by step."""
    with open(run_dir / "metrics.csv", newline="") as file:
        return {
            int(row["step"]): ",".join(row[f"train/{name}"] for name in ("loss", "gradient_norm", "learning_rate"))
            for row in csv.DictReader(file)
        }


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("unbroken")
    tiny_trainer(run_dir, val_every=4).fit(tiny_module(), datamodule=TinyData())
    return run_dir


# 3: within an epoch. 4: a validation is due. 5: an epoch's end. 7: in the second epoch. Two stops: at 3 and 8.
@pytest.mark.parametrize("stops", [(3,), (4,), (ROWS // 2,), (7,), (3, 5)], ids=str)
def test_stop_after_then_resume(stops, unbroken, tmp_path):
    checkpoint = None
    for steps in stops:
        trainer = tiny_trainer(tmp_path, val_every=4, stop_after=steps)
        trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=checkpoint)
        checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert summary(tmp_path)["steps"] == sum(stops)
    assert max(rows(tmp_path)) == sum(stops)
    # Neither the generator's state nor the weights before loading may matter.
    tiny_trainer(tmp_path, val_every=4).fit(tiny_module(seed=999), datamodule=TinyData(), ckpt_path=checkpoint)
    assert rows(tmp_path) == rows(unbroken)
    assert summary(tmp_path)["val_loss"] == summary(unbroken)["val_loss"]
    a, b = (torch.load(newest_checkpoint(run / "checkpoints"), weights_only=True) for run in (tmp_path, unbroken))
    assert all(torch.equal(a["state_dict"][name], b["state_dict"][name]) for name in b["state_dict"])


def test_dropout_and_data_matter(unbroken, tmp_path):
    """The comparison above detects errors: another dropout seed, or data from the beginning, changes the losses."""
    tiny_trainer(tmp_path, val_every=4, seed=1, max_steps=12, stop_after=2).fit(tiny_module(), datamodule=TinyData())
    assert rows(tmp_path)[1] != rows(unbroken)[1]


def test_rows_past_the_checkpoint_are_dropped(unbroken, tmp_path):
    trainer = tiny_trainer(tmp_path, checkpoint_every=4, keep_checkpoints=None, stop_after=7)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert list(rows(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]
    trainer = tiny_trainer(tmp_path, stop_after=1)
    trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=tmp_path / "checkpoints" / "step-000004.ckpt")
    assert list(rows(tmp_path)) == [1, 2, 3, 4, 5]
    assert newest_checkpoint(tmp_path / "checkpoints").name == "step-000005.ckpt"


@pytest.mark.slow
def test_sigterm_saves_and_resumes(tmp_path):
    """One process trains until SIGTERM, another resumes its run; a third run is never interrupted."""
    run = Process("tests.support.training.tiny_run", tmp_path)
    metrics = tmp_path / "metrics.csv"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 6):
        assert run.returncode is None and time.monotonic() < deadline, "the run wrote no metrics"
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate()
    assert run.returncode == 0
    assert "after fit" in output  # the code behind `fit` still runs
    record = summary(tmp_path)
    assert record["status"] == "interrupted"
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.name == f"step-{record['steps']:06d}.ckpt"
    steps = record["steps"]
    assert list(rows(tmp_path)) == list(range(1, steps + 1))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = {"val_every": 5, "max_steps": 100_000}
        trainer = tiny_trainer(tmp_path, stop_after=6, **options)
        trainer.fit(tiny_module(seed=999), datamodule=TinyData(), ckpt_path=checkpoint)
        trainer = tiny_trainer(tmp_path / "through", stop_after=steps + 6, **options)
        trainer.fit(tiny_module(), datamodule=TinyData())
    finally:
        torch.set_num_threads(threads)
    assert rows(tmp_path) == rows(tmp_path / "through")
