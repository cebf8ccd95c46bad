"""Ablations: wrong axes are reported before anything runs; a sweep is stopped, continued and reported."""

import csv
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_train.cli import ablate
from flash_train.cli.components import loggers
from flash_train.cli.components.loggers import log_table
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import read
from flash_train.cli.memory import check as predict_command
from flash_train.cli.sweep import tables
from flash_train.cli.sweep.plan import plan
from flash_train.cli.sweep.trial import Result, keep, known_result
from flash_train.files import write_text
from flash_train.profiling.memory.prediction import predict
from tests.support.cli.sweeps import planned
from tests.support.processes import python_path

ROOT = Path(__file__).parents[2]
LONG = 2**18  # tokens whose score matrix fits nowhere
GIB = 2**30


@pytest.fixture
def command(in_this_process):
    return in_this_process(ablate.main)


MISTAKES = [
    (["sweep.sequence=[1]"], ["sweep.sequence=[1]", "no such axis", "seq_len", "packing"]),
    (["sweep.atention=[flash]"], ["did you mean attention?"]),
    (["sweep.attention=[fast]"], ["attention=fast", "no such choice", "chunked, flash"]),
    (["sweep.seq_len=[]"], ["sweep.seq_len=[]", "must be one value or more"]),
    (["sweep.seq_len=[a,b]"], ["sweep.seq_len=[a,b]", "a list of integers"]),
    (["sweep.seq_len=[64,1.5]"], ["sweep.seq_len=[64,1.5]", "a list of integers"]),
    (["sweep.seq_len=[true]"], ["a list of integers"]),
    (["sweep.seq_len=512"], ["sweep.seq_len=512", "a list of integers", "sweep.seq_len=[512]"]),
    (["sweep.memory=checkpoint"], ["a list of memory modes", "sweep.memory=[checkpoint]"]),
    (["sweep=[1]"], ["sweep=[1]", "sweep.seq_len=[…]", "sweep.attention=[…]", "sweep.jobs=N"]),
    (["sweep.seq_len=64,128"], ["sweep.seq_len=64,128", "sweep.seq_len=[64,128]"]),
    (["sweep.seq_len=[64,64]"], ["must be different values"]),
    (["sweep.seq_len=[64,1]"], ["seq_len=1", "2 or more"]),
    (["sweep.dropout=[0.1,1.5]"], ["attention.dropout=1.5", "must be 0 or in (1/512, 511/512]"]),
    (["sweep.dropout=[a]"], ["sweep.dropout=[a]", "a list of numbers"]),
    (["sweep.packing=[best]"], ["data.packing=best", "best_fit, concat"]),
    (["sweep.memory=[all]"], ["memory=all", "checkpoint, none, offload, selective"]),
    (["sweep.model=[nano,huge]"], ["model=huge", "125m"]),
    (["sweep.jobs=0"], ["sweep.jobs=0", "from 1 to 1024"]),
    (["sweep.seq_len=[64]", "seq_len=128"], ["seq_len=128", "sweep.seq_len", "one of them"]),
    (["sweep.seq_len=[64]", "max_step=5"], ["max_step", "did you mean max_steps?"]),
    (["seq_len=64,128"], ["seq_len=64,128: several values", "'sweep.seq_len=[64,128]'"]),
    (["data.packing=best_fit,concat"], ["'sweep.packing=[best_fit,concat]'"]),
    (["seed=0,1"], ["seed=0,1: several values", "'sweep.seed=[0,1]'"]),
    (["sweep.seed=[0,-1]"], ["seed=-1", "must be in [0, 4294967295]"]),
    (["sweep.seed=[0.5]"], ["sweep.seed=[0.5]", "a list of integers"]),
    (["batch_size=1,2"], ["batch_size=1,2: several values", "one value, as batch_size is no axis", "seq_len"]),
    (["data.val_tokens=1"], ["data.val_tokens=1", "2 or more"]),
    (["resume=last"], ["resume", "run_dir"]),
    (["-m"], ["-m", "no such flag"]),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=lambda x: " ".join(x))
