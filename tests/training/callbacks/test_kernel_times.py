"""KernelTimes: which steps it profiles, without a GPU with an invented recording, and what a GPU ran."""

import json

import pytest
import torch

from flash_train.profiling.step_kernels import OTHER, Kernel, kind_of, report
from flash_train.training.callbacks import KernelTimes
from flash_train.training.callbacks import kernel_times as module
from flash_train.training.callbacks.base import StepCallback
from tests.support.training.tiny_run import Hook, TinyData, plain_trainer, tiny_module


@pytest.fixture
def on_any_device(monkeypatch):
    """Profiles on a CPU, where the recording holds no kernels."""
    monkeypatch.setattr(KernelTimes, "on_train_start", StepCallback.on_train_start)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "device_kernels", lambda recorded: [Kernel("hopper_forward", 0.0, 1e-3)])


def test_it_profiles_the_steps_that_are_due(tmp_path, on_any_device):
    found = []
    trainer = plain_trainer(tmp_path, KernelTimes(found.append, every=3, steps=(1,)), max_steps=7)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert [step.step for step in found] == [1, 3, 6]
    assert all(step.seconds > 0 and [kernel.name for kernel in step.kernels] == ["hopper_forward"] for step in found)
    trace = tmp_path / "trace.json"
    found[-1].profile.export_chrome_trace(str(trace))
    assert any("aten::" in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])


def test_a_step_that_fails_ends_the_recording(tmp_path, on_any_device, monkeypatch):
    callback = KernelTimes(print, steps=(1,))
    monkeypatch.setattr(type(tiny_module()), "on_before_zero_grad", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plain_trainer(tmp_path, callback, max_steps=2).fit(tiny_module(), datamodule=TinyData())
    assert not torch.autograd._profiler_enabled()


def test_a_fit_that_ends_within_a_step_ends_the_recording(tmp_path, on_any_device):
    stop = Hook(1, lambda trainer, _: setattr(trainer, "should_stop", True))
    trainer = plain_trainer(tmp_path, KernelTimes(print, steps=(2,)), stop, accumulate_grad_batches=2)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 1
    assert not torch.autograd._profiler_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_cpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match="KernelTimes: times the kernels of an NVIDIA GPU, and this run is on cpu"):
        plain_trainer(tmp_path, KernelTimes(print, every=1), max_steps=1).fit(tiny_module(), datamodule=TinyData())


def test_receive_must_be_a_function():
    with pytest.raises(TypeError, match="receive=5: must be a function that takes a ProfiledStep"):
        KernelTimes(5, every=1)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_the_kernels_of_a_step(tmp_path, graph):
    from flash_train.model import ModelConfig
    from flash_train.training import CausalLMModule, OptimizerConfig, build_trainer
    from tests.support.training.tiny_run import tiny_config

    config: ModelConfig = tiny_config(head_dim=64, width=128, attention_dropout=0.0, residual_dropout=0.0)
    found = []
    trainer = build_trainer(
        run_dir=tmp_path, max_steps=8, accelerator="gpu", devices=1, precision="bf16-true", cuda_graph=graph,
        checkpoints=False, progress=False, limit_val_batches=0, callbacks=[KernelTimes(found.append, steps=(6,))],
    )  # fmt: skip
    trainer.fit(CausalLMModule(config, OptimizerConfig(), attention="flash"), datamodule=TinyData())
    (step,) = found
    kinds = {kind_of(kernel.name) for kernel in step.kernels}
    assert {"attention, forward", "attention, backward", "matrix products", "norms", "loss", "optimizer"} <= kinds
    sums = report(step.kernels, step.seconds)
    assert 0 < sums["busy_seconds"] <= step.seconds
    other = sum(one["seconds"] for one in sums["kinds"] if one["kind"] == OTHER)
    assert other < 0.3 * sums["busy_seconds"]
