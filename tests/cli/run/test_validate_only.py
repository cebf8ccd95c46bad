"""validate_only=true measures a checkpoint and changes nothing."""

import json

import pytest

from tests.support.cli.runs import summary_of


@pytest.mark.slow
def test_validate_only_measures_and_does_not_change_the_run(in_process, tiny, tmp_path):
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


@pytest.mark.slow
def test_validate_only_runs_in_another_directory(in_process, tiny, tmp_path, recwarn):
    in_process(*tiny)
    in_process(*tiny, f"run_dir={tmp_path / 'check'}", "validate_only=true",
               f"resume={tmp_path / 'run' / 'checkpoints' / 'step-000003.ckpt'}")  # fmt: skip
    assert [path.name for path in (tmp_path / "check").iterdir()] == ["validation.json"]
    assert not [one for one in recwarn if "no logger configured" in str(one.message)]
    in_process(*tiny, f"run_dir={tmp_path / 'check'}")  # the folder holds no run
    assert summary_of(tmp_path / "check")["steps"] == 3
