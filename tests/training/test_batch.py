"""Batches that a `CausalLMModule` takes and refuses, and what the model gets of them."""

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from flash_train.attention import Packing
from tests.support.training.tiny_run import packed_row, tiny_module


def fit(batch):
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(tiny_module(), DataLoader([batch], batch_size=None))


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (
            ["lengths"],
            "has positions and cu_seqlens without lengths: packed rows need positions, cu_seqlens, lengths, ",
        ),
        (["cu_seqlens"], "has positions and lengths without cu_seqlens: packed rows need"),
        (["positions", "cu_seqlens"], "has lengths without positions and cu_seqlens: packed rows need"),
        (["tokens", "labels"], "has positions, cu_seqlens, lengths: must also have tokens and labels"),
    ],
)
def test_a_batch_that_lacks_an_entry_is_refused(without, message):
    batch = {name: x for name, x in packed_row(0).items() if name not in without}
    with pytest.raises(ValueError, match=f"^batch: {message}"):
        fit(batch)


def test_batches_of_other_types_are_refused():
    with pytest.raises(
        TypeError, match=r"^batch=Tensor of shape \(1, 32\): must be a dictionary with tokens and labels"
    ):
        fit(packed_row(0)["tokens"])
    batch = {**packed_row(0), "lengths": torch.tensor(packed_row(0)["lengths"])}
    with pytest.raises(TypeError, match="^batch: lengths is a tensor: must be Python ints"):
        fit(batch)


def test_packing_for_flash_has_no_host_lengths():
    row = packed_row(0)
    module = tiny_module()
    assert isinstance(module.model_arguments(row)["packing"], Packing)
    assert module.model_arguments(row)["packing"].lengths == row["lengths"]
    module.attention = "flash"
    assert module.model_arguments(row)["packing"].lengths is None
    module.attention = "auto"
    assert module.model_arguments(row)["packing"].lengths == row["lengths"]
    with mock.patch("flash_train.training.batch.flash_unavailable", return_value=None):
        assert module.model_arguments(row)["packing"].lengths is None
