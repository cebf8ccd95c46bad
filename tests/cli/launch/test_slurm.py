"""Under SLURM: tasks that do not match the devices, requeued jobs, and the checkpoint that SLURM's signal saves."""

import csv
import json
from pathlib import Path

import pytest
import torch

from flash_train.cli.config.overrides import read
from flash_train.cli.config.paths import run_dir_of, slurm_checkpoints
from flash_train.cli.launch.slurm import last_checkpoint, with_requeued_run

JOB = {
    **{"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1234"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
}


@pytest.fixture
def slurm(monkeypatch):
    def set_variables(**changes: str) -> None:
        for name, value in {**JOB, **changes}.items():
            monkeypatch.setenv(name, value)

    return set_variables


def steps_of(run_dir: Path) -> list[int]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("variables", "devices", "parts"),
    [
        ({"SLURM_NTASKS_PER_NODE": "1"}, 2, ["trainer.devices=2", "1 task(s) on each of 1 node(s)", "=1 trainer.num"]),
        ({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, 1, ["trainer.devices=1", "allowed: trainer.devices=2 "]),
        ({"SLURM_NTASKS": "4"}, 4, ["trainer.devices=4", "--ntasks=4", "allowed: --ntasks-per-node=N"]),
        (
            {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"},
            2,
            ["trainer.num_nodes=1", "on each of 2 node(s)", "trainer.num_nodes=2"],
        ),
    ],
)
def test_tasks_that_do_not_match_the_devices_are_a_mistake(
    flash_train, tiny, slurm, tmp_path, variables, devices, parts
):
    slurm(**variables)
    strategy = ["trainer.strategy=ddp"] if devices > 1 else []
    code, (line,) = flash_train(*tiny, f"trainer.devices={devices}", *strategy)
    assert code == 1 and all(part in line for part in parts), line
    assert not (tmp_path / "run").exists()


def test_interactive_jobs_are_not_checked(flash_train, tiny, slurm):
    slurm(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_NAME="interactive")
    assert flash_train(*tiny, "max_steps=1")[0] == 0


@pytest.mark.slow
def test_a_requeued_job_resumes_by_the_same_command(flash_train, tiny, slurm, tmp_path, capsys):
    slurm()
    assert flash_train(*tiny, "max_steps=4", "stop_after=2")[0] == 0
    code, (line,) = flash_train(*tiny, "max_steps=4")
    assert code == 1 and "holds a run" in line
    slurm(SLURM_RESTART_COUNT="1")
    assert flash_train(*tiny, "max_steps=4")[0] == 0
    assert steps_of(tmp_path / "run")[-1] == 4


def test_only_a_requeued_command_whose_run_has_a_checkpoint_is_changed(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000002.ckpt").touch()
    again = {"SLURM_RESTART_COUNT": "1"}
    run = f"run_dir={tmp_path / 'run'}"
    assert with_requeued_run(read([run]), again).given("resume") == "last"
    assert with_requeued_run(read([run]), {}).given("resume") is None
    assert with_requeued_run(read([f"run_dir={tmp_path / 'new'}"]), again).given("resume") is None
    assert with_requeued_run(read([]), again).given("resume") is None
    assert with_requeued_run(read([run, "validate_only=true"]), again).given("resume") is None


def test_a_job_that_began_from_a_named_checkpoint_resumes_its_own_run(tmp_path):
    for name in ("first", "run"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "step-000002.ckpt").touch()
    again = {"SLURM_RESTART_COUNT": "1"}
    first = f"resume={tmp_path / 'first' / 'checkpoints' / 'step-000002.ckpt'}"
    line = with_requeued_run(read([first, f"run_dir={tmp_path / 'run'}"]), again)
    assert (line.given("run_dir"), line.given("resume")) == (str(tmp_path / "run"), "last")
    line = with_requeued_run(read([first]), again)
    assert (line.given("run_dir"), line.given("resume")) == (str(tmp_path / "first"), "last")
    new = read([first, f"run_dir={tmp_path / 'new'}"])
    assert with_requeued_run(new, again) == new  # it has saved nothing so far


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, 1, 3])
def test_resume_last_finds_the_checkpoint_of_slurms_signal(flash_train, tiny, tmp_path, own):
    """Lightning's handler saves `hpc_ckpt_2.ckpt` in the run's folder; here it has step 2."""
    run = tmp_path / "run"
    options = ["trainer.checkpoint_every=1", "trainer.keep_checkpoints=null"]
    assert flash_train(*tiny, "max_steps=5", "stop_after=3", *options)[0] == 0
    checkpoints = {step: run / "checkpoints" / f"step-00000{step}.ckpt" for step in (1, 2, 3)}
    checkpoints.pop(2).rename(run / "hpc_ckpt_10.ckpt")
    (run / "hpc_ckpt_2.ckpt").write_bytes((run / "hpc_ckpt_10.ckpt").read_bytes())
    for step, path in checkpoints.items():
        if own is None or step > own:
            path.unlink()
    assert slurm_checkpoints(run)[-1] == run / "hpc_ckpt_10.ckpt" and run_dir_of(run / "hpc_ckpt_10.ckpt") == run
    assert flash_train(*tiny, "max_steps=5", "stop_after=1", "resume=last")[0] == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == (4 if own == 3 else 3)
    assert steps_of(run)[-1] == (4 if own == 3 else 3)


def write_checkpoint(path: Path, step: int, branch: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step, "branch": branch}, path)
    return path


