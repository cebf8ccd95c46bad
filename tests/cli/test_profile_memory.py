"""Memory: the profile of a step, and the check before a run begins."""

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from flash_train.cli import profile_memory, train
from flash_train.cli.config.errors import UsageError
from flash_train.cli.memory import check as command
from flash_train.cli.run import memory_files
from flash_train.distributed.dims import ParallelDims
from flash_train.model import ModelConfig
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import bytes_in_words
from tests.support.processes import run_ranks

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(vocab_size=320, n_layers=8, width=512, n_heads=8, n_kv_heads=8, head_dim=64, mlp_width=1408)
LARGE = replace(MODEL, width=2048, mlp_width=5632)  # whose state can be in the host's memory


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["flash-train-memory", *arguments])
    profile_memory.main()


@pytest.mark.parametrize("memory", ["none", "checkpoint"])
def test_all_files(monkeypatch, capsys, tiny, tmp_path, memory):
    run(monkeypatch, *tiny, "seq_len=256", f"memory={memory}", "memory.keep=0.4")  # of one block, 0.4 is none
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} >= {"memory.json", "memory.md", "memory.html", "memory.png"}
    found = json.loads((folder / "memory.json").read_text())
    assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.1)
    parts = sum(part["measured_bytes"] for part in found["parts"].values())
    assert parts == found["measured_peak_bytes"]
    assert list(found["phases"]) == ["forward", "backward", "step"] and list(found["blocks"]) == ["blocks.0"]
    out = capsys.readouterr().out
    assert "MiB measured" in out and "\nvalidation:" not in out  # the run validates nothing
    assert ("\nmemory.keep: 0.4 has no effect with memory=none" in out) == (memory == "none")
    page = (folder / "memory.html").read_text()
    assert "data:image/png;base64," in page and not re.search(r"(src|href)=.?http", page)
    assert not list(folder.rglob("*.ckpt"))


def test_a_compiled_profile_says_what_its_prediction_is_for(monkeypatch, capsys, tiny, tmp_path):
    write = memory_files.write_memory

    def of_compiled(config, *arguments):  # compiling takes longer than all of this file's tests
        config.compile = True
        write(config, *arguments)

    monkeypatch.setattr(memory_files, "write_memory", of_compiled)
    run(monkeypatch, *tiny)
    note = "; the prediction is for the model without compile=true"
    assert note in capsys.readouterr().out and note in (tmp_path / "run" / "memory.md").read_text()


def test_a_profile_with_a_progress_bar(monkeypatch, tiny, tmp_path):
    run(monkeypatch, *tiny, "trainer.progress_bar=true")
    assert (tmp_path / "run" / "memory.json").exists()


def test_snapshot_is_written_atomically(monkeypatch, tiny, tmp_path):
    moved, move, write = [], os.replace, memory_files.write_memory

    def with_snapshot(config, parts, recorded, folder):
        write(config, parts, replace(recorded, snapshot={"segments": []}), folder)

    monkeypatch.setattr(memory_files, "write_memory", with_snapshot)
    monkeypatch.setattr(os, "replace", lambda old, new: moved.append(Path(new).name) or move(old, new))
    run(monkeypatch, *tiny)
    assert "snapshot.pickle" in moved
    assert pickle.loads((tmp_path / "run" / "snapshot.pickle").read_bytes()) == {"segments": []}


def full_disk(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_profile_that_cannot_be_written_is_one_line(monkeypatch, capsys, tiny, tmp_path):
    monkeypatch.setattr(memory_files, "plot_memory", full_disk)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *tiny)
    assert stop.value.code == 1
    assert f"flash-train: run_dir={tmp_path / 'run'}: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_does_not_end_the_run(monkeypatch, capsys, tiny, tmp_path):
    monkeypatch.setattr(memory_files, "plot_memory", full_disk)
    monkeypatch.setattr("sys.argv", ["flash-train", *tiny, "max_steps=2", "callbacks.memory_snapshot.every=2"])
    train.main()
    folder = tmp_path / "run" / "memory" / "step-000002"
    assert f"{folder} not written (No space left on device); the run continues" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_training_run_records_steps_on_demand(tiny, tmp_path):
    arguments = [*tiny, "callbacks.memory_snapshot.every=2", "accumulate=2", "attention=standard"]
    run_ranks("flash_train.cli.train", 1, *arguments)
    (folder,) = (tmp_path / "run" / "memory").iterdir()
    assert folder.name == "step-000002"
    found = json.loads((folder / "memory.json").read_text())
    assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.1)
    assert (tmp_path / "run" / "metrics.csv").is_file()


