"""Metrics in loggers and in Lightning's progress bars, with and without Throughput."""

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from flash_train.training import RunRecord, Throughput
from tests.support.training.tiny_run import TinyData, plain_trainer, read_metrics, tiny_module


def test_module_logs_without_any_callback(tmp_path):
    trainer = plain_trainer(tmp_path, max_steps=2)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert {"train/loss", "train/gradient_norm"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize("callbacks", [(Throughput(),), ()], ids=["with Throughput", "alone"])
def test_loggers_have_losses_and_validations_at_the_steps_of_metrics_csv(callbacks, tmp_path):
    logger, bar = CSVLogger(tmp_path, name="csv"), TQDMProgressBar()
    record = (RunRecord(tmp_path),) if callbacks else ()
    trainer = plain_trainer(
        tmp_path, *callbacks, *record, logger=logger, max_steps=5, log_every_n_steps=2, accumulate_grad_batches=2,
        val_check_interval=4, check_val_every_n_epoch=None,
    )  # fmt: skip
    module = tiny_module()
    trainer.fit(module, datamodule=TinyData())
    rows = read_metrics(tmp_path / "csv" / "version_0")
    losses = {int(row["step"]): float(row["train/loss"]) for row in rows if row["train/loss"]}
    validations = {int(row["step"]): float(row["val/loss"]) for row in rows if row["val/loss"]}
    assert list(losses) == [2, 4, 5] and list(validations) == [2, 4]
    assert losses[5] == pytest.approx(module.last_step.loss.item(), rel=1e-6)
    if record:
        ours = read_metrics(tmp_path)
        assert losses == {int(row["step"]): pytest.approx(float(row["train/loss"]), rel=1e-6) for row in ours}
        own = {int(row["step"]): float(row["val/loss"]) for row in ours if row["val/loss"]}
        assert validations == pytest.approx(own, rel=1e-6)
    for name in ("train/loss", "val/loss"):  # what Lightning's own bars show, and what callbacks monitor
        assert name in bar.get_metrics(trainer, module) and name in trainer.callback_metrics
        assert float(trainer.logged_metrics[name]) == pytest.approx(float(trainer.callback_metrics[name]))