def test_mistakes_are_reported_before_anything_runs(command, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, lines = command("hardware=cpu", *arguments)
    assert code == 1 and len(lines) == 1, lines
    for words in says:
        assert words in lines[0]
    assert not list(tmp_path.iterdir())


def test_folder_of_a_training_run_is_refused(command, tmp_path):
    (tmp_path / "summary.json").touch()
    code, lines = command("hardware=cpu", f"run_dir={tmp_path}")
    assert (code, lines) == (
        1,
        [f"flash-train: run_dir={tmp_path}: holds a run; allowed: another folder (see docs/resume.md)"],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_help_lists_the_axes(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ablate.py", "--help"])
    ablate.main()
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("sweep.seq_len", "sweep.jobs", "run_dir", "dropout", "packing"))


def test_wandb_failure_comes_after_the_printed_results(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise UsageError("logger=wandb: no server")

    monkeypatch.setattr(loggers, "log_table", fail)
    sweep = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64]", "sweep.attention=[sdpa,standard]")
    for trial in (each.trial for each in sweep.trials):
        write_text(trial.folder / "metrics.csv", "step,train/loss\n1,2.0\n")
    ok = Result("ok", summary={"peak_memory_of": "process", "device": "CPU", "steps": 1, "versions": {}})
    with pytest.raises(UsageError, match="no server"):
        tables.report(sweep, {each.trial: ok for each in sweep.trials})
    out = capsys.readouterr().out
    assert "largest relative difference 0.0e+00" in out and "ablation.csv" in out and "2 ok" in out
    assert "wandb/" not in out

    monkeypatch.setattr(loggers, "log_table", lambda *arguments: None)
    tables.report(sweep, {each.trial: ok for each in sweep.trials})
    assert f"{tmp_path}: ablation.csv" in (out := capsys.readouterr().out) and ", cells/, wandb/\n" in out


def test_a_disturbed_trial_is_named_and_marked(tmp_path, capsys):
    sweep = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64]", "sweep.attention=[sdpa,standard]", "logger=none")
    times = {"sdpa": [9.0, 1.0, 1.0, 1.0, 1.01, 1.02], "standard": [9.0, 1.0, 1.1, 1.3, 1.2, 1.5]}
    results = {}
    for each in sweep.trials:
        seconds = times[each.axes["attention"]]
        lines = [f"{step},3.0,{x}" for step, x in enumerate(seconds, 1)]
        write_text(each.trial.folder / "metrics.csv", "\n".join(["step,train/loss,time/step_seconds", *lines, ""]))
        summary = {"peak_memory_of": "process", "device": "CPU", "steps": 6, "versions": {}, "step_seconds": seconds[3]}
        results[each.trial] = Result("ok", summary={**summary, "val_loss": 2.0, "val_tokens": 32768})
    tables.report(sweep, results)
    out, text = capsys.readouterr().out, (tmp_path / "ablation.md").read_text(encoding="utf-8")
    assert out.startswith(
        "disturbed: seq_len=64,attention=standard: the step times spread over more than 10% of their median."
    )
    assert "| 64 | sdpa | **1,000** | 0.77 | 1% |" in text and "| 64 | standard | 1,300 † | 1.00 | 17% |" in text
    assert "val_tokens=32,768." in text
    with open(tmp_path / "ablation.csv", encoding="utf-8", newline="") as file:
        spreads = [float(line["step_spread"]) for line in csv.DictReader(file)]
    assert spreads == pytest.approx([0.01, 0.2 / 1.2])


def test_trials_that_a_table_leaves_out_are_counted(tmp_path, capsys):
    sweep = planned(f"run_dir={tmp_path}", "seq_len=64", "sweep.attention=[sdpa,standard]", "logger=none")
    for each in sweep.trials:
        keep(each.trial, Result("ok"))
    fewer = replace(sweep, trials=sweep.trials[:1])
    (tmp_path / "ablation.png").write_bytes(b"of another sweep")
    tables.report(fewer, {fewer.trials[0].trial: Result("failed", "a bug")})
    assert f"left out: 1 finished trial in {tmp_path / 'cells'}" in (out := capsys.readouterr().out)
    assert "ablation.png" not in out and not (tmp_path / "ablation.png").exists()
    tables.report(sweep, {each.trial: Result("failed", "a bug") for each in sweep.trials})
    assert "left out" not in capsys.readouterr().out


def test_remaining_time_is_estimated_by_tokens(tmp_path, monkeypatch, capsys):
    """A trial of 64 tokens took 10 s, so the remaining ones of 64 and 1,024 tokens take 170 s."""
    now = iter([0.0, 10.0, 20.0, 180.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(ablate, "predicted_result", lambda planned: None)
    ends = ((trial, Result("failed", "a bug")) for trial in iter(lambda: waiting.pop(0), None))
    monkeypatch.setattr(ablate, "run_trials", lambda trials, environs: ends)
    sweep = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64,1024]", "sweep.attention=[sdpa,standard]", "batch_size=2")
    sweep = replace(sweep, trials=sweep.trials[:3])
    waiting = [each.trial for each in sweep.trials] + [None]
    ablate.run(sweep)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("about 0:02:50 left") and second.endswith("about 0:02:40 left") and "left" not in third


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "failed"], 0),
        (["failed", "failed"], 1),
        (["failed", "unavailable", "oom"], 1),
        (["unavailable", "unavailable"], 3),
        (["oom"], 4),
        (["oom", "unavailable"], 0),
    ],
)
def test_exit_status_is_an_error_if_no_trial_finished(command, monkeypatch, tmp_path, statuses, code):
    def run(sweep):
        return {each.trial: Result(status, "why") for each, status in zip(sweep.trials, statuses, strict=True)}

    monkeypatch.setattr(ablate, "run", run)
    monkeypatch.setattr(tables, "report", lambda sweep, results: None)
    axis = f"sweep.seq_len={list(range(64, 64 + len(statuses)))}".replace(" ", "")
    ended, lines = command("hardware=cpu", f"run_dir={tmp_path}", axis, "attention=sdpa")
    assert ended == code and len(lines) == bool(code)
    assert not lines or "ablation.md says why" in lines[0]


