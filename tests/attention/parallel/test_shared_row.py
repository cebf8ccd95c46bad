"""Attention over a row that several ranks share: the same as in one process, and what it refuses."""

import json
import re

import pytest
import torch
import torch.distributed as dist

from flash_train.attention import AttentionSpec, Causal, Full, Packing, RngState, Window, attention
from flash_train.attention.parallel.row_plan import plan_row
from flash_train.attention.parallel.shared_attention import shared_attention
from flash_train.attention.parallel.shared_row import SharedRow
from tests.support.processes import run_python
from tests.support.tiers import slow_after

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", slow_after(1, [2, 4]))
def test_ranks_that_share_a_row_agree_with_one_process(ranks):
    done = run_python("tests.support.attention.parallel.shared_rows", ranks, 40)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(f"{ranks} ranks: 20 ulysses, 20 gather; largest difference"), done.stdout


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Group:
    """The size and the rank of a group that is not there: enough for what is checked before any exchange."""

    def __init__(self, size, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def inputs(rows, heads=4, kv_heads=2, v_head_dim=16):
    torch.manual_seed(0)
    return [torch.randn(rows, h, d) for h, d in ((heads, 16), (kv_heads, 16), (kv_heads, v_head_dim))]


@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_a_rank_that_shares_with_nobody_computes_the_whole_row(alone, method):
    lengths = (20, 33, 7)
    q, k, v = inputs(64, v_head_dim=24)
    rng = RngState(5, 1, entry=3)
    spec = AttentionSpec(Window(24, 0), dropout=0.3)
    row = SharedRow(plan_row(lengths, 64, 1, 24), alone, CPU)
    own = [row.own(x) for x in (q, k, v)]
    ours = shared_attention(*own, spec, row, method=method, rng=rng, backend="reference")
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    whole = attention(q, k, v, spec, packing=Packing(cu, cu), rng=rng, backend="reference")
    torch.testing.assert_close(ours, row.own(whole))
    assert not ours[60:].any()  # padding


REFUSED = {
    "method": (AttentionSpec(Causal()), {"method": "ring"}, "method='ring': must be 'auto', 'gather' or 'ulysses'"),
    "full": (AttentionSpec(Full()), {}, "must be Causal() or Window(left, 0) if several ranks share a row"),
    "right": (AttentionSpec(Window(8, 8)), {"window": 8}, "must be Causal() or Window(left, 0) if several"),
    "unbounded": (AttentionSpec(Window(8, None)), {"window": 8}, "must be Causal() or Window(left, 0) if several"),
    "no-window-in-plan": (AttentionSpec(Window(8, 0)), {}, "its window must be None, the plan's window"),
    "window-in-plan": (AttentionSpec(Causal()), {"window": 8}, "its window must be 8, the plan's window"),
    "window": (AttentionSpec(Window(8, 0)), {"window": 9}, "its window must be 9, the plan's window"),
    "rows": (AttentionSpec(Causal()), {"rows": 48}, "q.shape[0]=48: must be 64, the tokens of each rank in the plan"),
    "rng": (AttentionSpec(Causal(), dropout=0.1), {}, "dropout=0.1 without rng: all ranks need the same RngState"),
}


@pytest.mark.parametrize(("spec", "options", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_settings_that_do_not_fit_are_refused(alone, method, spec, options, message):
    row = SharedRow(plan_row([40, 24], 64, 1, options.get("window")), alone, CPU)
    with pytest.raises(ValueError, match=re.escape(message)):
        shared_attention(*inputs(options.get("rows", 64)), spec, row, method=options.get("method", method))


@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_tensors_that_do_not_fit_are_refused(alone, method):
    row, spec = SharedRow(plan_row([40, 24], 64, 1), alone, CPU), AttentionSpec(Causal(), dropout=0.1)
    q, k, v = inputs(64)
    for change, message in (
        ({"k": k[:32]}, "k.shape[0]=32: must be 64, the tokens of each rank in the plan"),
        ({"v": torch.cat([v, v])}, "v.shape[0]=128: must be 64, the tokens of each rank in the plan"),
        ({"sinks": torch.zeros(5)}, "sinks.shape=(5,): must be (4,), the heads of q"),
        ({"rng": RngState(1, query=16)}, "query and key must be 0 and entries None, because the plan gives them"),
    ):
        call = {"q": q, "k": k, "v": v, "rng": RngState(1), "method": method} | change
        with pytest.raises(ValueError, match=re.escape(message)):
            shared_attention(**call, spec=spec, row=row)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(4, 6, 2), (4, 6, 6), (8, 4, 4), (4, 12, 6), (6, 12, 4), (2, 4, 0)]
)
def test_ulysses_refuses_heads_that_the_ranks_do_not_divide(ranks, heads, kv_heads):
    row = SharedRow(plan_row([16 * ranks], 16 * ranks, ranks), Group(ranks), CPU)
    message = f"method='ulysses' with {heads} heads, {kv_heads} key heads and {ranks} ranks"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        shared_attention(*inputs(16, heads, kv_heads), AttentionSpec(Causal()), row, method="ulysses")
    assert "'gather' has no such limit" in str(error.value)


def test_a_plan_for_another_number_of_ranks_is_refused(alone):
    plan = plan_row([64], 64, 2)
    with pytest.raises(ValueError, match="the plan is for 2 ranks and the group has 1: must be equal"):
        SharedRow(plan, alone, CPU)
    with pytest.raises(ValueError, match="the plan is for 2 ranks and the group has 4: must be equal"):
        SharedRow(plan, Group(4, 1), CPU)


def test_selective_checkpointing_repeats_no_exchange_and_gradients_repeat():
    """With four groups of heads: gather fetches keys twice and returns gradients, ulysses exchanges there and back."""
    done = run_python("tests.support.attention.parallel.recompute")
    assert done.returncode == 0, done.stderr[-3000:]
    gather, ulysses = map(json.loads, done.stdout.splitlines())
    assert gather == {"method": "gather", "exchanges": {"none": 12, "selective": 12, "checkpoint": 16}, "same": True}
    assert ulysses == {"method": "ulysses", "exchanges": {"none": 8, "selective": 8, "checkpoint": 12}, "same": True}
