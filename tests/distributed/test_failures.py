"""`flash-train` on two ranks when one of them fails: all end soon, one message names it, the run can continue."""

import json
import shutil
import signal

import pytest

from tests.support.distributed.commands import finish, overrides, start, train, weights_of, write_corpus
from tests.support.processes import free_port

TWO = ("trainer.devices=2", "parallel=fsdp")


def checkpoints(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("failures") / "corpus")


@pytest.fixture(scope="module")
def killed(corpus):
    """A run whose rank 1 was killed in step 5: run directory, exit code and standard error."""
    run_dir = corpus.parent / "killed"
    code, _, err = finish(start(overrides(corpus, run_dir, *TWO), fault="1 5 kill"))
    return run_dir, code, err


def test_a_killed_rank_ends_the_run(killed):
    run_dir, code, err = killed
    assert code == 1
    assert len(err.splitlines()) == 1 and err.startswith("flash-train: rank 1 has died"), err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"].startswith("rank 1 has died") and summary["steps"] == 4
    assert checkpoints(run_dir) == ["step-000002.ckpt", "step-000004.ckpt"]


@pytest.fixture(scope="module")
def unbroken(corpus):
    run_dir = corpus.parent / "unbroken"
    train(overrides(corpus, run_dir, "parallel=fsdp"), ranks=2)
    return weights_of(run_dir, 8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_run_continues_on_any_number_of_ranks(killed, unbroken, corpus, tmp_path, ranks):
    run_dir = tmp_path / "run"
    shutil.copytree(killed[0], run_dir)
    mode = ["parallel=fsdp"] if ranks > 1 else []
    train(overrides(corpus, run_dir, *mode, "resume=last"), ranks=ranks)
    found = weights_of(run_dir, 8)
    assert found.keys() == unbroken.keys()
    pairs = [(x, y) for name in found for x, y in zip(found[name], unbroken[name], strict=True)]
    assert max(abs(x - y) for x, y in pairs) < 1e-5
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("0 5 kill", -signal.SIGKILL, "flash-train: rank 0 has died"),
        ("1 5 memory", 4, "flash-train: out of GPU memory on rank 1 at seq_len=64"),
        ("0 5 memory", 4, "flash-train: out of GPU memory on rank 0 at seq_len=64"),
        ("1 5 nan", 1, "flash-train: the training loss is nan at step 5 on rank 1: lower optimizer.lr"),
        ("1 5 exit", 1, "flash-train: rank 1 called sys.exit(3); all ranks end"),
    ],
    ids=["kill 0", "memory 1", "memory 0", "loss 1", "exit 1"],
)
def test_one_line_names_the_rank(corpus, tmp_path, launcher, fault, code, message):
    options = ("--nproc-per-node", "2", "--master-port", str(free_port())) if launcher == "torchrun" else ()
    found, _, err = finish(start(overrides(corpus, tmp_path / "run", *TWO), fault=fault, torchrun=options))
    assert found == (1 if options else code)
    own = [line for line in err.splitlines() if line.startswith("flash-train: ")]
    assert len(own) == 1 and own[0].startswith(message), err
    if options:
        assert f"rank      : {fault[0]} (local_rank: {fault[0]})" in err.partition("Root Cause")[2] or "nan" in fault
        assert "torch/distributed/run.py" in err and "gloo" not in err
    else:
        assert len(err.splitlines()) == 1
    assert checkpoints(tmp_path / "run") == ["step-000002.ckpt", "step-000004.ckpt"]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "code"), [(0, -signal.SIGKILL), (1, 1)])
def test_a_rank_that_dies_before_the_ranks_are_connected_ends_all(corpus, tmp_path, rank, code):
    found, _, err = finish(start(overrides(corpus, tmp_path / "run", *TWO), fault=f"{rank} 0 early kill"))
    assert found == code
    assert rank == 0 or err == "flash-train: rank 1 ended with status -9 before the ranks were connected\n"


@pytest.mark.slow
def test_only_the_failed_rank_prints_a_traceback(corpus, tmp_path):
    code, _, err = finish(start(overrides(corpus, tmp_path / "run", *TWO), fault="1 5 error"))
    assert code == 1 and err.count("Traceback") == 1
    assert 'KeyError: "a mistake in one rank\'s data"\nThis was rank 1 of 2.' in err


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(corpus, tmp_path):
    arguments = overrides(corpus, tmp_path / "run", "trainer.devices=2", "parallel=ddp", "parallel.timeout=0.1")
    code, _, err = finish(start(arguments, fault="1 5 hang"))
    assert code == 1
    assert err.startswith("flash-train: rank 1 did not arrive at a collective within the timeout of 6 s"), err
    assert err.rstrip().endswith("time.sleep(3600)") and "gloo" not in err


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_saves_on_all(corpus, tmp_path, rank):
    run_dir = tmp_path / "run"
    code, _, err = finish(start(overrides(corpus, run_dir, *TWO), fault=f"{rank} 5 term"))
    assert code == 128 + signal.SIGTERM and err.strip().count("\n") == 0
    assert ("SIGTERM: stopping once all ranks agree", "another rank received a signal: stopping")[rank] in err
    assert checkpoints(run_dir)[-1] == "step-000006.ckpt"  # the ranks vote after step 5, and know after step 6
    parts = {path.name for path in (run_dir / "checkpoints" / "step-000006.ckpt").iterdir()}
    assert parts == {".metadata", "__0_0.distcp", "__1_0.distcp", "values.pt"}


@pytest.mark.slow
def test_a_signal_to_one_rank_just_before_the_end_gives_all_ranks_one_status(corpus, tmp_path):
    run_dir = tmp_path / "run"
    code, _, err = finish(start(overrides(corpus, run_dir, *TWO), fault="1 8 term"))
    assert code == 128 + signal.SIGTERM, err
    assert checkpoints(run_dir)[-1] == "step-000008.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_a_validation_with_sharded_weights_on_all(corpus, tmp_path, rank):
    """No rank may skip a batch that the others compute, because each of them has a part of the weights."""
    run_dir, evaluated = tmp_path / "run", tmp_path / "evaluated"
    options = (*TWO, "val_every=4", "data.val_batches=20", "data.val_fraction=0.5")
    environment = {"EVALUATED": str(evaluated)}
    code, _, err = finish(
        start(overrides(corpus, run_dir, *options), fault=f"{rank} 4 validation", environment=environment)
    )
    assert code == 128 + signal.SIGTERM, err
    assert checkpoints(run_dir)[-1] == "step-000004.ckpt"
    assert evaluated.read_text().split().count("4") == 2 * 3  # the vote begins before the third batch


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_it_saves_leaves_no_checkpoint(corpus, tmp_path, rank):
    run_dir = tmp_path / "run"
    _, _, err = finish(start(overrides(corpus, run_dir, *TWO), fault=f"{rank} 4 save"))
    assert err.startswith(f"flash-train: rank {rank} has died")
    assert checkpoints(run_dir) == ["step-000002.ckpt"]
    code, out, err = finish(start(overrides(corpus, run_dir, *TWO, "resume=last", "stop_after=1")))
    assert code == 0, err
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000002.ckpt", "step-000003.ckpt"]
