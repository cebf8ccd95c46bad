"""Whole runs through the console script: their files, resuming, a signal, and the kernels under the interpreter."""

import csv
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra

from flash_train.cli import train as command
from flash_train.cli.run.module import build_module

ROOT = Path(__file__).parents[3]
FILES = {"config.yaml", "metrics.csv", "summary.json", "loss.png", "throughput.png", "memory.png", "checkpoints"}
SUMMARY = {
    *("status", "seq_len", "model", "parameters", "attention", "device", "precision", "steps", "train_loss"),
    *("val_loss", "tokens_per_second", "mfu", "peak_memory_gib", "run_dir", "wandb_dir"),
}


def start(*arguments: str, cwd: Path, **environ: str) -> subprocess.Popen:
    """The console script in a process of its own, where nothing is known of W&B: no account, no mode, no other run."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"PYTHONPATH": str(ROOT), "HOME": str(cwd), **environ}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, cwd: Path, **environ: str) -> str:
    """Its standard output; it must succeed."""
    process = start(*arguments, cwd=cwd, **environ)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


@pytest.fixture
def in_process(monkeypatch, capsys):
    """The console script in this process, which saves importing PyTorch anew."""

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["flash-train", *arguments])
        try:
            command.main()
        finally:
            GlobalHydra.instance().clear()
        return capsys.readouterr().out

    return call


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def losses_of(run_dir: Path) -> dict[str, str]:
    """Training losses by step, as the digits in the file."""
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        return {row["step"]: row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}


def test_all_files_with_the_default_logger(tiny, tmp_path):
    overrides = [text for text in tiny if not text.startswith(("logger", "run_dir"))]
    out = run(*overrides, cwd=tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run_dir.iterdir()} == FILES | {"wandb"}
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000003.ckpt"]

    summary = summary_of(run_dir)
    assert summary.keys() >= SUMMARY
    assert (summary["status"], summary["steps"], summary["seq_len"], summary["mfu"]) == ("finished", 3, 64, None)
    assert summary["attention"] == "sdpa" and summary["data"]["corpus"] == "text"
    assert list(losses_of(run_dir)) == ["1", "2", "3"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["run_dir"] == f"runs/{run_dir.name}"

    assert "attention: sdpa (flash cannot run: there is no NVIDIA GPU" in out or torch.cuda.is_available()
    assert f"wandb sync runs/{run_dir.name}/wandb/offline-run-*" in out
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / summary["wandb_dir"]).resolve().parent == (run_dir / "wandb").resolve()
    assert "run finished" in out and "sample" in out and f"runs/{run_dir.name}: config.yaml" in out
    tokens = summary["val_tokens"]
    assert 64 < tokens <= 128 and f"validation: on {tokens} tokens of " in out and " in 2 rows\n" in out
    assert f"on {tokens} tokens" in out.partition("run finished")[2]


def test_a_stop_before_the_first_logged_row_ends_well_with_the_pictures_that_there_are(in_process, tiny, tmp_path):
    out = in_process(*tiny, "max_steps=30", "stop_after=3", "log_every=10")
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["val_loss"] > 0 and summary["tokens_per_second"] is None
    assert "loss.png, checkpoints/step-000003.ckpt" in out  # of the validation; nothing else was measured
    in_process(*tiny, "max_steps=30", "stop_after=8", "log_every=10", "resume=last")
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"loss.png", "throughput.png", "memory.png"}


def test_validations_of_all_lengths_are_on_the_same_tokens(in_process, tiny, tmp_path):
    tiny = [text for text in tiny if not text.startswith(("run_dir", "seq_len", "data.val_batches"))]
    tiny += ["data.val_fraction=0.5"]
    for seq_len in (32, 96):
        folder = tmp_path / str(seq_len)
        out = in_process(*tiny, f"run_dir={folder}", f"seq_len={seq_len}", "data.val_tokens=500", "max_steps=1")
        assert "validation: on 500 tokens of " in out and summary_of(folder)["val_tokens"] == 500
    batches = in_process(*tiny, f"run_dir={tmp_path / 'b'}", "seq_len=32", "data.val_batches=20", "data.val_tokens=2")
    assert ", in 40 rows\n" in batches  # of two rows each: so many batches instead of so many tokens


def test_the_sample_has_as_many_tokens_as_asked_for(in_process, tiny, tmp_path, monkeypatch):
    asked = []

    def generate(model, tokens, *, max_new_tokens, max_seconds, **options):
        asked.append((max_new_tokens, max_seconds))
        return [ord("x")] * max_new_tokens

    monkeypatch.setattr("flash_train.cli.run.trainer.generate", generate)
    tiny = [text for text in tiny if not text.startswith("run_dir")]
    assert "─ sample ─" not in in_process(*tiny, f"run_dir={tmp_path / 'none'}", "callbacks.sample.tokens=0")
    for number, option in enumerate(("callbacks.sample.tokens=7", "callbacks.sample.seconds=null")):
        assert "─ sample ─" in in_process(*tiny, f"run_dir={tmp_path / str(number)}", option)
    assert asked == [(7, 1.0), (160, None)]


def test_resume_is_exact_and_stays_in_its_directory(in_process, tiny, tmp_path):
    tiny = [*tiny, "max_steps=4", "attention.dropout=0.1", "model.residual_dropout=0.1", "accumulate=2"]
    in_process(*tiny, f"run_dir={tmp_path / 'whole'}")
    in_process(*tiny, f"run_dir={tmp_path / 'parts'}", "stop_after=1")
    assert summary_of(tmp_path / "parts")["steps"] == 1
    in_process(*tiny, f"run_dir={tmp_path / 'parts'}", "stop_after=1", "resume=last")
    without = [text for text in tiny if not text.startswith("run_dir")]
    in_process(*without, f"resume={tmp_path / 'parts' / 'checkpoints' / 'step-000002.ckpt'}")
    assert summary_of(tmp_path / "parts")["steps"] == 4
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert len(losses_of(tmp_path / "whole")) == 4


def test_a_schedule_that_is_bent_is_said(in_process, tiny, tmp_path):
    in_process(*tiny, "max_steps=4", "stop_after=2")
    assert "schedule:" not in in_process(*tiny, "max_steps=4", "stop_after=1", "resume=last")
    out = in_process(*tiny, "max_steps=8", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("schedule: ")]
    with open(tmp_path / "run" / "metrics.csv", encoding="utf-8", newline="") as file:
        rates = [float(row["train/learning_rate"]) for row in csv.DictReader(file) if row["train/learning_rate"]]
    assert line.startswith("schedule: max_steps=8 changes it, as the run was planned for 4: ")
    assert line.endswith(f"from {rates[3]:.3g} to {rates[4]:.3g}")


def test_other_settings_than_before_are_said(in_process, tiny, tmp_path):
    in_process(*tiny, "max_steps=6", "stop_after=1")
    assert "resumed:" not in in_process(*tiny, "max_steps=6", "stop_after=1", "resume=last")
    others = ["batch_size=1", "accumulate=3", "optimizer.gradient_clip=null", "attention.dropout=0.1"]
    out = in_process(*tiny, *others, "max_steps=6", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("resumed: ")]
    assert line == (
        "resumed: batch_size was 2 and is 1, accumulate was 1 and is 3, attention.dropout was 0.0 and is 0.1, "
        "optimizer.gradient_clip was 1.0 and is null"
    )


def change_checkpoint(path: Path, **entries) -> None:
    torch.save({**torch.load(path, weights_only=True), **entries}, path)


def test_a_checkpoint_further_on_than_the_last_written_is_said(in_process, tiny, tmp_path):
    in_process(*tiny, "max_steps=6", "stop_after=2", "trainer.checkpoint_every=1")
    change_checkpoint(tmp_path / "run" / "checkpoints" / "step-000001.ckpt", branch=1)
    out = in_process(*tiny, "max_steps=6", "stop_after=1", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("checkpoint: ")]
    assert line == (
        "checkpoint: step-000001.ckpt was written last and is taken; "
        "step-000002.ckpt is from an earlier branch, and stays"
    )


def test_resume_last_does_not_go_by_the_times_of_files(in_process, tiny, tmp_path):
    """A copy of the folder gives the files other times, in another order."""
    in_process(*tiny, "max_steps=6", "stop_after=2", "trainer.checkpoint_every=1")
    before = losses_of(tmp_path / "run")
    os.utime(tmp_path / "run" / "checkpoints" / "step-000002.ckpt", (1, 1))
    out = in_process(*tiny, "max_steps=6", "stop_after=1", "resume=last")
    assert "checkpoint: " not in out
    assert list(losses_of(tmp_path / "run")) == ["1", "2", "3"]
    assert before.items() <= losses_of(tmp_path / "run").items()


@pytest.mark.parametrize("damage", [b"", b"half of a file"])
def test_a_broken_checkpoint_does_not_block_the_whole_one_before_it(in_process, tiny, tmp_path, damage):
    in_process(*tiny, "max_steps=4", f"run_dir={tmp_path / 'whole'}")
    in_process(*tiny, "max_steps=4", "stop_after=3", "trainer.checkpoint_every=2")
    (tmp_path / "run" / "checkpoints" / "step-000003.ckpt").write_bytes(damage)
    out = in_process(*tiny, "max_steps=4", "resume=last")
    (line,) = [line for line in out.splitlines() if line.startswith("checkpoint: ")]
    assert line == (
        "checkpoint: step-000003.ckpt cannot be read; step-000002.ckpt, the newest one that is whole, is taken"
    )
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def test_a_run_that_was_killed_in_its_last_validation_is_closed(in_process, tiny, tmp_path, monkeypatch):
    """Its record is the same as after an undisturbed run."""
    in_process(*tiny, f"run_dir={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        patch.setattr("flash_train.training.CausalLMModule.validation_step", killed)
        with pytest.raises(SystemExit):
            in_process(*tiny)
    assert summary_of(tmp_path / "run")["status"] == "interrupted"
    out = in_process(*tiny, "resume=last")
    assert "run: all 3 steps are done; validation and record are completed" in out and "sample" in out
    assert f"to continue: run_dir={tmp_path / 'run'} resume=last and a larger max_steps" in out
    whole, closed = (summary_of(tmp_path / name) for name in ("whole", "run"))
    for name in ("status", "steps", "seq_len", "train_loss", "val_loss", "bits_per_byte"):
        assert closed[name] == whole[name] is not None, name
    with pytest.raises(SystemExit):  # once
        in_process(*tiny, "resume=last")


def killed(*arguments, **named):
    raise KeyboardInterrupt


def test_after_ctrl_c_in_the_last_validation_the_advice_works(tiny, tmp_path, in_process, monkeypatch, capsys):
    def press(module, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("flash_train.training.CausalLMModule.validation_step", press)
        with pytest.raises(SystemExit) as stop:
            in_process(*tiny)
    assert stop.value.code == 128 + signal.SIGINT
    assert f"to continue: run_dir={tmp_path / 'run'} resume=last\n" in capsys.readouterr().out
    in_process(*tiny, "resume=last")
    assert summary_of(tmp_path / "run")["status"] == "finished"


def test_output_that_cannot_be_shown_fails_no_run(tiny, tmp_path):
    out = run(*tiny, cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert out.isascii() and "run finished" in out


def test_runs_of_the_same_second_have_folders_of_their_own(tiny, tmp_path):
    tiny = [text for text in tiny if not text.startswith("run_dir")]
    taken = {tmp_path / "runs" / time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(time.time() + i)) for i in range(90)}
    for folder in taken:
        (folder / "of another run").mkdir(parents=True)
    run(*tiny, cwd=tmp_path)
    (run_dir,) = set((tmp_path / "runs").iterdir()) - taken
    assert run_dir.name.endswith("_2") and (run_dir / "summary.json").is_file()
    assert all([path.name for path in folder.iterdir()] == ["of another run"] for folder in taken)


def test_a_folder_in_which_another_run_writes_is_refused(tiny, tmp_path):
    """Two that begin at once, and one that resumes what is not over yet."""
    process = start(*tiny, "max_steps=1000000", "trainer.checkpoint_every=1", cwd=tmp_path)
    folder = tmp_path / "run"
    deadline = time.monotonic() + 120
    while not any(folder.glob("checkpoints/step-00001*.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    for resume in ([], ["resume=last"]):
        second = start(*tiny, "max_steps=1000000", *resume, cwd=tmp_path)
        _, err = second.communicate(timeout=120)
        assert second.returncode == 1 and len(err.splitlines()) == 1, err
        assert f"run_dir={folder}: another run is writing there (process {process.pid} on " in err
    process.kill()  # its lock must not outlive it
    process.communicate()
    run(*tiny, "max_steps=1000000", "stop_after=1", "resume=last", cwd=tmp_path)
    assert not (folder / ".lock").exists()


def test_a_full_disk_at_the_last_checkpoint_is_a_line_and_a_status(in_process, tiny, tmp_path, monkeypatch, capsys):
    def full(checkpoint, file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(SystemExit) as stop:
        in_process(*tiny)
    assert stop.value.code == 1
    path = tmp_path / "run" / "checkpoints" / "step-000003.ckpt"
    lines = [line for line in capsys.readouterr().err.splitlines() if str(path) in line]
    assert lines[-1] == f"flash-train: {path} not written (No space left on device)"
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert list(losses_of(tmp_path / "run")) == ["1", "2", "3"] and not list(path.parent.iterdir())


def test_a_checkpoint_that_is_named_is_taken_without_a_word(in_process, tiny, tmp_path):
    """Others of its folder are none of this run's business, and it may have any name."""
    in_process(*tiny, "max_steps=6", "stop_after=2", "trainer.checkpoint_every=1")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copy(folder / "step-000001.ckpt", folder / "kept.ckpt")
    for name in ("step-000001", "kept"):
        run_dir, resume = f"run_dir={tmp_path / name}", f"resume={folder / name}.ckpt"
        assert "checkpoint: " not in in_process(*tiny, run_dir, resume, "max_steps=6", "stop_after=1")
        assert summary_of(tmp_path / name)["steps"] == 2


