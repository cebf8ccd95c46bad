"""Failures during a run end in one line, and the exit status says which kind it was."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb
from lightning.pytorch.loggers import WandbLogger

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import OutOfMemoryError, UsageError, one_line_errors
from flash_train.cli.run import failures
from flash_train.cli.run.failures import known_failures
from flash_train.cli.train import main
from flash_train.model import ModelConfig
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.training import CausalLMModule, NonFiniteLossError
from flash_train.training.callbacks import SnapshotOnError

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
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out of memory at seq_len=16384"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out of memory"),
    ],
)
def test_exhausted_memory_exits_with_4_and_advice(config, capsys, error, says):
    with pytest.raises(SystemExit) as stop, one_line_errors(), known_failures(config):
        raise error
    assert stop.value.code == OutOfMemoryError.status == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and "memory=checkpoint" in line


def test_exhausted_memory_writes_a_table_and_advises_a_setting(config, tmp_path):
    model = ModelConfig(vocab_size=320, n_layers=8, width=256, n_heads=4, n_kv_heads=4, head_dim=64, mlp_width=704)
    with pytest.raises(OutOfMemoryError) as caught, known_failures(config) as under_way:
        under_way.step, under_way.run_dir = Step(model, 16384), tmp_path
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert "memory=selective takes" in str(caught.value) and "out_of_memory.md" in str(caught.value)
    text = (tmp_path / "out_of_memory.md").read_text()
    assert "Tried to allocate 2 GiB" in text and "| mlp |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_the_advised_setting_fits_the_device(config, tmp_path, monkeypatch):
    """memory=selective saves something, but not enough."""
    model = ModelConfig(vocab_size=320, n_layers=8, width=256, n_heads=4, n_kv_heads=4, head_dim=64, mlp_width=704)
    limit = predict(Step(model, 16384, memory="checkpoint")).peak_bytes
    monkeypatch.setattr(failures, "total_memory_of", lambda device: limit)
    monkeypatch.setattr(failures, "flash_runs", lambda step, device: True)
    with pytest.raises(OutOfMemoryError, match="GPU memory .*memory=checkpoint takes"), known_failures(config) as way:
        way.step, way.device, way.run_dir = Step(model, 16384), torch.device("cuda"), tmp_path
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_the_snapshot_is_taken_before_the_device_is_freed(tiny, in_this_process, monkeypatch, tmp_path):
    """Lightning moves the model off the device before the error reaches the command."""
    seen = []

    def step(module, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def look(watch, trainer, module, error):
        seen.append((trainer.callbacks.index(watch), trainer.strategy.lightning_module is module))
        watch.snapshot = {"segments": []}

    monkeypatch.setattr(CausalLMModule, "training_step", step)
    monkeypatch.setattr(SnapshotOnError, "on_exception", look)
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = []
    monkeypatch.setattr(failures, "log_artifact", lambda logger, _, files: logged.append((type(logger), len(files))))
    moved, move = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: moved.append(Path(new).name) or move(old, new))
    code, errors = in_this_process(main)(*tiny, "callbacks.memory_snapshot.every=1", "logger=wandb")
    wandb.finish()  # a command's process does so when it ends
    assert code == OutOfMemoryError.status and "out_of_memory.md, out_of_memory.pickle" in errors[-1]
    assert logged == [(WandbLogger, 2)]
    assert seen == [(0, True)] and (tmp_path / "run" / "out_of_memory.pickle").is_file()
    assert {"out_of_memory.md", "out_of_memory.pickle"} <= set(moved)  # whole or not at all


def test_a_snapshot_is_taken_only_when_cuda_memory_is_exhausted(monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: f"of {device}")
    cases = (("cuda", torch.OutOfMemoryError(), "of cuda"), ("cuda", ValueError(), None), ("cpu", MemoryError(), None))
    for device, error, expected in cases:
        watch = SnapshotOnError()
        watch.on_exception(None, SimpleNamespace(device=torch.device(device)), error)
        assert watch.snapshot == expected


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(ALLOCATOR)])
def test_exhausted_host_memory_is_not_reported_as_gpu_memory(config, error):
    with pytest.raises(UsageError, match="^out of memory at"), known_failures(config) as under_way:
        under_way.device = torch.device("cuda")
        raise error


def test_only_the_first_rank_reports(config, capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors(), known_failures(config) as under_way:
        under_way.rank = 1
        raise NonFiniteLossError("the training loss is nan at step 3")
    assert stop.value.code == 1
    assert capsys.readouterr().err == ""


def test_exhausted_memory_names_the_rank(config):
    with pytest.raises(OutOfMemoryError, match="^out of GPU memory on rank 3 at"), known_failures(config) as under_way:
        under_way.rank, under_way.ranks = 3, 4
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), 4),
        (NonFiniteLossError("nan"), 1),
        (KeyError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=str,
)
def test_other_ranks_exit_with_the_status_of_the_error(error, status):
    assert failures.exit_status(error) == status


def test_pytorchs_real_allocation_error_is_recognised(config):
    with pytest.raises(OutOfMemoryError), known_failures(config):
        torch.empty(2**50, dtype=torch.uint8)


def test_other_errors_keep_their_type(config):
    with pytest.raises(RuntimeError, match="shape"), known_failures(config):
        raise RuntimeError("shape mismatch")
    with pytest.raises(UsageError) as caught, known_failures(config):
        raise NonFiniteLossError("the training loss is nan at step 3")
    assert caught.value.status == 1


def test_a_last_step_that_diverges_fails_the_run(tiny, in_this_process, tmp_path):
    """The loss of that step was finite. Sampling from NaN ended the run in a stack trace."""
    diverging = ("optimizer.lr=1e38", "optimizer.gradient_clip=null", "optimizer.warmup_steps=0", "max_steps=1")
    code, errors = in_this_process(main)(*tiny, *diverging, "callbacks.sample.tokens=4")
    assert code == 1
    assert len(errors) == 1 and "the validation loss is nan after step 1, the last one: lower optimizer.lr" in errors[0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