def test_mistakes_and_help_do_not_wait_for_pytorch(tmp_path):
    code = "import sys\nfrom flash_train.cli import ablate\ntry:\n    ablate.main()\nfinally:\n"
    code += "    assert not {'torch', 'matplotlib'} & set(sys.modules)"
    for argument in ("--help", "sweep.attention=[sdpa,fast]", "sweep.seq_len=[64,1]"):
        command = [sys.executable, "-c", code, argument]
        ended = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path()}, capture_output=True
        )
        assert b"AssertionError" not in ended.stderr and ended.returncode == (argument != "--help"), ended.stderr


@pytest.fixture
def small_gpu(monkeypatch):
    """The commands find a GPU of 16 GiB; the predicted memory is the same as on a CPU."""
    monkeypatch.setattr(predict_command, "device_of", lambda accelerator: torch.device("cpu"))
    monkeypatch.setattr(predict_command, "total_memory_of", lambda device: 16 * GIB)


def test_trials_that_cannot_fit_on_a_gpu_are_not_started(tmp_path, monkeypatch, small_gpu):
    arguments = ["hardware=cuda", f"run_dir={tmp_path}", "sweep.seq_len=[1024,65536]", "sweep.attention=[standard]"]
    arguments += ["data.packing=concat"]
    short, long = plan(read(arguments)).trials
    assert ablate.predicted_result(short) is None
    found = ablate.predicted_result(long)
    assert found.status == "oom" and found.reason.startswith("predicted, not run: a step would take")
    assert found.reason.endswith("GiB and there are 16.0 GiB")
    (_, forced) = plan(read([*arguments, "force=true"])).trials
    assert ablate.predicted_result(forced) is None
    assert known_result(long.trial) is None and "force=true" in short.trial.overrides
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert ablate.predicted_result(short).status == "unavailable"


