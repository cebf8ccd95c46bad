"""RunRecord: metrics.csv, summary.json, validation.json and the plots."""

import json
from pathlib import Path

import pytest
import wandb
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import WandbLogger

from flash_train.training import RunRecord, Throughput, newest_checkpoint
from tests.support.training.tiny_run import Hook, TinyData, plain_trainer, read_metrics, tiny_module, tiny_trainer


def test_failed_run_leaves_its_record(tmp_path):
    def fail(trainer, pl_module):
        raise OSError("no space left")

    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path, {"corpus": "x"}), Hook(3, fail))
    with pytest.raises(OSError, match="no space left"):
        trainer.fit(tiny_module(), datamodule=TinyData())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "OSError: no space left")
    assert (summary["steps"], summary["corpus"]) == (3, "x")
    assert len(read_metrics(tmp_path)) == 3
    assert (tmp_path / "loss.png").exists()


def test_a_second_error_of_a_lost_device_does_not_hide_the_first(tmp_path):
    def fail(trainer, pl_module):
        class Lost:
            def item(self):
                raise RuntimeError("device is gone")

        object.__setattr__(pl_module.last_step, "loss", Lost())
        raise RuntimeError("illegal memory access")

    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), Hook(3, fail))
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        trainer.fit(tiny_module(), datamodule=TinyData())
    assert raised.value.__notes__ == ["The run's record is incomplete: device is gone"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: illegal memory access")
    assert summary["steps"] == 3


def test_run_that_never_started_keeps_the_earlier_record(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(tiny_module(), datamodule=TinyData())
    before = (tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()
    with pytest.raises(FileNotFoundError):
        tiny_trainer(tmp_path).fit(tiny_module(), datamodule=TinyData(), ckpt_path=tmp_path / "missing.ckpt")
    assert ((tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()) == before


def test_summary_of_a_running_run_has_status_running(tmp_path):
    seen = []

    def look(trainer, pl_module):
        seen.append(json.loads((tmp_path / "summary.json").read_text())["status"])
        seen.append(len(read_metrics(tmp_path)))

    plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), Hook(2, look)).fit(tiny_module(), datamodule=TinyData())
    assert seen == ["running", 2]


def test_a_sanity_check_is_no_validation_of_the_run(tmp_path):
    trainer = plain_trainer(
        tmp_path, Throughput(), RunRecord(tmp_path), max_steps=2, num_sanity_val_steps=1, limit_val_batches=1,
        val_check_interval=100, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["val_loss"]) == ("finished", None)


def test_results_of_an_earlier_fit_are_not_in_the_record_of_the_next(tmp_path):
    module, seen = tiny_module(), []

    def look(trainer, pl_module, batch, batch_idx):
        seen.append(json.loads((tmp_path / "summary.json").read_text()))

    tiny_trainer(tmp_path / "earlier", max_steps=1).fit(module, datamodule=TinyData())
    assert module.last_step is not None and module.validation
    trainer = plain_trainer(
        tmp_path, Throughput(), RunRecord(tmp_path), LambdaCallback(on_train_batch_start=look), max_steps=1,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=TinyData())
    seen.append(json.loads((tmp_path / "summary.json").read_text()))
    assert [summary["val_loss"] for summary in seen] == [None, None]
    assert seen[0]["train_loss"] is None and seen[1]["train_loss"] > 0


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_summary_names_the_folder_of_wandb(mode, tmp_path):
    """A disabled W&B run names a temporary folder, which is not in the run's folder."""
    logger = WandbLogger(experiment=wandb.init(mode=mode, dir=tmp_path, settings=wandb.Settings(silent=True)))
    trainer = plain_trainer(tmp_path, Throughput(), RunRecord(tmp_path), max_steps=1, logger=logger)
    trainer.fit(tiny_module(), datamodule=TinyData())
    logger.experiment.finish()
    folder = json.loads((tmp_path / "summary.json").read_text())["wandb_dir"]
    assert folder is None if mode == "disabled" else Path(folder).parent == tmp_path / "wandb"


def test_validate_only(tmp_path):
    tiny_trainer(tmp_path, max_steps=2).fit(tiny_module(), datamodule=TinyData())
    before = (tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    tiny_trainer(tmp_path).validate(tiny_module(), datamodule=TinyData(), ckpt_path=checkpoint, verbose=False)
    found = json.loads((tmp_path / "validation.json").read_text())
    assert (found["checkpoint"], found["steps"], found["seq_len"]) == (str(checkpoint), 2, 32)
    assert found["val_loss"] == json.loads(before[0])["val_loss"]
    assert ((tmp_path / "summary.json").read_text(), (tmp_path / "metrics.csv").read_text()) == before


def test_a_failed_validation_writes_no_summary(tmp_path):
    module = tiny_module()
    module.validation_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tiny_trainer(tmp_path).validate(module, datamodule=TinyData())
    assert not (tmp_path / "summary.json").exists()


def test_missing_or_misplaced_throughput(tmp_path):
    for callbacks in [(RunRecord(tmp_path),), (RunRecord(tmp_path), Throughput())]:
        with pytest.raises(ValueError, match="RunRecord needs Throughput before it"):
            plain_trainer(tmp_path, *callbacks).fit(tiny_module(), datamodule=TinyData())
