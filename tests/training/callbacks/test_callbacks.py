"""All callbacks together, in a plain `Trainer`, and with modules other than CausalLMModule."""

import io
import json
import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from flash_train.training import (
    AtomicCheckpointIO,
    ClosingSample,
    NonFiniteLoss,
    RichProgress,
    RunRecord,
    SaveOnSignal,
    StepCheckpoint,
    StepResult,
    StepSeed,
    StepTimes,
    StopAfter,
    Throughput,
)
from flash_train.training.callbacks import MemorySnapshot
from tests.support.training.tiny_run import TinyData, plain_trainer, read_metrics, tiny_module


@pytest.mark.pictures
def test_all_callbacks_in_a_plain_trainer(tmp_path):
    logger = CSVLogger(tmp_path, name="lightning")
    trainer = plain_trainer(
        tmp_path,
        *(StepSeed(0), NonFiniteLoss(), Throughput(), StopAfter(), SaveOnSignal(), RunRecord(tmp_path)),
        StepCheckpoint(tmp_path / "checkpoints", every=2),
        logger=logger,
        plugins=[AtomicCheckpointIO()],
        accumulate_grad_batches=2,
        max_steps=5,
    )
    trainer.fit(tiny_module(), datamodule=TinyData())
    ours = read_metrics(tmp_path)
    assert [int(row["step"]) for row in ours] == [1, 2, 3, 4, 5]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-000004.ckpt", "step-000005.ckpt"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert {"loss.png", "throughput.png", "memory.png"} <= {path.name for path in tmp_path.iterdir()}
    logged = [row for row in read_metrics(tmp_path / "lightning" / "version_0") if row["train/loss"]]
    for row, theirs in zip(ours, logged, strict=True):
        for name in ("train/loss", "train/gradient_norm", "train/learning_rate", "time/step_seconds"):
            assert float(theirs[name]) == pytest.approx(float(row[name]), rel=1e-6), name
    assert [int(row["step"]) for row in logged] == [int(row["step"]) for row in ours]
    assert {row["epoch"] for row in logged} == {"0"}
    for name in ("train/loss", "time/step_seconds"):  # for callbacks that monitor them
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(ours[-1][name]), rel=1e-6)


class Own(pl.LightningModule):
    """A module with only the attributes that `Throughput` reads; it logs `val_loss` itself."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(31, 1)
        self.last_step = None

    def flops(self, batch):
        return 6 * batch["tokens"].numel()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch["tokens"]).square().mean()
        self.last_step = StepResult(self.global_step + 1, loss.detach(), torch.ones(()), 0.1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch["tokens"]).square().mean(), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_every_callback_works_with_a_module_that_throughput_supports(tmp_path):
    screen = Console(file=io.StringIO(), force_terminal=False, width=110)
    trainer = plain_trainer(
        tmp_path,
        *(StepSeed(0), NonFiniteLoss(), StepTimes(), Throughput(), StopAfter(), SaveOnSignal(), RunRecord(tmp_path)),
        *(RichProgress(screen), ClosingSample(console=screen), StepCheckpoint(tmp_path / "c")),
        val_check_interval=2, check_val_every_n_epoch=None, plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    trainer.fit(Own(), datamodule=TinyData())
    shown = screen.file.getvalue()
    assert re.search(r"step 4/4  loss \d\.\d{4} .*left\nvalidation at step 4: loss \d\.\d{4}\n", shown), shown
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["model"], summary["parameters"]) == ("finished", "Own", 31)
    assert (summary["seq_len"], summary["attention"]) == (None, None)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows if row["val_loss"]] == ["2", "4"]
    assert summary["val_loss"] == float(rows[-1]["val_loss"])
    trainer.validate(Own(), datamodule=TinyData(), verbose=False)
    found = json.loads((tmp_path / "validation.json").read_text())
    assert found["val_loss"] > 0 and found["steps"] is None


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ((Throughput(), RunRecord("r"), RichProgress()), "Throughput needs a module with flops and last_step"),
        ((NonFiniteLoss(),), "NonFiniteLoss needs a module with last_step.*Bare lacks them: leave the callback out"),
        ((MemorySnapshot(print, every=1),), "MemorySnapshot needs a module with model"),
    ],
)
def test_callbacks_name_what_a_module_lacks(callbacks, message, tmp_path, monkeypatch):
    class Bare(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Embedding(31, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch["tokens"]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=message):
        plain_trainer(tmp_path, *callbacks).fit(Bare(), datamodule=TinyData())