@pytest.mark.parametrize(
    "plan", [["parallel=fsdp"], ["parallel=ddp", "memory=checkpoint", "memory.keep=auto"]], ids=["fsdp", "ddp"]
)
def test_a_step_of_two_ranks_is_predicted_and_recorded(tiny, tmp_path, plan):
    out = run_ranks("flash_train.cli.train", 2, *tiny, *plan, "callbacks.memory_snapshot.every=3", "seq_len=256")
    printed = [line.partition(":")[0] for line in out.splitlines()]
    assert printed.count("parallel") == 1 and printed.count("memory") == 1
    assert printed.count("memory.keep") == ("memory.keep=auto" in plan)
    if "parallel=fsdp" in plan:  # DDP's buckets are older than the recording, which cannot see them on a CPU
        found = json.loads((tmp_path / "run" / "memory" / "step-000003" / "memory.json").read_text())
        assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_profile_of_two_ranks_is_written_once(tiny, tmp_path, torchrun):
    script = str(ROOT / "scripts" / "profile_memory.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *launcher, script, *tiny, "parallel=fsdp", "trainer.devices=2", "seq_len=256"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("MiB measured") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "corpus", "run"}
    found = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert found["predicted_peak_bytes"] == pytest.approx(found["measured_peak_bytes"], rel=0.05)


def test_help_needs_no_run(monkeypatch, capsys):
    run(monkeypatch, "--help")
    assert "seq_len=16384" in capsys.readouterr().out


def test_mistakes_are_one_line(monkeypatch, capsys, tiny):
    with pytest.raises(SystemExit):
        run(monkeypatch, *tiny, "seq_len=many")
    assert "seq_len=many: needs an integer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, *[text for text in tiny if "max_steps" not in text], "max_steps=few")
    assert "max_steps=few: needs an integer" in capsys.readouterr().err
    run_dir = next(text.partition("=")[2] for text in tiny if text.startswith("run_dir="))
    Path(run_dir).mkdir()
    (Path(run_dir) / "summary.json").touch()
    with pytest.raises(SystemExit):
        run(monkeypatch, *tiny)
    assert f"run_dir={run_dir}: holds a run; allowed: another folder" in capsys.readouterr().err


def test_rows_of_a_few_tokens_are_profiled(monkeypatch, tiny, tmp_path):
    run(monkeypatch, *tiny, "seq_len=3")
    assert (tmp_path / "run" / "memory.png").is_file()


def test_two_steps_are_too_few_to_profile(monkeypatch, capsys, tiny):
    with pytest.raises(SystemExit):
        run(monkeypatch, *tiny, "max_steps=2")
    assert "max_steps=2: must be 3 or more; the last step is recorded" in capsys.readouterr().err


def test_a_profile_that_cannot_fit_is_refused_too(monkeypatch, capsys, tiny, tmp_path):
    monkeypatch.setattr(command, "free_memory_of", lambda device: 2**14)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *tiny)
    assert stop.value.code == 4 and "there are 0 MiB" in capsys.readouterr().err
    assert not (tmp_path / "run" / "memory.json").exists()


def test_several_values_are_refused(monkeypatch, capsys, tiny):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *tiny, "seed=0,1")
    assert stop.value.code == 1 and "seed=0,1: several values, and one run is profiled" in capsys.readouterr().err


def config(**values):
    base = {
        "seq_len": 16384, "batch_size": 1, "accumulate": 1, "precision": "bf16-mixed",
        "memory": {"mode": "none", "offload": 0.0}, "optimizer": {"offload": True},
        "trainer": {"devices": 1, "num_nodes": 1}, "compile": False, "force": False, "data": {"packing": "best_fit"},
    }  # fmt: skip
    return OmegaConf.create(base | values)


def test_a_run_that_cannot_fit_is_refused_with_one_that_would(monkeypatch, capsys):
    step = Step(MODEL, 16384)
    limit = predict(Step(MODEL, 16384, memory="selective")).peak_bytes
    monkeypatch.setattr(command, "free_memory_of", lambda device: limit)
    device = torch.device("cpu")
    with pytest.raises(UsageError, match=r"seq_len=16384 .*memory=selective would fit, or force=true"):
        command.check_memory(config(), step, device)
    assert "predicted at the peak of a step" in capsys.readouterr().out
    command.check_memory(config(force=True), step, device)


