"""What a checkpoint says of its model, and the models that load it."""

import lightning.pytorch as pl
import pytest
import torch

from flash_train.optim import exact_weights
from flash_train.training import CausalLMModule, OptimizerConfig
from tests.support.training.tiny_run import TinyData, tiny_config, tiny_module, tiny_trainer


def test_a_checkpoint_that_does_not_name_every_field_has_defaults():
    module = tiny_module()
    saved = {name: value for name, value in module.model.config.to_dict().items() if name != "qk_norm"}
    module.on_load_checkpoint({"hyper_parameters": {"model": saved}, "global_step": 3})
    assert module.loaded_step == 3
    with pytest.raises(ValueError, match=r"the checkpoint is of another model: qk_norm \(True saved, False here\)"):
        module.on_load_checkpoint({"hyper_parameters": {"model": saved | {"qk_norm": True}}, "global_step": 3})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("checkpoint")
    tiny_trainer(run_dir, max_steps=1).fit(tiny_module(), datamodule=TinyData())
    return run_dir / "checkpoints" / "step-000001.ckpt"


def test_checkpoint_holds_plain_values_only(checkpoint):
    loaded = torch.load(checkpoint, weights_only=True)
    assert loaded["hyper_parameters"]["model"] == tiny_config().to_dict()
    assert loaded["hyper_parameters"]["optimizer"]["betas"] == [0.9, 0.95]
    assert loaded["global_step"] == 1


def test_fp32_weights_get_all_bits_of_an_exact_master(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, precision="bf16-true").fit(tiny_module(), datamodule=TinyData())
    path = tmp_path / "checkpoints" / "step-000002.ckpt"
    saved = torch.load(path, weights_only=True)
    exact = exact_weights(saved["state_dict"], saved["optimizer_states"][0], "model.")
    assert {weight.dtype for weight in exact.values()} == {torch.float32}
    assert any((weight != saved["state_dict"][name].float()).any() for name, weight in exact.items())
    for name, weight in CausalLMModule.load_from_checkpoint(path, weights_only=True).state_dict().items():
        assert torch.equal(weight, exact[name]), name

    class First(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.weights = {name: weight.clone() for name, weight in pl_module.state_dict().items()}

    for precision, expected in (("fp32", exact), ("bf16-true", saved["state_dict"])):
        first = First()
        trainer = tiny_trainer(tmp_path / precision, max_steps=3, precision=precision, callbacks=[first])
        trainer.fit(tiny_module(), datamodule=TinyData(), ckpt_path=path)
        assert all(torch.equal(weight, expected[name]) for name, weight in first.weights.items()), precision


def test_checkpoint_builds_its_module(checkpoint):
    module = CausalLMModule.load_from_checkpoint(checkpoint, weights_only=True)
    assert module.model.config == tiny_config()
    assert module.optimizer_config == OptimizerConfig(lr=1e-2, warmup_steps=2, gradient_clip=0.5)
    assert module.attention == "sdpa"
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_checkpoint_of_another_model(checkpoint, tmp_path):
    module = tiny_module(config=tiny_config(n_layers=3, mlp_width=64))
    message = r"another model: mlp_width \(32 saved, 64 here\), n_layers \(2 saved, 3 here\)$"
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path).fit(module, datamodule=TinyData(), ckpt_path=checkpoint)


def test_dropout_may_change_on_resuming(checkpoint, tmp_path):
    module = tiny_module(config=tiny_config(attention_dropout=0.0, name="other"))
    trainer = tiny_trainer(tmp_path, max_steps=2)
    trainer.fit(module, datamodule=TinyData(), ckpt_path=checkpoint)
    assert trainer.global_step == 2


def test_checkpoint_of_something_else():
    with pytest.raises(ValueError, match="not written by CausalLMModule"):
        tiny_module().on_load_checkpoint({"state_dict": {}})