def test_offline_parts_of_a_run_at_wandb_have_an_id_each(in_process, tiny, tmp_path):
    in_process(*tiny, "logger=wandb", "stop_after=1")
    in_process(*tiny, "logger=wandb", "resume=last")
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    ids = (tmp_path / "run" / "wandb" / "run_id").read_text().split()
    assert len(folders) == 2 and {folder.name.split("-")[3] for folder in folders} == set(ids)


def test_validate_only_measures_and_leaves_the_run_as_it_is(in_process, tiny, tmp_path):
    run_dir, options = tmp_path / "run", [text for text in tiny if not text.startswith("run_dir")]
    in_process(*tiny, "logger=wandb")
    trained = summary_of(run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    checkpoint = run_dir / "checkpoints" / "step-000003.ckpt"
    out = in_process(*options, "logger=wandb", "validate_only=true", f"resume={checkpoint}")
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    found = json.loads(after.pop(run_dir / "validation.json"))
    assert after == before
    assert found["val_loss"] == pytest.approx(trained["val_loss"], rel=1e-6)
    assert (found["checkpoint"], found["steps"], found["data"]) == (str(checkpoint), 3, trained["data"])
    assert f"val/loss {found['val_loss']:.4f}" in out and "validation.json" in out


def test_validate_only_in_a_directory_of_its_own(in_process, tiny, tmp_path, recwarn):
    in_process(*tiny)
    in_process(*tiny, f"run_dir={tmp_path / 'check'}", "validate_only=true",
               f"resume={tmp_path / 'run' / 'checkpoints' / 'step-000003.ckpt'}")  # fmt: skip
    assert [path.name for path in (tmp_path / "check").iterdir()] == ["validation.json"]
    assert not [one for one in recwarn if "no logger configured" in str(one.message)]
    in_process(*tiny, f"run_dir={tmp_path / 'check'}")  # which holds no run
    assert summary_of(tmp_path / "check")["steps"] == 3


def test_a_run_is_freed_before_the_next(in_process, tiny, monkeypatch):
    """Trainer, module and optimizer refer to one another: without the collector, all models would stay."""
    built, alive = [], []

    def count(*arguments):
        alive.append(sum(module() is not None for module in built))
        module = build_module(*arguments)
        built.append(weakref.ref(module))
        return module

    monkeypatch.setattr("flash_train.cli.run.module.build_module", count)
    enabled = gc.isenabled()
    gc.disable()  # as if it had not come to collect by itself
    try:
        in_process("-m", *tiny, "seed=0,1,2", "max_steps=1")
    finally:
        if enabled:
            gc.enable()
    assert alive == [0, 0, 0]


def test_several_runs(in_process, tiny, tmp_path):
    in_process("-m", *tiny, "seed=0,1", "logger=wandb")
    first, second = (tmp_path / "run" / name for name in ("0", "1"))
    assert {path.name for path in first.iterdir()} >= FILES
    assert losses_of(first) != losses_of(second)
    ids = [(folder / "wandb" / "run_id").read_text() for folder in (first, second)]
    assert ids[0] != ids[1]
    for folder, seed in ((first, 0), (second, 1)):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["seed"], config["run_dir"]) == (seed, str(folder))