def test_a_run_that_the_hosts_memory_cannot_hold_is_refused(monkeypatch, capsys):
    step = Step(LARGE, 1024, precision="bf16-true", offload_optimizer=True)
    host = predict(step).host_bytes
    monkeypatch.setattr(command, "free_memory_of", lambda device: 2**40)
    monkeypatch.setattr(command, "total_memory_of", lambda device: int(host / 0.9) + 2)
    command.check_memory(config(), step, torch.device("cpu"))
    assert f"; {bytes_in_words(host)} in the host's memory" in capsys.readouterr().out
    monkeypatch.setattr(command, "total_memory_of", lambda device: int(host / 0.9) - 2)
    with pytest.raises(
        UsageError, match=r"^optimizer.offload=true memory.offload=0.0: each process would take .* of the host's memory"
    ):
        command.check_memory(config(), step, torch.device("cpu"))
    command.check_memory(config(force=True), step, torch.device("cpu"))
    monkeypatch.setattr(command, "total_memory_of", lambda device: 2**40)
    checkpoint = replace(step, memory="checkpoint", moments="8bit")
    limit = predict(checkpoint).peak_bytes
    assert command.advice(replace(checkpoint, offload_optimizer=False), limit, True) == (
        "memory=checkpoint optimizer.offload=true would fit"
    )


def test_each_rank_of_a_cpu_has_its_share_of_the_memory(monkeypatch, capsys):
    step = Step(MODEL, 4096, dims=ParallelDims(1, 4), memory="checkpoint")
    several, device = config(trainer={"devices": 4, "num_nodes": 1}), torch.device("cpu")
    monkeypatch.setattr(command, "total_memory_of", lambda device: 4 * predict(step).peak_bytes)
    command.check_memory(several, step, device)
    assert " on each device (" in capsys.readouterr().out
    monkeypatch.setattr(command, "total_memory_of", lambda device: 4 * predict(step).peak_bytes - 4)
    with pytest.raises(UsageError, match=r"on each device and there are .*; memory=offload would fit"):
        command.check_memory(several, step, device)


def test_keys_of_other_devices_refuse_no_step_that_fits_without_them(monkeypatch, capsys):
    step = Step(MODEL, 65536, dims=ParallelDims(1, 4, 4), memory="checkpoint", precision="bf16-true")
    several, device = config(trainer={"devices": 4, "num_nodes": 1}), torch.device("cpu")
    alone = predict(replace(step, lengths=(16384,) * 4)).peak_bytes
    assert alone < predict(step).peak_bytes
    monkeypatch.setattr(command, "total_memory_of", lambda device: 4 * alone)
    command.check_memory(several, step, device)
    assert "memory: at most about" in capsys.readouterr().out
    concat = config(trainer={"devices": 4, "num_nodes": 1}, data={"packing": "concat"})
    for too_much, bytes_each in ((concat, alone), (several, alone - 1)):
        monkeypatch.setattr(command, "total_memory_of", lambda device, each=bytes_each: 4 * each)
        with pytest.raises(UsageError, match="would take"):
            command.check_memory(too_much, step, device)


def test_all_memory_of_a_cpu_is_available():
    device = torch.device("cpu")
    assert command.free_memory_of(device) == command.total_memory_of(device)


def test_sdpa_is_proposed_if_flash_cannot_run():
    step = Step(MODEL, 16384, attention="standard", fused=False)
    limit = predict(Step(MODEL, 16384, attention="sdpa", fused=False)).peak_bytes
    assert command.advice(step, limit, flash=False) == "attention=sdpa would fit"
    offered = [words for words, _ in command.alternatives(Step(MODEL, 512, attention="sdpa"), flash=False)]
    assert not any("attention" in words for words in offered)


def test_a_container_may_have_less_than_its_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "CONTAINER", tmp_path / "memory.max")
    machine = command.total_memory_of(torch.device("cpu"))
    assert machine > 2**28
    for text, expected in (("max\n", machine), (f"{2**27}\n", 2**27), (f"{2**60}\n", machine)):
        command.CONTAINER.write_text(text)
        assert command.total_memory_of(torch.device("cpu")) == expected


