"""What prevents a CUDA graph is found before the run begins."""

from types import SimpleNamespace

import pytest
import torch

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UnavailableError, UsageError
from flash_train.cli.run.build import graph_note
from flash_train.training import CudaGraph


def note(mode, device):
    """The note of a run on several devices."""
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(strategy=strategy, callbacks=[CudaGraph(mode)])
    return graph_note(compose_config(), SimpleNamespace(row_tokens=64), trainer, None)


@pytest.mark.parametrize(
    ("device", "error", "obstacle"),
    [
        ("cpu", UnavailableError, "there is no NVIDIA GPU"),
        ("cuda", UsageError, "several devices exchange tensors within a step"),
    ],
)
def test_a_graph_that_cannot_be_captured(device, error, obstacle):
    with pytest.raises(UsageError, match=f"^trainer.cuda_graph=true: {obstacle}; allowed: auto or false$") as caught:
        note(True, device)
    assert type(caught.value) is error
    assert note("auto", device) == (None if device == "cpu" else f"none ({obstacle})")
    assert note(False, device) is None