def test_config_is_shown_and_nothing_runs(in_process, tiny, tmp_path):
    shown = yaml.safe_load(in_process("--cfg", "job", *tiny, "seed=5"))
    assert (shown["seed"], shown["seq_len"], shown["model"]["width"]) == (5, 64, 16)
    assert not (tmp_path / "run").exists()


def test_recall_prints_chance(in_process, tiny, tmp_path):
    overrides = [text for text in tiny if not text.startswith("data")]
    out = in_process(*overrides, "data=recall", "data.n_pairs=4", "data.n_keys=8", "data.n_values=8", "data.val_rows=4")
    assert summary_of(tmp_path / "run")["chance_level"] == 1 / 8
    assert "chance level" in out and "answer accuracy" in out and "sample" not in out


def test_sigterm_saves_and_exits_with_143(tiny, tmp_path):
    process = start(*tiny, "max_steps=1000000", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['steps']:06}.ckpt").is_file()
    assert "resume=last" in out


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_two_steps_of_the_kernels_under_the_interpreter(tiny, tmp_path):
    tiny = [*tiny, "seq_len=32", "batch_size=1", "max_steps=2", "trainer.progress_bar=false"]
    run(*tiny, "attention=flash", cwd=tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert summary_of(tmp_path / "run")["attention"] == "flash"
    assert len(losses_of(tmp_path / "run")) == 2

    run(*tiny, "attention=standard", f"run_dir={tmp_path / 'standard'}", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    ours, theirs = (losses_of(tmp_path / name).values() for name in ("run", "standard"))
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in theirs], rel=1e-5)
