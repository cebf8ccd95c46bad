"""Run folders, checkpoints and ablations that version 0.1.0 wrote.

The folder ``0.1.0`` was written by `record.py`. What holds on every machine is compared exactly: the state that is
loaded, the rows that are read, the random seeds, the names of what is written. Losses depend on the CPU and on
PyTorch: they are compared exactly on the machine that wrote the folder, and to 1e-5 elsewhere.
"""

import csv
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flash_train.cli import ablate, collect_runs, train
from tests.compatibility.record import (
    ABLATION,
    COLUMNS,
    MAX_STEPS,
    STOP_AFTER,
    Observed,
    call,
    dropout_draws,
    hash_tensors,
    machine,
    observed,
)

WRITTEN = Path(__file__).parent / "0.1.0"
EXPECTED: dict[str, Any] = json.loads((WRITTEN / "expected.json").read_text(encoding="utf-8"))
LAST = f"run/checkpoints/step-{MAX_STEPS:06}.ckpt"


@dataclass(frozen=True)
class Resumed:
    """The stopped run, resumed to its end.

    Attributes:
        folder: a copy of ``0.1.0``; the run is in ``run``.
        observed: what the training steps found.
        saved: the checkpoint of 0.1.0.
        last: the checkpoint of the last step.
    """

    folder: Path
    observed: Observed
    saved: dict[str, Any]
    last: dict[str, Any]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    """All options come from the config.yaml of 0.1.0, in which the paths are relative."""
    folder = tmp_path_factory.mktemp("compatibility") / "0.1.0"
    shutil.copytree(WRITTEN, folder)
    with pytest.MonkeyPatch.context() as patch, observed() as found:
        patch.chdir(folder)
        call(train.main, "run_dir=run", "resume=last", "callbacks.sample.tokens=0")
    saved = torch.load(WRITTEN / "run" / "checkpoints" / f"step-{STOP_AFTER:06}.ckpt", weights_only=True)
    yield Resumed(folder, found, saved, torch.load(folder / LAST, weights_only=True))


def metrics(lines: list[str]) -> list[list[str]]:
    """The columns that the training decides, as the digits in the file."""
    return [[row[name] for name in COLUMNS] for row in csv.DictReader(lines)]


def test_weights_optimizer_and_schedule_are_loaded_as_they_were_saved(resumed):
    for group in resumed.observed.loaded["optimizer_states"][0]["param_groups"]:
        del group["param_names"]  # 0.1.0 did not write them
    for name, loaded in resumed.observed.loaded.items():
        torch.testing.assert_close(loaded, resumed.saved[name], rtol=0, atol=0, msg=lambda text, name=name: name + text)


def test_rows_and_seeds_are_those_of_the_unbroken_run(resumed):
    read = len(EXPECTED["batches"]) * STOP_AFTER // MAX_STEPS
    assert resumed.observed.batches == EXPECTED["batches"][read:]
    assert resumed.last["PackedDataModule"].items() >= EXPECTED["data"].items()


def test_all_that_0_1_0_wrote_is_still_written(resumed):
    assert resumed.last.keys() >= set(EXPECTED["checkpoint_keys"])
    assert resumed.last["hyper_parameters"].keys() >= resumed.saved["hyper_parameters"].keys()
    last, saved = (each["state_dict"] for each in (resumed.last, resumed.saved))
    assert {name: x.shape for name, x in last.items()} == {name: x.shape for name, x in saved.items()}
    summary = json.loads((resumed.folder / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary.keys() >= set(EXPECTED["summary_keys"])
    assert (summary["status"], summary["steps"]) == ("finished", MAX_STEPS)
    columns = EXPECTED["metrics"][0].split(",")
    assert set((resumed.folder / "run" / "metrics.csv").read_text().splitlines()[0].split(",")) >= set(columns)
    configs = [yaml.safe_load((folder / "run" / "config.yaml").read_text()) for folder in (resumed.folder, WRITTEN)]
    new, old = (set(leaves(config)) for config in configs)
    assert new >= old


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in tree.items():
        yield from leaves(child, f"{prefix}{name}.") if isinstance(child, dict) else [f"{prefix}{name}"]


def test_losses_and_weights_are_those_of_the_unbroken_run(resumed):
    found = metrics((resumed.folder / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines())
    expected = metrics(EXPECTED["metrics"])
    if machine() == EXPECTED["machine"]:
        # Only a stopped run validates after the step at which it stops.
        assert [row[:4] for row in found] == [row[:4] for row in expected]
        assert found[STOP_AFTER:] == expected[STOP_AFTER:]
        assert hash_tensors(resumed.last["state_dict"]) == EXPECTED["weights"]
        return
    assert [row[0] for row in found] == [row[0] for row in expected]
    if dropout_draws() != EXPECTED["dropout_draws"]:
        pytest.skip("this build of PyTorch draws other dropout masks than the one that wrote the folder")
    for ours, theirs in zip(found[STOP_AFTER:], expected[STOP_AFTER:], strict=True):
        assert [bool(x) for x in ours] == [bool(x) for x in theirs]
        assert [float(x) for x in ours if x] == pytest.approx([float(x) for x in theirs if x], rel=1e-5)


@pytest.fixture
def ablation(tmp_path, monkeypatch) -> Path:
    """A copy of the ablation of 0.1.0, in the present folder."""
    shutil.copytree(WRITTEN / "ablation", tmp_path / "ablation")
    monkeypatch.chdir(tmp_path)
    return Path("ablation")


def rows_of(ablation: Path) -> list[dict[str, str]]:
    with open(ablation / "ablation.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_finished_trials_are_not_run_again(ablation, capfd):
    """As if version, machine and the defaults of conf/ablate.yaml were still those that the trials had."""
    before = rows_of(ablation)
    assert len(before) == 2
    for path in ablation.glob("cells/*/cell.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["overrides"].remove("data.val_batches=1")
        record["overrides"] += ["data.val_tokens=32768", "callbacks.sample.tokens=0"]
        path.write_text(json.dumps(record | {"versions": {}}), encoding="utf-8")
    call(ablate.main, *ABLATION, f"run_dir={ablation}")
    assert "2 of 2" in capfd.readouterr().out.splitlines()[0]
    after = rows_of(ablation)
    assert [{name: row[name] for name in before[0]} for row in after] == before


def test_an_ablation_with_other_defaults_is_left_as_it_is(ablation, capsys):
    """The defaults of conf/ablate.yaml have changed since, so its trials measured something else."""
    before = {path: path.read_bytes() for path in ablation.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stop:
        call(ablate.main, *ABLATION, f"run_dir={ablation}")
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and "data.val_tokens" in line
    assert {path: path.read_bytes() for path in ablation.rglob("*") if path.is_file()} == before


def test_collect_runs_reads_runs_and_ablations(ablation):
    def collected(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
        assert collect_runs.main([str(folder), "--out", "records.json"]) == 0
        return json.loads(Path("records.json").read_text(encoding="utf-8"))["records"]

    (run,) = collected(WRITTEN / "run")
    assert (run["steps"], run["max_steps"]) == (STOP_AFTER, MAX_STEPS)
    trials = collected(ablation)
    assert [trial["axes"]["attention"] for trial in trials] == ["sdpa", "standard"]
    assert all(trial["status"] == "ok" and len(trial["losses"]) == 3 for trial in trials)