def test_the_last_checkpoint_is_of_the_newest_branch_wherever_it_lies(tmp_path):
    """A run that went back from SLURM's checkpoint continues its new branch, though that has fewer steps."""
    slurms = write_checkpoint(tmp_path / "hpc_ckpt_1.ckpt", 50)
    write_checkpoint(tmp_path / "checkpoints" / "step-000040.ckpt", 40)
    assert last_checkpoint(tmp_path) == slurms
    newer = write_checkpoint(tmp_path / "checkpoints" / "step-000045.ckpt", 45, branch=1)
    assert last_checkpoint(tmp_path) == newer
    slurms = write_checkpoint(tmp_path / "hpc_ckpt_2.ckpt", 46, branch=1)
    assert last_checkpoint(tmp_path) == slurms


@pytest.mark.parametrize("damaged", ["hpc_ckpt_1.ckpt", "checkpoints/step-000040.ckpt"])
def test_a_damaged_checkpoint_does_not_block_the_whole_one(tmp_path, damaged):
    found = [write_checkpoint(tmp_path / name, 40) for name in ("hpc_ckpt_1.ckpt", "checkpoints/step-000040.ckpt")]
    (tmp_path / damaged).write_bytes(b"PK")
    assert last_checkpoint(tmp_path) == next(path for path in found if path != tmp_path / damaged)


def test_no_readable_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        last_checkpoint(tmp_path)
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"PK")
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        last_checkpoint(tmp_path)
    write_checkpoint(tmp_path / "checkpoints" / "step-000040.ckpt", 40).write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"none of its checkpoints can be read; the last one is step-000040\.ckpt"):
        last_checkpoint(tmp_path)


@pytest.mark.slow
def test_the_checkpoint_of_slurms_signal_is_taken_past_a_damaged_later_one(flash_train, tiny, tmp_path):
    """The advice of the error message, `resume=last`, works."""
    run = tmp_path / "run"
    options = ["trainer.checkpoint_every=1", "trainer.keep_checkpoints=null"]
    assert flash_train(*tiny, "max_steps=5", "stop_after=3", *options)[0] == 0
    (run / "checkpoints" / "step-000002.ckpt").rename(run / "hpc_ckpt_1.ckpt")
    named = run / "checkpoints" / "step-000001.ckpt"
    code, (line,) = flash_train(*tiny, "max_steps=5", f"resume={named}")
    assert code == 1 and "has newer checkpoints, up to step-000003.ckpt; allowed: resume=last" in line
    (run / "checkpoints" / "step-000003.ckpt").write_bytes(b"PK")
    code, (line,) = flash_train(*tiny, "max_steps=5", f"resume={named}")
    assert code == 1 and "has newer checkpoints, up to hpc_ckpt_1.ckpt; allowed: resume=last" in line
    assert flash_train(*tiny, "max_steps=5", "stop_after=1", "resume=last")[0] == 0
    assert steps_of(run)[-1] == 3


def test_a_folder_with_only_the_checkpoint_of_slurms_signal_holds_a_run(flash_train, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hpc_ckpt_1.ckpt").touch()
    code, (line,) = flash_train(*tiny)
    assert code == 1 and "holds a run; allowed: resume=last" in line
