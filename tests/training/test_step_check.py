"""A step on one device, and how it is compared with a step on several."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer

from flash_train.training.step_check import CheckedStep, StepValues, compare, take_step, take_step_alone
from tests.support.training.tiny_run import packed_row, tiny_config

CPU = torch.device("cpu")


def checked_step(precision: str = "bf16-true", **changes) -> CheckedStep:
    batches = [{**packed_row(i), "places": (i,)} for i in range(2)]
    config = tiny_config(attention_dropout=0.0)
    return CheckedStep(config, batches, precision, attention="standard", memory="none", seed=1, **changes)


@pytest.fixture(scope="module")
def values() -> tuple[StepValues, StepValues]:
    """The step in bf16-true, and in fp32."""
    step = checked_step()
    return take_step_alone(step, CPU, exact=False), take_step_alone(step, CPU, exact=True)


def test_the_exact_step_has_the_rounded_weights_in_fp32(values):
    own, exact = values
    assert all(gradient.dtype == torch.bfloat16 for gradient in own.gradients.values())
    assert all(gradient.dtype == torch.float32 for gradient in exact.gradients.values())
    assert 0 < abs(own.loss - exact.loss) < 0.02 * exact.loss


def test_the_same_step_agrees(values):
    own, exact = values
    assert compare(own, own, exact, "bf16-true").error <= 1.0
    assert compare(own, own, exact, "bf16-true").holds


def test_a_trainer_takes_the_step_without_a_warning_about_validation(tmp_path):
    step = replace(checked_step("fp32"), batches=[{**packed_row(0), "places": (0,)}])
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=1, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*val_dataloader", category=PossibleUserWarning)
        found = take_step(step, step.module(), trainer)
    assert found.gradients.keys() == take_step_alone(step, CPU, exact=True).gradients.keys()


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.1.attention.k.weight", "norm.weight"])
@pytest.mark.parametrize("value", [0.5, math.nan, math.inf], ids=str)
def test_another_gradient_does_not_agree(values, name, value):
    own, exact = values
    wrong = own.gradients[name].clone()
    wrong.view(-1)[3] += value
    found = compare(replace(own, gradients={**own.gradients, name: wrong}), own, exact, "bf16-true")
    assert found.worst == name and not found.holds


@pytest.mark.parametrize("loss", [5.0, math.nan])
def test_another_loss_does_not_agree(values, loss):
    own, exact = values
    found = compare(replace(own, loss=loss), own, exact, "bf16-true")
    assert found.worst == "loss" and not found.holds


def test_one_device_has_the_dropout_masks_of_ranks_that_share_a_row():
    """The standard attention draws other masks, unless it gets the state that ranks share."""
    config = tiny_config(attention_dropout=0.3, residual_dropout=0.0)
    alone, shared = (
        take_step_alone(replace(checked_step("fp32", context=context), model=config), CPU, exact=True)
        for context in (1, 2)
    )
    reference = replace(checked_step("fp32"), model=config, attention="reference")
    assert take_step_alone(reference, CPU, exact=True).loss == shared.loss != alone.loss
