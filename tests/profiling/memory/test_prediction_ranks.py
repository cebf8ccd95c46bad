"""The predicted memory of a step on each of several devices, compared with measurements."""

import random
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention.parallel import plan_row
from flash_train.attention.parallel.key_transfers import plan_transfers
from flash_train.profiling.memory.prediction import KINDS, _StepWalk, predict
from flash_train.profiling.memory.row_share import largest_share
from tests.support.processes import ROOT, run
from tests.support.profiling.measured_ranks import MIB, small_steps
from tests.support.tiers import slow_after

MODULE = "tests.support.profiling.measured_ranks"
LINE = re.compile(r"(\S+) +([\d.]+) +([\d.]+) MiB")


def peaks_of(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[float, float]]:
    """Predicted and measured peaks in MiB, by the step's name."""
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (float(predicted), float(peak)) for name, predicted, peak in LINE.findall(done.stdout)}


QUICK = ("ddp-true-checkpoint", "fsdp", "gather-groups")


@pytest.mark.parametrize(
    ("ranks", "names"),
    slow_after(1, [(2, QUICK), (2, tuple(set(small_steps(2)) - set(QUICK))), (4, tuple(small_steps(4)))], unpack=True),
    ids=["2-quick", "2", "4"],
)
def test_measured_peak_agrees_with_the_prediction(ranks, names):
    found = peaks_of(run(MODULE, "--ranks", ranks, *names, timeout=900))
    assert set(found) == set(names)
    wrong = {name: peaks for name, peaks in found.items() if abs(peaks[0] / peaks[1] - 1) > 0.005}
    assert not wrong, f"predicted and measured MiB: {wrong}"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_peak_on_two_gpus_agrees_with_the_prediction():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", MODULE, "--gpu"]
    found = peaks_of(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200))
    assert len(found) >= 12
    wrong = {name: (a, b) for name, (a, b) in found.items() if abs(a - b) > max(0.05 * b, 256)}
    assert not wrong, f"predicted and measured MiB: {wrong}"


@pytest.mark.parametrize("name", small_steps(4))
def test_a_step_on_several_devices_releases_what_its_blocks_held(name):
    walk = _StepWalk(small_steps(4)[name])
    walk.run()
    lasting = {
        "weights", "optimizer", "optimizer's blocks", "workspace", "batch", "own part of the batch", "lists of rows",
        "gradients", "buckets of gradients",
    }  # fmt: skip
    assert {held for held in walk.ledger.held if not held.startswith("gradient")} <= lasting
    assert set(walk.ledger.parts) <= set(KINDS)


def test_more_devices_never_take_more_memory_each():
    for name in ("fsdp", "fsdp-true-accumulate", "gather", "gather-selective-tied", "ulysses"):
        steps = [small_steps(ranks)[name] for ranks in (2, 4)]  # rows that devices share are twice as long, too
        first, second = (predict(step).peak_bytes for step in steps)
        assert second < first + MIB, name


def test_counts_of_shared_rows_are_those_of_the_transfers():
    draw = random.Random(7)
    for _ in range(60):
        ranks = draw.choice([2, 3, 4, 8])
        row_tokens = ranks * draw.randint(16, 200)
        lengths: list[int] = []
        while (left := row_tokens - sum(lengths)) > 0 and len(lengths) < 9:
            lengths.append(draw.randint(1, left))
        plan = plan_row(lengths, row_tokens, ranks)
        transfers = [plan_transfers(plan, rank) for rank in range(ranks)]
        counts = {(t.tokens, len(t.cu_seqlens_q) - 1, len(t.keys), t.sent_rows, sum(t.receive)) for t in transfers}
        found = largest_share(tuple(lengths), row_tokens, ranks)
        assert (found.shared, found.pieces, found.keys, found.sent, found.received) in counts
        assert found.keys + found.sent + found.received == max(sum(count[2:]) for count in counts)
        assert found.shared + sum(rows for rows, _ in found.calls) == row_tokens // ranks
        assert found.largest == transfers[0].largest
