"""SLURM's signal before the time limit: the run saves a checkpoint and requeues the job."""

import os
import signal
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from flash_train.training import SaveOnSignal, SlurmRequeue, StepCheckpoint, Throughput, newest_checkpoint
from tests.support.processes import Process
from tests.support.training.tiny_run import Hook, TinyData, plain_trainer, read_metrics, tiny_module, tiny_trainer

JOB = {
    **{"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1234"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
}


def fake_scontrol(folder: Path, status: int = 0) -> dict[str, str]:
    """The environment of a SLURM job whose `scontrol` appends its arguments to `folder/asked`."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n[ {status} = 0 ] || echo denied >&2\nexit {status}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {**JOB, "PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name, value in fake_scontrol(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "asked"


def send(step: int, number: int = signal.SIGUSR1) -> Hook:
    return Hook(step, lambda trainer, pl_module: os.kill(os.getpid(), number))


def test_the_signal_saves_at_the_next_step_and_queues_the_job(tmp_path, job, capfd):
    before = signal.getsignal(signal.SIGUSR1)
    trainer = tiny_trainer(tmp_path / "run", max_steps=100, callbacks=[send(2)])
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-000003.ckpt"
    assert not list((tmp_path / "run").glob("hpc_ckpt*"))
    assert job.read_text() == "requeue 1234\n"
    assert "SLURM job 1234: requeued" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_job_of_an_array_is_queued_by_its_number_in_it(tmp_path, job, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    tiny_trainer(tmp_path / "run", callbacks=[send(2)]).fit(tiny_module(), datamodule=TinyData())
    assert job.read_text() == "requeue 77_3\n"


def test_the_signal_that_the_environment_names_is_the_one(tmp_path, job):
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    trainer = plain_trainer(
        tmp_path, SaveOnSignal(), SlurmRequeue(), StepCheckpoint(tmp_path / "c"), send(1, signal.SIGUSR2),
        plugins=[environment], max_steps=9,
    )  # fmt: skip
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert newest_checkpoint(tmp_path / "c").name == "step-000002.ckpt" and job.read_text() == "requeue 1234\n"


@pytest.mark.parametrize("status", [1, None])
def test_job_that_cannot_be_queued_keeps_its_checkpoint_and_prints_a_line(status, tmp_path, monkeypatch, capfd):
    environment = fake_scontrol(tmp_path, status or 0)
    if status is None:
        environment["PATH"] = str(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tiny_trainer(tmp_path / "run", callbacks=[send(2)]).fit(tiny_module(), datamodule=TinyData())
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-000003.ckpt"
    reason = "denied" if status else r"\[Errno 2\] No such file or directory: 'scontrol'"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "scontrol" in line]
    assert line == f"flash-train: scontrol requeue 1234 failed: {reason.replace(chr(92), '')}"


def test_another_signal_queues_nothing(tmp_path, job):
    trainer = plain_trainer(tmp_path, SaveOnSignal(), SlurmRequeue(), send(1, signal.SIGTERM))
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 2 and not job.exists()


@pytest.mark.parametrize("how", ["no requeue", "own handler", "no SLURM"])
def test_signal_handler_is_unchanged_otherwise(how, tmp_path, job, monkeypatch):
    def own(number, frame):
        pass

    options, found = {}, []
    before = signal.signal(signal.SIGUSR1, own) if how == "own handler" else signal.getsignal(signal.SIGUSR1)
    if how == "no requeue":
        options = {"plugins": [SLURMEnvironment(auto_requeue=False)]}
    elif how == "no SLURM":
        monkeypatch.delenv("SLURM_NTASKS")
    look = Hook(1, lambda *_: found.append(signal.getsignal(signal.SIGUSR1)))
    try:
        plain_trainer(tmp_path, SaveOnSignal(), SlurmRequeue(), look, **options).fit(
            tiny_module(), datamodule=TinyData()
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [own if how == "own handler" else before]


def test_the_first_rank_queues_the_job_though_another_rank_alone_had_the_signal(job):
    """Ranks stop after the step at which any of them has received it; the first rank may receive its signal later."""

    class Strategy:
        def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
            assert not decision and not all
            return True  # the other rank's

    trainer = SimpleNamespace(world_size=2, strategy=Strategy(), is_global_zero=True)
    callback = SlurmRequeue()
    callback._number, callback._signals = signal.SIGUSR1, SimpleNamespace(received="another rank's signal")
    callback.on_train_end(trainer, None)
    callback.teardown(trainer, None, "fit")
    assert job.read_text() == "requeue 1234\n"


def test_requeue_needs_the_stop_callback(tmp_path):
    with pytest.raises(ValueError, match=r"SlurmRequeue needs SaveOnSignal before it: Trainer\(callbacks="):
        plain_trainer(tmp_path, SlurmRequeue(), SaveOnSignal()).fit(tiny_module(), datamodule=TinyData())


@pytest.mark.parametrize("where", ["on_train_start", "on_train_batch_start", "on_after_backward", "on_train_batch_end"])
def test_lightnings_own_handler_saves_with_throughput_in_any_hook(where, tmp_path, job):
    """Without `SlurmRequeue`, the next `Trainer` begins with the checkpoint that Lightning saved at SLURM's signal."""

    def at_step_two(self, trainer, pl_module, *rest):
        if trainer.global_step == (0 if where == "on_train_start" else 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0)  # lets Python run the handler here

    callback = type("Send", (pl.Callback,), {where: at_step_two})()
    trainer = plain_trainer(tmp_path, callback, Throughput(), max_steps=4)
    trainer.fit(tiny_module(), datamodule=TinyData())
    assert trainer.global_step == 4 and job.read_text().startswith("requeue 1234\n")
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] == (0 if where == "on_train_start" else 2)
    resumed = plain_trainer(tmp_path, Throughput(), max_steps=6)
    resumed.fit(tiny_module(), datamodule=TinyData(), weights_only=True)
    assert resumed.global_step == 6 and "hpc_ckpt_" in str(resumed.ckpt_path)


@pytest.mark.slow
def test_a_queued_run_resumes_bit_for_bit(tmp_path):
    """One process gets SLURM's signal at any moment, another resumes the run; a third run never stops."""
    run_dir = tmp_path / "run"
    run = Process("tests.support.training.tiny_run", run_dir, environment=fake_scontrol(tmp_path))
    deadline = time.monotonic() + 120
    while not ((run_dir / "metrics.csv").exists() and len((run_dir / "metrics.csv").read_text().splitlines()) > 6):
        assert run.returncode is None and time.monotonic() < deadline, "the run wrote no metrics"
        time.sleep(0.02)
    run.send_signal(signal.SIGUSR1)
    output, _ = run.communicate()
    assert run.returncode == 0 and "after fit" in output
    assert (tmp_path / "asked").read_text() == "requeue 1234\n"
    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    steps = int(read_metrics(run_dir)[-1]["step"])
    assert checkpoint.name == f"step-{steps:06d}.ckpt"
    options = {"val_every": 5, "max_steps": 100_000}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tiny_trainer(run_dir, stop_after=4, **options).fit(
            tiny_module(seed=9), datamodule=TinyData(), ckpt_path=checkpoint
        )
        tiny_trainer(tmp_path / "through", stop_after=steps + 4, **options).fit(tiny_module(), datamodule=TinyData())
    finally:
        torch.set_num_threads(threads)
    names = ("step", "train/loss", "train/gradient_norm")
    rows = [[[row[name] for name in names] for row in read_metrics(f)] for f in (run_dir, tmp_path / "through")]
    assert rows[0] == rows[1]
