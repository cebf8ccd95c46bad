"""What can go wrong under way ends in one line, and tells scripts by its status what it was."""

import pytest
import torch

from flash_train.cli.compose import compose_config
from flash_train.cli.errors import OutOfMemoryError, UsageError, one_line_errors
from flash_train.cli.failures import known_failures
from flash_train.model import ModelConfig
from flash_train.profiling.step import Step
from flash_train.training import NonFiniteLossError

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.fixture(scope="module")
def config():
    return compose_config(["hardware=cpu"])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of GPU memory at seq_len=16384"),
        (RuntimeError(ALLOCATOR), "out of memory at seq_len=16384"),
        (MemoryError(), "out of memory at seq_len=16384"),
    ],
)
def test_exhausted_memory(config, capsys, error, says):
    with pytest.raises(SystemExit) as stop, one_line_errors(), known_failures(config):
        raise error
    assert stop.value.code == OutOfMemoryError.status == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and "memory=checkpoint" in line


def test_the_step_that_failed_is_written_down_with_a_way_out(config, tmp_path):
    model = ModelConfig(vocab_size=320, n_layers=8, width=256, n_heads=4, n_kv_heads=4, head_dim=64, mlp_width=704)
    with pytest.raises(OutOfMemoryError) as caught, known_failures(config) as under_way:
        under_way.step, under_way.run_dir = Step(model, 16384), tmp_path
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert "memory=selective takes" in str(caught.value) and "out_of_memory.md" in str(caught.value)
    text = (tmp_path / "out_of_memory.md").read_text()
    assert "Tried to allocate 2 GiB" in text and "| mlp |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_allocator_of_this_machine(config):
    with pytest.raises(OutOfMemoryError), known_failures(config):
        torch.empty(2**50, dtype=torch.uint8)


def test_other_errors_stay_what_they_are(config):
    with pytest.raises(RuntimeError, match="shape"), known_failures(config):
        raise RuntimeError("shape mismatch")
    with pytest.raises(UsageError) as caught, known_failures(config):
        raise NonFiniteLossError("the training loss is nan at step 3")
    assert caught.value.status == 1
