"""Two nodes with one rank each: two torchrun agents on this machine, or two processes with SLURM's variables."""

import csv
from pathlib import Path

import pytest

from tests.support.distributed.commands import finish, overrides, start, train, write_corpus
from tests.support.processes import free_port

pytestmark = pytest.mark.slow


def on_two_nodes(arguments: list[list[str]], fault: str = "0 0 none") -> list[tuple[int, str, str]]:
    """Run one rank on each node; the nodes may have different arguments, and only the second one has the fault."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    options = ("--nnodes", "2", "--nproc-per-node", "1", *where)
    sized = [[*given, "trainer.devices=1", "trainer.num_nodes=2", "parallel=fsdp"] for given in arguments]
    agents = [start(sized[0], torchrun=options), start(sized[1], torchrun=options, fault=fault)]
    return [finish(agent) for agent in agents]


def under_slurm(arguments: list[str]) -> list[tuple[int, str, str]]:
    """Run one rank on each of two nodes, as `srun` starts them."""
    job = {
        **{"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1234", "SLURM_NODELIST": "localhost"},
        **{"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"},
        "MASTER_PORT": str(free_port()),
    }
    sized = [*arguments, "trainer.devices=1", "trainer.num_nodes=2", "parallel=fsdp"]
    tasks = [
        start(sized, environment={**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}) for rank in range(2)
    ]
    return [finish(task) for task in tasks]


def losses(run_dir: Path) -> list[str]:
    with open(run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        return [row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]]


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def prepared(tmp_path: Path) -> int:
    """Count the ranks that have prepared the corpus."""
    return len((tmp_path / "prepared").read_text().splitlines())


def test_two_nodes_train_as_one_node_with_two_devices(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus")
    train(overrides(corpus, tmp_path / "one", "parallel=fsdp"), ranks=2)
    caches = [f"data.cache_dir={tmp_path / f'cache{node}'}" for node in range(2)]  # on each node's own disk
    monkeypatch.setenv("PREPARED", str(tmp_path / "prepared"))
    found = on_two_nodes([[*overrides(corpus, tmp_path / "two"), cache] for cache in caches])
    texts = [out for code, out, err in found if code == 0 and not err]
    assert len(texts) == 2, found
    assert "parallel: 2 devices, weights sharded over 2" in "".join(texts)
    assert "" in texts, "only the first rank prints"
    assert len(losses(tmp_path / "one")) == 8 and losses(tmp_path / "two") == losses(tmp_path / "one")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert prepared(tmp_path) == 2, "each node prepares the corpus once"


def test_slurms_tasks_train_as_torchruns_ranks(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    train(overrides(corpus, tmp_path / "one", "parallel=fsdp"), ranks=2)
    (code, text, error), other = under_slurm(overrides(corpus, tmp_path / "run"))
    assert (code, error) == (0, "") and "parallel: 2 devices, weights sharded over 2" in text
    assert other == (0, "", ""), "only the first rank prints"
    assert len(losses(tmp_path / "one")) == 8 and losses(tmp_path / "run") == losses(tmp_path / "one")


def test_a_node_that_dies_ends_the_other(tmp_path, monkeypatch):
    arguments = overrides(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    monkeypatch.setenv("PREPARED", str(tmp_path / "prepared"))
    # The nodes' ranks are numbered as they meet, so the node with the fault may be either
    found = on_two_nodes([arguments, arguments], fault="0 5 kill")
    assert [code for code, _, _ in found] == [1, 1]
    assert prepared(tmp_path) == 1, "the nodes share the cache"
    assert "has died: its process ended" in found[0][2]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")} == {
        "step-000002.ckpt",
        "step-000004.ckpt",
    }
