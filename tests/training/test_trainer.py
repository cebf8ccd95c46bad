"""What `build_trainer` adds to Lightning's `Trainer`."""

import inspect

import lightning.pytorch as pl
import pytest
import torch

from flash_train.training import CausalLMModule, SingleDeviceNoTeardown, build_trainer, newest_checkpoint
from flash_train.training.trainer import SET_BY_OTHERS
from tests.support.training.tiny_run import TinyData, tiny_module, tiny_trainer


def test_at_the_end_nothing_is_copied_to_the_host(tmp_path, monkeypatch):
    """Training, checkpoint and validation are the same as with Lightning's strategy."""
    moved = []
    monkeypatch.setattr(CausalLMModule, "cpu", lambda module: moved.append("model"))
    monkeypatch.setattr(
        "lightning.pytorch.strategies.strategy._optimizers_to_device", lambda *_: moved.append("optimizer")
    )
    results = []
    for name in ("ours", "lightning"):
        strategy = SingleDeviceNoTeardown(torch.device("cpu")) if name == "ours" else "auto"
        trainer, module = tiny_trainer(tmp_path / name, strategy=strategy, max_steps=3), tiny_module()
        pl.seed_everything(0, verbose=False)
        trainer.fit(module, datamodule=TinyData())
        saved = torch.load(newest_checkpoint(tmp_path / name / "checkpoints"), weights_only=True)
        (loss,) = trainer.validate(module, datamodule=TinyData(), verbose=False)
        results.append((saved["state_dict"], saved["optimizer_states"][0]["state"], loss, list(moved)))
    (weights, state, loss, without), (others, other_state, other_loss, with_it) = results
    assert without == ["optimizer"]  # to the device, when training begins
    assert with_it[1:].count("optimizer") > 1 and "model" in with_it
    assert all(torch.equal(weights[name], others[name]) for name in others) and loss == other_loss
    assert all(torch.equal(state[i]["exp_avg"], other_state[i]["exp_avg"]) for i in other_state)


def test_a_trial_leaves_the_files_of_a_run_alone(tmp_path):
    tiny_trainer(tmp_path, max_steps=3, log_every=1).fit(tiny_module(), datamodule=TinyData())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for folder in (tmp_path, tmp_path / "new"):
        trainer = tiny_trainer(folder, progress=True, fast_dev_run=True)
        trainer.fit(tiny_module(), datamodule=TinyData())
        assert trainer.global_step == 1
        trainer.validate(tiny_module(), datamodule=TinyData(), verbose=False)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert newest_checkpoint(tmp_path / "checkpoints").name == "step-000003.ckpt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp4"}, "precision='fp4': must be one of fp32, bf16-mixed, bf16-true, fp16-mixed, fp8"),
        ({"precision": "fp16-mixed"}, "precision=fp16-mixed: must be fp32, bf16-mixed or bf16-true without an"),
        ({"max_steps": 0}, "max_steps=0: must be an integer of at least 1"),
        ({"max_steps": 100.0}, "max_steps=100.0: must be an integer of at least 1"),
        ({"seed": -1}, "seed=-1: must be an integer of at least 0"),
        ({"accumulate": 0}, "accumulate=0: must be an integer of at least 1"),
    ],
)
def test_build_trainer_refuses(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, **options)


def test_options_that_build_trainer_sets_are_named(tmp_path):
    message = (
        r"sets these options of Trainer itself: max_epochs \(give max_steps\), val_check_interval \(give val_every\)$"
    )
    with pytest.raises(TypeError, match=message):
        build_trainer(run_dir=tmp_path, max_steps=1, val_check_interval=3, max_epochs=3)
    signature = inspect.signature(pl.Trainer).parameters
    assert set(SET_BY_OTHERS) <= set(signature)
    for name in set(signature) - set(SET_BY_OTHERS) - set(inspect.signature(build_trainer).parameters):
        build_trainer(run_dir=tmp_path, max_steps=1, accelerator="cpu", **{name: signature[name].default})