def test_trials_that_cannot_fit_on_a_cpu_are_not_started(tmp_path, monkeypatch):
    """If started, the trial would use all memory of the machine or the container."""
    write_text(tmp_path / "memory.max", f"{2 * GIB}\n")
    monkeypatch.setattr(predict_command, "CONTAINER", tmp_path / "memory.max")
    arguments = [f"run_dir={tmp_path}", "sweep.seq_len=[64,65536]", "sweep.attention=[standard]", "data.packing=concat"]
    short, long = planned(*arguments).trials
    assert ablate.predicted_result(short) is None
    found = ablate.predicted_result(long)
    assert found.status == "oom" and found.reason.endswith("GiB and there are 2.0 GiB")
    for exception in ("force=true", "compile=true", "trainer.devices=2", "data.packing=best_fit"):
        (_, begun) = planned(*arguments, exception).trials
        assert ablate.predicted_result(begun) is None, exception


@pytest.mark.parametrize(
    ("hardware", "attention", "dropout", "known"),
    [
        *(("cuda", "standard", 0, False), ("cuda", "chunked", 0, False), ("cuda", "sdpa", 0, True)),
        *(("cpu", "sdpa", 0, True), ("cpu", "sdpa", 0.1, False)),
    ],
)
def test_document_lengths_decide_whether_a_trial_fits(tmp_path, small_gpu, hardware, attention, dropout, known):
    arguments = [f"hardware={hardware}", f"run_dir={tmp_path}", "seq_len=1048576", f"sweep.attention=[{attention}]"]
    arguments += [f"attention.dropout={dropout}"]
    (packed,) = plan(read(arguments)).trials
    assert (ablate.predicted_result(packed) is not None) == known
    (whole,) = plan(read([*arguments, "data.packing=concat"])).trials
    assert ablate.predicted_result(whole).status == "oom"


@pytest.mark.parametrize("hardware", ["cpu", "cuda"])
@pytest.mark.parametrize(("part", "known"), [(0.94, True), (0.96, False)])
def test_prediction_near_the_limit_starts_the_trial(tmp_path, monkeypatch, small_gpu, hardware, part, known):
    arguments = [f"hardware={hardware}", f"run_dir={tmp_path}", "seq_len=1024", "sweep.attention=[sdpa]"]
    (trial,) = plan(read(arguments)).trials
    step, _ = predict_command.step_before_run(trial.config)
    monkeypatch.setattr(predict_command, "total_memory_of", lambda device: part * predict(step).peak_bytes)
    assert (ablate.predicted_result(trial) is not None) == known


@pytest.mark.parametrize(("part", "oom"), [(0.94, {"ddp", "fsdp"}), (1.1, {"ddp"}), (4.0, set())])
def test_plans_are_an_axis_and_are_predicted_for_each_device(tmp_path, monkeypatch, part, oom):
    arguments = [f"run_dir={tmp_path}", "hardware=cpu", "seq_len=64", "attention=sdpa", "trainer.devices=4"]
    arguments += ["sweep.parallel=[auto,ddp,fsdp]", "sweep.seq_len=null", "sweep.attention=null"]
    trials = {trial.axes["parallel"]: trial for trial in plan(read(arguments)).trials}
    fsdp, _ = predict_command.step_before_run(trials["fsdp"].config)
    assert fsdp.dims.shard == 4
    monkeypatch.setattr(predict_command, "total_memory_of", lambda device: int(4 * part * predict(fsdp).peak_bytes))
    results = {name: ablate.predicted_result(trial) for name, trial in trials.items()}
    assert {name for name, result in results.items() if result and result.status == "oom"} == oom


