"""`flash-train` on all GPUs with NCCL: ranks that fail, resuming, and checkpoints in the background."""

import json
import signal

import pytest
import torch

from flash_train.distributed.checkpoint import load_whole
from tests.support.cli.runs import losses_of
from tests.support.distributed.commands import finish, overrides, start, train, weights_of, write_corpus

RANKS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("several_gpus") / "corpus")


def arguments(corpus, run_dir, *more):
    rows = f"global_batch={max(4, RANKS)}"
    return overrides(corpus, run_dir, rows, "parallel=fsdp", *more, hardware="auto")


def started(corpus, run_dir, *more, fault):
    return start(arguments(corpus, run_dir, f"trainer.devices={RANKS}", *more), fault=fault)


def checkpoints(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def unbroken(corpus):
    run_dir = corpus.parent / "unbroken"
    train(arguments(corpus, run_dir), RANKS)
    return run_dir


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("1 5 kill", 1, "flash-train: rank 1 has died"),
        ("0 5 kill", -signal.SIGKILL, "flash-train: rank 0 has died"),
        ("1 5 memory", 4, "flash-train: out of GPU memory on rank 1 at seq_len=64"),
        ("1 5 nan", 1, "flash-train: the training loss is nan at step 5 on rank 1"),
    ],
    ids=["kill 1", "kill 0", "memory", "loss"],
)
def test_all_ranks_end_and_the_run_continues_bit_for_bit(corpus, unbroken, tmp_path, fault, code, message):
    run_dir = tmp_path / "run"
    found, _, err = finish(started(corpus, run_dir, fault=fault))
    own = [line for line in err.splitlines() if line.startswith("flash-train: ")]
    assert found == code and len(own) == 1 and own[0].startswith(message), err
    assert checkpoints(run_dir) == ["step-000002.ckpt", "step-000004.ckpt"]
    train(arguments(corpus, run_dir, "resume=last"), RANKS)
    assert weights_of(run_dir, 8) == weights_of(unbroken, 8)


def test_a_rank_that_hangs_is_named(corpus, tmp_path):
    code, _, err = finish(started(corpus, tmp_path / "run", "parallel.timeout=0.1", fault="1 5 hang"))
    assert code == 1 and "rank 1 did not arrive at a collective within the timeout of 6 s" in err, err


def test_a_signal_to_one_rank_saves_on_all(corpus, tmp_path):
    run_dir = tmp_path / "run"
    code, _, err = finish(started(corpus, run_dir, fault="1 5 term"))
    assert code == 128 + signal.SIGTERM, err
    assert checkpoints(run_dir)[-1] == "step-000005.ckpt"


def test_a_rank_that_dies_while_it_saves_leaves_no_checkpoint(corpus, tmp_path):
    run_dir = tmp_path / "run"
    _, _, err = finish(started(corpus, run_dir, fault="1 4 save"))
    assert "flash-train: rank 1 has died" in err
    assert [path for path in checkpoints(run_dir) if path.startswith("step")] == ["step-000002.ckpt"]


def test_checkpoints_written_in_the_background_are_the_same(corpus, unbroken, tmp_path):
    run_dir = tmp_path / "run"
    train(arguments(corpus, run_dir, "trainer.async_checkpoints=true"), RANKS)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    assert checkpoints(run_dir) == checkpoints(unbroken)
    for name in checkpoints(unbroken):
        own, other = (load_whole(each / "checkpoints" / name) for each in (run_dir, unbroken))
        for part in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(own[part], other[part], rtol=0, atol=0)


def test_half_of_the_gpus_continue_until_one_is_left(corpus, unbroken, tmp_path):
    run_dir, ranks = tmp_path / "run", RANKS
    while True:
        part = ("stop_after=2",) if ranks > 1 else ("parallel=none",)
        resume = ("resume=last",) if ranks < RANKS else ()
        train(arguments(corpus, run_dir, *part, *resume), ranks)
        if ranks == 1:
            break
        ranks //= 2
    whole, parts = ({step: float(loss) for step, loss in losses_of(each).items()} for each in (unbroken, run_dir))
    assert len(whole) == 8 and parts == pytest.approx(whole, rel=2e-3)  # bf16's products round 4e-3
