"""Training with `in_backward` is the same training, bit for bit, and what prevents it is named."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from flash_train.training import CausalLMModule, OptimizerConfig, build_trainer, newest_checkpoint
from tests.support.tiers import slow_after
from tests.support.training.tiny_run import TinyData, packed_row, tiny_config, tiny_module, tiny_trainer

AFTER = OptimizerConfig(lr=1e-2, warmup_steps=2, gradient_clip=None)
WITHIN = replace(AFTER, in_backward=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Steps(pl.Callback):
    """Collects what each optimizer step reported."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = pl_module.last_step
        self.found.append((step.step, step.loss.item(), step.gradient_norm.item(), step.learning_rate))
        assert all(parameter.grad is None for parameter in pl_module.parameters())


def train(tmp_path, optimizer, *, precision="bf16-true", device="cpu", **options):
    torch.manual_seed(0)
    config = tiny_config(head_dim=64, width=128, vocab_size=31) if device == "cuda" else tiny_config()
    attention = "triton" if device == "cuda" else "auto"
    module = CausalLMModule(config, optimizer, attention=attention, **options)
    found = Steps()
    trainer = build_trainer(
        run_dir=tmp_path, max_steps=5, precision=precision, accelerator=device,
        checkpoints=False, progress=False, cuda_graph=False, limit_val_batches=0, callbacks=[found],
    )  # fmt: skip
    trainer.fit(module, DataLoader([packed_row(index) for index in range(5)], batch_size=None))
    return found.found, [parameter.detach().cpu() for parameter in module.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", slow_after(1, ["checkpoint", "selective", "none"]))
@pytest.mark.parametrize("precision", slow_after(1, ["bf16-true", "bf16-mixed", "fp32"]))
def test_training_is_the_same(tmp_path, precision, memory, device):
    """Also losses and learning rates. PyTorch's own norm of the gradients differs in the last bits."""
    settings = {"precision": precision, "memory": memory, "device": device}
    formats = {"moments": "fp32"} if precision != "bf16-true" else {}  # so that both have this project's AdamW
    steps, weights = train(tmp_path / "within", replace(WITHIN, **formats), **settings)
    wanted, others = train(tmp_path / "after", replace(AFTER, **formats), **settings)
    for found, step in zip(steps, wanted, strict=True):
        assert (found[:2], found[3]) == (step[:2], step[3])
        assert found[2] == pytest.approx(step[2], rel=1e-6)
    for weight, other in zip(weights, others, strict=True):
        assert torch.equal(weight, other)
    assert len(steps) == 5 and steps[0][1] != steps[-1][1]


@pytest.mark.parametrize("formats", [{}, {"master": "stochastic", "moments": "8bit"}], ids=str)
def test_a_run_resumes_bit_for_bit(tmp_path, formats):
    """Into a run that takes its steps after the backward, too."""
    optimizer = replace(WITHIN, **formats)
    options = {"precision": "bf16-true", "accumulate": 1, "max_steps": 6}
    tiny_trainer(tmp_path / "whole", **options).fit(tiny_module(optimizer=optimizer), datamodule=TinyData())
    stopped = tiny_trainer(tmp_path / "stopped", stop_after=3, **options)
    stopped.fit(tiny_module(optimizer=optimizer), datamodule=TinyData())
    half = newest_checkpoint(tmp_path / "stopped" / "checkpoints")
    for name, settings in (("within", optimizer), ("after", replace(AFTER, **formats))):
        module = tiny_module(optimizer=settings, seed=9)
        tiny_trainer(tmp_path / name, **options).fit(module, datamodule=TinyData(), ckpt_path=half)
        runs = (tmp_path / name, tmp_path / "whole")
        ours, whole = (torch.load(newest_checkpoint(run / "checkpoints"), weights_only=True) for run in runs)
        assert ours["global_step"] == 6
        assert all(torch.equal(ours["state_dict"][weight], value) for weight, value in whole["state_dict"].items())


def test_what_prevents_it_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"in_backward=true: .*gradient_clip=1.0 cannot clip; allowed: .*=null"):
        replace(WITHIN, gradient_clip=1.0)
    for options, says in (
        ({"accumulate": 2}, "a step has 2 micro-batches"),
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5 needs the norm"),
        ({"strategy": "ddp", "devices": 2}, "several devices exchange their gradients"),
    ):
        accumulate = options.pop("accumulate", 1)
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=1, accumulate_grad_batches=accumulate, logger=False, default_root_dir=tmp_path,
            enable_checkpointing=False, enable_progress_bar=False, **options,
        )  # fmt: skip
        module = tiny_module(optimizer=WITHIN)
        module.trainer = trainer
        with pytest.raises(ValueError, match=rf"optimizer.in_backward=true: {says}.*; allowed: "):
            module.configure_optimizers()


@pytest.mark.gpu
def test_it_prevents_a_graph(tmp_path):
    trainer = build_trainer(
        run_dir=tmp_path, max_steps=1, accelerator="cuda", checkpoints=False, progress=False, cuda_graph=True,
        limit_val_batches=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="cuda_graph=true: optimizer.in_backward updates weights"):
        trainer.fit(tiny_module(attention="triton", optimizer=WITHIN), DataLoader([packed_row(0)], batch_size=None))