def test_unavailable_backend_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(predict_command, "device_of", lambda accelerator: torch.device("cpu"))
    flash, sdpa = planned(f"run_dir={tmp_path}", "seq_len=64", "sweep.attention=[flash,sdpa]").trials
    found = ablate.predicted_result(flash)
    assert found.status == "unavailable" and "no NVIDIA GPU" in found.reason
    assert ablate.predicted_result(sdpa) is None


def test_table_is_logged_to_wandb(tmp_path):
    settings = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64]", "sweep.attention=[sdpa]").trials[0].config.logger
    log_table(settings, tmp_path, "ablation", ["attention", "mfu"], [["sdpa", None], ["flash", 0.5]])
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/ablation*.json")
    assert '"flash"' in table.read_text()


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    """The script in a process whose memory is limited. The limit holds for its children too."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "ablate.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(), "HOME": str(cwd), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (32 * GIB, 32 * GIB)),
    )


def rows_of(run_dir: Path) -> dict[str, dict[str, str]]:
    """The table, by attention."""
    with open(run_dir / "ablation.csv", encoding="utf-8", newline="") as file:
        return {row["attention"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_stopped_sweep_continues(tiny, tmp_path):
    tiny = [text for text in tiny if not text.startswith("seq_len")]
    arguments = [*tiny, "sweep.attention=[sdpa,standard,flash]", "sweep.seq_len=[32]"]
    run_dir = tmp_path / "run"
    first, second = (run_dir / "cells" / f"seq_len=32,attention={name}" for name in ("sdpa", "standard"))
    process = start(*arguments, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (second / "log.txt").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "2/3  seq_len=32,attention=sdpa  ok" in out and f"run_dir={run_dir}" in err
    assert (first / "cell.json").is_file() and not (second / "cell.json").exists()
    written = (first / "cell.json").stat().st_mtime_ns

    kept = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    out, err = start(*arguments, "seed=1", cwd=tmp_path).communicate(timeout=120)
    (line,) = err.splitlines()
    assert "seed: not given, now 1" in line and str(first) in line and not out
    assert kept == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}

    process = start(*arguments, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "1 of 3 trials are finished already" in out and "3/3" in out
    assert (first / "cell.json").stat().st_mtime_ns == written

    rows = rows_of(run_dir)
    assert {name: row["status"] for name, row in rows.items()} == {
        "sdpa": "ok",
        "standard": "ok",
        "flash": "unavailable",
    }
    assert "no NVIDIA GPU" in rows["flash"]["reason"]
    ran = rows["standard"]
    parts = [float(ran[f"{part}_seconds"]) for part in ("forward", "backward", "optimizer", "data_wait")]
    assert 0 < sum(parts) <= 1.5 * float(ran["step_seconds"])  # each is a median of its own
    assert 0 < float(ran["attention_share"]) < 1
    assert "losses at seq_len=32: largest relative difference" in out
    assert "| 32 | sdpa |" in (run_dir / "ablation.md").read_text(encoding="utf-8")
    for name in ("ablation.png", "ablation_losses.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")
    assert not list(run_dir.rglob("*.ckpt")) and not list(run_dir.rglob("wandb"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_out_of_memory_is_recorded(tiny, corpus, tmp_path):
    (corpus / "long.txt").write_text("the quick brown fox " * (LONG // 16), encoding="utf-8")
    tiny = [text for text in tiny if not text.startswith("seq_len")]
    arguments = [*tiny, "batch_size=1", "data.packing=concat", "sweep.attention=[standard]", f"sweep.seq_len=[{LONG}]"]
    process = start(*arguments, "force=true", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert "1/1" in out and "1 oom" in out and process.returncode == 4, err
    row = rows_of(tmp_path / "run")["standard"]
    assert row["status"] == "oom" and f"out of memory at seq_len={LONG}" in row["reason"]
    assert "out of memory" in (tmp_path / "run" / "ablation.md").read_text(encoding="utf-8")
