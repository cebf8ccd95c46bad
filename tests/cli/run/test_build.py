"""What prevents a CUDA graph is found before the run begins."""

from types import SimpleNamespace

import pytest
import torch

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UnavailableError, UsageError
from flash_train.cli.run.build import decide_graph
from flash_train.model import ModelConfig
from flash_train.profiling.memory.step import Step
from flash_train.training import CudaGraph


def note(mode, device):
    """The note of a run on several devices."""
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer = SimpleNamespace(strategy=strategy, callbacks=[CudaGraph(mode)])
    step = SimpleNamespace(row_tokens=64)
    decided, said = decide_graph(compose_config(), step, trainer, None)
    assert decided is step
    return said


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


def test_a_graph_that_will_be_captured_is_in_the_predicted_memory(monkeypatch):
    monkeypatch.setattr(CudaGraph, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr("flash_train.cli.run.build.shortage_for_graph", lambda *_: None)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), callbacks=[CudaGraph("auto")])
    model = ModelConfig(vocab_size=320, n_layers=1, width=64, n_heads=2, n_kv_heads=2, head_dim=32, mlp_width=128)
    step = Step(model, 512, workspace=2**26)
    decided, said = decide_graph(compose_config(), step, trainer, None)
    assert decided.captured and not step.captured
    assert said.endswith("captured after the second one, and replayed, for 64 MiB of memory")
