"""On a GPU: exact resumption, fp16 with a loss scaler, utilisation and memory."""

import csv
import json

import pytest
import torch

from flash_train.training import NonFiniteLoss, NonFiniteLossError, newest_checkpoint
from tests.support.training.tiny_run import TinyData, tiny_config, tiny_module, tiny_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIG = tiny_config(width=64, head_dim=32, mlp_width=128)


def rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def exact(run_dir):
    return [
        (row["step"], row["train/loss"], row["train/gradient_norm"], row["train/learning_rate"])
        for row in rows(run_dir)
    ]


def trainer(run_dir, **options):
    return tiny_trainer(run_dir, **{"accelerator": "cuda", "precision": "bf16-mixed", **options})


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
@pytest.mark.parametrize("stop", [3, 7])
def test_resume_is_exact(attention, stop, tmp_path):
    """With both dropouts at 0.1 and two micro-batches per step, within an epoch and after its end."""
    data = {"datamodule": TinyData()}
    trainer(tmp_path / "a", val_every=4).fit(tiny_module(config=CONFIG, attention=attention), **data)
    trainer(tmp_path / "b", val_every=4, stop_after=stop).fit(tiny_module(config=CONFIG, attention=attention), **data)
    trainer(tmp_path / "b", val_every=4).fit(
        tiny_module(seed=9, config=CONFIG, attention=attention),
        datamodule=TinyData(),
        ckpt_path=newest_checkpoint(tmp_path / "b" / "checkpoints"),
    )
    assert exact(tmp_path / "b") == exact(tmp_path / "a")


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "fp16-mixed"])
def test_every_precision_trains_with_clipping(precision, tmp_path):
    config = tiny_config(width=64, head_dim=32, mlp_width=128, attention_dropout=0.0, residual_dropout=0.0)
    for name in ("fp32", precision):
        trainer(tmp_path / name, precision=name).fit(tiny_module(config=config), datamodule=TinyData())
    expected, found = rows(tmp_path / "fp32"), rows(tmp_path / precision)
    # Only the first steps: later, rounding makes the weights differ. fp16's first step may overflow and be skipped.
    for name in ("train/loss", "train/gradient_norm"):
        assert float(found[0][name]) == pytest.approx(float(expected[0][name]), rel=0.05), name
    assert float(found[-1]["train/loss"]) < float(found[0]["train/loss"])


def test_utilisation_and_memory_come_from_the_gpu(tmp_path):
    trainer(tmp_path).fit(tiny_module(config=CONFIG), datamodule=TinyData())
    last = rows(tmp_path)[-1]
    assert (
        0 < float(last["memory/allocated_gib"]) <= float(last["memory/peak_gib"]) <= float(last["memory/reserved_gib"])
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"] == torch.cuda.get_device_name()
    assert summary["peak_memory_of"] == "device"
    if "H200" in summary["device"] and "MIG" not in summary["device"]:
        assert 0 < summary["mfu"] < 1


def test_nan_is_found_one_step_later_and_named_exactly(tmp_path):
    class Poison(NonFiniteLoss):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 2:
                torch.nn.init.constant_(pl_module.model.norm.weight, float("nan"))

    with pytest.raises(NonFiniteLossError, match="at step 3:"):
        trainer(tmp_path, log_every=100, max_steps=50, callbacks=[Poison()]).fit(
            tiny_module(config=CONFIG), datamodule=TinyData()
        )


def test_training_between_logged_steps_does_not_wait_for_the_device(tmp_path):
    """PyTorch raises at every synchronisation except events and logged steps."""
    config = tiny_config(width=64, head_dim=32, mlp_width=128, attention_dropout=0.0, residual_dropout=0.0)

    class Watch(NonFiniteLoss):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if 2 <= trainer.global_step < 8 else "default")

    try:
        trainer(tmp_path, log_every=10, max_steps=10, callbacks=[Watch()]).fit(
            tiny_module(config=config), datamodule=TinyData()
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