@pytest.mark.parametrize("attention", ["standard", "chunked", "sdpa"])
def test_a_peak_that_depends_on_the_documents_refuses_no_run(monkeypatch, capsys, attention):
    """sdpa on a CPU has no kernel for dropout, so it holds whole score matrices as `standard` does."""
    monkeypatch.setattr(command, "free_memory_of", lambda device: 2**20)
    model = replace(MODEL, attention_dropout=0.1 if attention == "sdpa" else 0.0)
    step, device = Step(model, 16384, attention=attention, fused=False), torch.device("cpu")
    command.check_memory(config(), step, device)
    assert "memory: at most" in capsys.readouterr().out
    with pytest.raises(UsageError):
        command.check_memory(config(data={"packing": "concat"}), step, device)


def test_the_first_setting_that_fits_is_the_cheapest():
    step = Step(MODEL, 8192, batch_size=2)
    peaks = {words: predict(other).peak_bytes for words, other in command.alternatives(step, flash=True)}
    assert list(peaks)[:3] == ["memory=selective", "memory=checkpoint", "memory=offload"]
    assert list(peaks)[3] == "memory=checkpoint batch_size=1 accumulate=2"
    for peak in peaks.values():
        first = next(other for other, size in peaks.items() if size <= peak)
        assert command.advice(step, peak, flash=True) == f"{first} would fit"
    assert "smaller model" in command.advice(Step(MODEL, 8192), 2**20, flash=True)
    assert not any("in_backward" in words for words in peaks)  # its gradients are summed over micro-batches


def test_updates_within_the_backward_are_offered_before_shorter_rows(monkeypatch):
    monkeypatch.setattr(command, "total_memory_of", lambda device: 2**40)
    in_backward = "optimizer.gradient_clip=null optimizer.in_backward=true"
    step = Step(LARGE, 2048, precision="bf16-true")
    peaks = {words: predict(other).peak_bytes for words, other in command.alternatives(step, flash=True)}
    words = list(peaks)
    first = words.index(f"memory=checkpoint {in_backward}")
    assert words[first - 2 : first + 3] == [
        "memory=checkpoint optimizer.moments=8bit",
        "memory=checkpoint optimizer.offload=true",
        f"memory=checkpoint {in_backward}",
        f"memory=checkpoint optimizer.offload=true {in_backward}",
        "memory=checkpoint seq_len=1024",
    ]
    least = peaks[f"memory=checkpoint optimizer.offload=true {in_backward}"]
    assert least < peaks["memory=checkpoint optimizer.offload=true"]
    assert in_backward in command.advice(step, least, flash=True)


def test_kept_blocks_are_given_up_first():
    step = Step(MODEL, 8192, memory="checkpoint", keep=0.5)
    settings = [words for words, _ in command.alternatives(step, flash=True)]
    assert settings[:2] == ["memory.keep=0", "memory.keep=0 memory=offload"]
    assert predict(dict(command.alternatives(step, flash=True))["memory.keep=0"]).peak_bytes < predict(step).peak_bytes


def test_flash_is_proposed_if_it_can_run():
    step = Step(MODEL, 8192, attention="standard")
    flash = predict(Step(MODEL, 8192)).peak_bytes
    assert command.advice(step, flash, flash=True) == "attention=flash would fit"
    assert command.advice(step, flash - 1, flash=True) == "attention=flash memory=selective would fit"
    assert "attention=flash" not in command.advice(step, flash, flash=False)
    assert not command.flash_runs(step, torch.device("cpu")) and not command.flash_runs(step, None)


@pytest.mark.parametrize("argument", ["stop_after=1", "resume=last", "validate_only=True", "-m"])
def test_options_that_a_profile_refuses(monkeypatch, capsys, tiny, argument):
    with pytest.raises(SystemExit):
        run(monkeypatch, *tiny, argument)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flash-train: {argument}")


def test_a_search_starts_the_devices_itself(monkeypatch, capsys, tiny):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        run(monkeypatch, "find_max=true", "trainer.devices=2")
    assert "find_max=true starts the devices of this machine itself" in capsys.readouterr().err
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(SystemExit):
        run(monkeypatch, "find_max=true", "trainer.num_nodes=2")
    assert "trainer.num_nodes=2: find_max=true searches on this machine alone; allowed: 1" in capsys.readouterr().err


def test_a_run_that_ends_before_the_recorded_step_says_so(monkeypatch, capsys, tiny):
    monkeypatch.setattr("lightning.Trainer.fit", lambda *_, **__: None)  # as after a signal
    with pytest.raises(SystemExit):
        run(monkeypatch, *tiny)
    assert "stopped before step 3" in capsys.readouterr().err.splitlines()[-1]
