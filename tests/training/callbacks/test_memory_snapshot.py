"""MemorySnapshot: which steps it records, and what it refuses. Its figures are compared in `tests/profiling/memory`."""

import re

import lightning.pytorch as pl
import pytest
import torch

from flash_train.training.callbacks import MemorySnapshot
from tests.support.training.tiny_run import Hook, TinyData, plain_trainer, tiny_module


def test_it_records_the_steps_that_are_due(tmp_path):
    recorded = []
    trainer = plain_trainer(tmp_path, MemorySnapshot(recorded.append, every=3, steps=(1,)), max_steps=7)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert [step.step for step in recorded] == [1, 3, 6]
    assert all(step.profile.peak_bytes > 0 for step in recorded)


def test_a_step_that_fails_is_recorded_anew_by_the_next_fit(tmp_path):
    recorded, module = [], tiny_module()
    fail = Hook(1, lambda *_: 1 / 0)
    trainer = plain_trainer(tmp_path, MemorySnapshot(recorded.append, steps=(2,)), fail, max_steps=2)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, datamodule=TinyData())
    trainer.fit(module, datamodule=TinyData())
    (step,) = recorded
    assert step.profile.phases["step"].parts["gradients"] > 0


def test_a_fit_that_ends_within_a_step_ends_the_recording(tmp_path):
    callback = MemorySnapshot(print, steps=(2,))
    stop = Hook(1, lambda trainer, _: setattr(trainer, "should_stop", True))
    trainer = plain_trainer(tmp_path, callback, stop, accumulate_grad_batches=2)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 1
    assert not torch.autograd._profiler_enabled()


class Own(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(31, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.model(batch["tokens"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_it_records_a_module_in_a_precision_that_only_lightning_has(tmp_path):
    recorded = []
    trainer = plain_trainer(tmp_path, MemorySnapshot(recorded.append, steps=(2,)), precision="64-true")
    trainer.fit(Own(), datamodule=TinyData())
    (step,) = recorded
    assert step.profile.peak_bytes > 0


@pytest.mark.parametrize(
    ("receive", "options", "error", "message"),
    [
        ("memory", {"every": 1}, TypeError, "receive='memory': must be a function that takes a RecordedStep"),
        (print, {"every": 2.0}, ValueError, "every=2.0: must be an integer of at least 1, or None for the given steps"),
        (print, {"every": 0}, ValueError, "every=0: must be an integer of at least 1, or None for the given steps"),
        (print, {"steps": (0,)}, ValueError, "steps=0: must be an integer of at least 1"),
        (print, {"steps": 5}, TypeError, "steps=5: must be several numbers of steps, such as (1, 100)"),
        (print, {}, ValueError, "every=None, steps=(): must be one of both, or no step is recorded"),
    ],
)
def test_arguments_that_record_nothing_are_refused(receive, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        MemorySnapshot(receive, **options)
