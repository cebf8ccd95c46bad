"""Sharded checkpoints: written whole or not at all, read by any number of ranks, without running code from them."""

import json
import os
import pickle
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flash_train.distributed import checkpoint as sharded
from flash_train.training.callbacks import AtomicCheckpointIO
from flash_train.training.callbacks.checkpoint import newest_checkpoint, read_checkpoint
from tests.support.processes import run_ranks

STEP = "step-000002.ckpt"


def run(folder: Path, devices: int, *options: str) -> dict[str, list[float]]:
    """Train on `devices` ranks, and return the weights."""
    run_ranks("tests.support.distributed.resumable_run", devices, folder, "--devices", devices, *options)
    return json.loads((folder / "weights.json").read_text())


def largest_difference(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    assert a.keys() == b.keys()
    return max(abs(x - y) for name in a for x, y in zip(a[name], b[name], strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on two ranks with sharded weights, and the same on one device: folder and weights of each."""
    folder = tmp_path_factory.mktemp("runs")
    two = run(folder / "two", 2, "--strategy", "sharded")
    return folder, two, run(folder / "one", 1)


def test_sharded_and_single_runs_agree(runs):
    _, two, one = runs
    assert largest_difference(two, one) < 1e-5


def test_the_same_ranks_resume_bit_for_bit(runs, tmp_path):
    folder, two, _ = runs
    resumed = run(tmp_path / "run", 2, "--strategy", "sharded", "--resume", str(folder / "two" / "checkpoints" / STEP))
    assert resumed == two


def test_checkpoints_written_in_the_background_are_the_same(runs, tmp_path):
    folder, two, _ = runs
    assert run(tmp_path / "run", 2, "--strategy", "sharded", "--write-later") == two
    for name in (STEP, "step-000004.ckpt"):
        own, other = (sharded.load_whole(each / "checkpoints" / name) for each in (tmp_path / "run", folder / "two"))
        torch.testing.assert_close(own["state_dict"], other["state_dict"], rtol=0, atol=0)
        states = [each["optimizer_states"][0] for each in (own, other)]
        torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert own["global_step"] == other["global_step"] == int(name[5:11])


@pytest.fixture(scope="module", params=["fp32", "8bit"])
def bf16_runs(request, tmp_path_factory):
    """A run on two ranks with weights in bf16 and an exact master: folder, weights, and the setting of the moments."""
    folder = tmp_path_factory.mktemp("bf16")
    moments = ("--moments", request.param)
    return folder, run(folder, 2, "--strategy", "sharded", *moments), moments


@pytest.mark.slow
def test_exact_masters_resume_bit_for_bit(bf16_runs, tmp_path):
    folder, two, moments = bf16_runs
    assert run(tmp_path, 2, "--strategy", "sharded", *moments, "--resume", str(folder / "checkpoints" / STEP)) == two
    saved = sharded.load_whole(folder / "checkpoints" / STEP)["optimizer_states"][0]["state"]
    assert {state["weight_lower"].dtype for state in saved.values()} == {torch.int16}
    wide = [state for state in saved.values() if state["exp_avg"].shape[-1] % 256 == 0 and state["exp_avg"].dim() > 1]
    if moments[1] == "8bit":
        assert {state["exp_avg_scale"].shape for state in wide} >= {(31, 1), (512, 1), (256, 2)}
    assert {state["exp_avg"].dtype for state in wide} == {torch.uint8 if moments[1] == "8bit" else torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"), [(1, ()), (2, ("--strategy", "replicated")), (4, ("--strategy", "sharded"))]
)
def test_exact_masters_resume_on_other_ranks(bf16_runs, tmp_path, devices, options):
    folder, two, moments = bf16_runs
    resumed = run(tmp_path, devices, *options, *moments, "--resume", str(folder / "checkpoints" / STEP))
    values = [(x, y) for name in two for x, y in zip(two[name], resumed[name], strict=True)]
    assert sum(x == y for x, y in values) > 0.9 * len(values)  # gradients in bf16 are added in another order
    assert max(abs(x - y) for x, y in values) < 0.01


@pytest.mark.parametrize(
    ("source", "devices", "options"),
    [
        ("two", 1, ()),
        ("two", 2, ("--strategy", "replicated")),
        ("two", 4, ("--strategy", "sharded", "--shard", "2", "--context", "2")),
        ("one", 2, ("--strategy", "sharded", "--context", "2")),
        ("one", 2, ("--strategy", "sharded", "--write-later")),
    ],
    ids=[
        *("folder on one device", "folder with whole weights", "folder on four ranks", "file on two ranks"),
        "file on two ranks that write in the background",
    ],
)
def test_other_ranks_resume_to_the_same_weights(runs, tmp_path, source, devices, options):
    folder, two, _ = runs
    resumed = run(tmp_path / "run", devices, *options, "--resume", str(folder / source / "checkpoints" / STEP))
    assert largest_difference(resumed, two) < 1e-5


def test_a_folder_reads_as_a_file_does(runs):
    folder, two, _ = runs
    path = folder / "two" / "checkpoints" / "step-000004.ckpt"
    found = read_checkpoint(path)
    assert {name: value.flatten().tolist() for name, value in found["state_dict"].items()} == two
    file = read_checkpoint(folder / "one" / "checkpoints" / "step-000004.ckpt")
    assert found.keys() == file.keys()
    for index, state in file["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(found["optimizer_states"][0]["state"][index][name], value, atol=1e-5, rtol=0)
    assert newest_checkpoint(path.parent) == path
    assert "step" in str(read_checkpoint(path, weights=False)["loops"])


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small() -> dict:
    mesh = init_device_mesh("cpu", (1,))
    return {
        "global_step": 3,
        "state_dict": {"a": distribute_tensor(torch.randn(5, 2), mesh, [Shard(0)]), "b": torch.arange(3)},
        "lists": [{"c": distribute_tensor(torch.randn(4).bfloat16(), mesh, [Shard(0)])}],
    }


def test_every_value_returns(alone, tmp_path):
    saved = small()
    sharded.save_sharded(saved, tmp_path / "x.ckpt")
    found = AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert found["global_step"] == 3 and torch.equal(found["state_dict"]["b"], torch.arange(3))
    assert torch.equal(found["state_dict"]["a"], saved["state_dict"]["a"].full_tensor())
    assert torch.equal(found["lists"][0]["c"], saved["lists"][0]["c"].full_tensor())


def test_a_folder_is_replaced(alone, tmp_path):
    for _ in range(2):
        saved = small()
        sharded.save_sharded(saved, tmp_path / "x.ckpt")
    found = sharded.load_whole(tmp_path / "x.ckpt")
    assert torch.equal(found["state_dict"]["a"], saved["state_dict"]["a"].full_tensor())


def test_a_file_and_a_folder_replace_each_other(alone, tmp_path):
    """A run that resumes at an earlier step on another number of devices writes the steps again."""
    path, saved = tmp_path / "x.ckpt", small()
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)
    sharded.save_sharded(saved, path)
    assert torch.equal(sharded.load_whole(path)["state_dict"]["a"], saved["state_dict"]["a"].full_tensor())
    (path / sharded.VALUES).unlink()  # also one that is not whole
    AtomicCheckpointIO().save_checkpoint({"global_step": 2}, path)
    assert AtomicCheckpointIO().load_checkpoint(path) == {"global_step": 2}
    assert {file.name for file in tmp_path.iterdir()} == {"x.ckpt", "store"}


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes").touch()
    with pytest.raises(IsADirectoryError):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "x")
    assert [file.name for file in tmp_path.rglob("*")] == ["x", "notes"]


def test_nothing_is_left_of_a_checkpoint_that_failed(alone, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        sharded.save_sharded(small(), tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_systems_error_is_not_hidden_by_torch(alone, tmp_path):
    """While closing the archive of plain values, torch raises its own error instead."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sharded.save_sharded({**small(), "large": torch.ones(100_000)}, tmp_path / "x.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_rank_that_cannot_write_is_named(alone, tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="rank 0: No space left on device"):
        sharded.save_sharded(small(), tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_another_error_of_a_rank_is_raised_as_it_is(alone, tmp_path, monkeypatch):
    def broken(*_args, **_options):
        raise KeyError("a mistake")

    monkeypatch.setattr(sharded.FileSystemWriter, "write_data", broken)
    with pytest.raises(KeyError, match="a mistake") as raised:
        sharded.save_sharded(small(), tmp_path / "x.ckpt")
    (note,) = raised.value.__notes__
    assert note.startswith("Rank 0 raised this while it wrote its part of a checkpoint:") and "in broken" in note
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_reading_alone_does_not_warn(alone, tmp_path):
    sharded.save_sharded(small(), tmp_path / "x.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded.load_whole(tmp_path / "x.ckpt")


class Attack:
    def __reduce__(self):
        return os.system, ("echo attacked",)


def test_no_code_runs_from_a_checkpoint(alone, tmp_path, capfd):
    path = tmp_path / "x.ckpt"
    sharded.save_sharded(small(), path)
    whole = path.with_name("whole.ckpt")
    shutil.copytree(path, whole)
    (path / sharded.METADATA).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"x.ckpt is damaged: .metadata cannot be read \(posix.system is no part of"):
        sharded.load_whole(path)
    torch.save({"global_step": Attack()}, whole / sharded.VALUES)
    with pytest.raises(ValueError, match="is not a checkpoint of this program"):
        read_checkpoint(whole)
    assert "attacked" not in capfd.readouterr().out


def test_another_shape_is_refused(alone, tmp_path):
    sharded.save_sharded(small(), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"state_dict a has shape \(5, 2\), and \(2, 5\) here"):
        sharded.load_sharded(tmp_path / "x.ckpt", lambda place, shape, dtype: torch.zeros(2, 5))


def test_removing_a_checkpoint(alone, tmp_path):
    sharded.save_sharded(small(), tmp_path / "x.ckpt")
    (tmp_path / "y.ckpt").write_text("a file")
    for name in ("x.ckpt", "y.ckpt", "y.ckpt"):
        sharded.remove_checkpoint(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_without_its_last_file_is_no_checkpoint(alone, tmp_path):
    path = tmp_path / STEP
    sharded.save_sharded(small(), path)
    assert sharded.is_sharded_checkpoint(path)
    (path / sharded.VALUES).unlink()
    assert not sharded.is_sharded_checkpoint(path)
    with pytest.raises(ValueError, match="none of its checkpoints can be read"):
        newest_checkpoint(tmp_path)
