"""The rows of an optimizer step are dealt to micro-batches and ranks by their cost."""

from itertools import islice, permutations

import numpy as np
import pytest
import torch

from flash_train.data import PackedDataModule, RecallCorpus, StdlibCorpus, pack
from flash_train.data.order.deal import deal, imbalance
from flash_train.data.order.sampler import EndlessOrder
from tests.support.data.loops import FakeTrainer, Recorder, StopAtBatch, equal_batches, fit

SHAPES = [(1, 2, 1), (1, 2, 8), (1, 8, 4), (4, 2, 1), (2, 4, 3), (3, 3, 2), (8, 1, 2)]  # batch_size, ranks, accumulate
MODES = ["micro_batch", "step"]


def draw(kind: str, n: int, seed: int) -> np.ndarray:
    random = np.random.default_rng([seed, n])
    if kind == "equal":
        return np.full(n, 0.1)
    return random.pareto(1.0, n) + 0.1 if kind == "heavy" else random.integers(1, 4, n).astype(float)


def slowest_over_mean(costs: np.ndarray, order: np.ndarray, synchronise: str) -> float:
    """The imbalance, by its definition, one micro-batch and rank at a time."""
    loads = [[sum(costs[row] for row in rank) for rank in micro_batch] for micro_batch in order.tolist()]
    if synchronise == "step":
        loads = [[sum(rank) for rank in zip(*loads, strict=True)]]
    return sum(max(ranks) for ranks in loads) / sum(sum(ranks) / len(ranks) for ranks in loads)


@pytest.mark.parametrize("synchronise", MODES)
@pytest.mark.parametrize("kind", ["heavy", "ties", "equal"])
@pytest.mark.parametrize(("batch_size", "ranks", "accumulate"), SHAPES)
def test_a_deal_is_a_permutation_and_never_worse_than_the_given_order(batch_size, ranks, accumulate, kind, synchronise):
    n = batch_size * ranks * accumulate
    given = np.arange(n).reshape(accumulate, ranks, batch_size)
    for seed in range(20):
        costs = draw(kind, n, seed)
        order = deal(costs, ranks, batch_size, synchronise)
        assert order.shape == given.shape and sorted(order.ravel().tolist()) == list(range(n))
        before, after = (slowest_over_mean(costs, rows, synchronise) for rows in (given, order))
        assert 1 - 1e-12 < after <= before + 1e-12
        assert imbalance(costs, order, synchronise) == pytest.approx(after, rel=1e-12)
        assert np.array_equal(deal(costs.copy(), ranks, batch_size, synchronise), order)
        if kind == "equal":
            assert np.array_equal(order, given)


@pytest.mark.parametrize("synchronise", MODES)
def test_the_given_order_stays_if_it_is_better(synchronise):
    # The greedy rule makes 4 + 3 + 3 and 4 + 3 + 1 of these rows; the given order has 9 and 9.
    costs = np.array([4.0, 4, 1, 3, 3, 3])
    assert deal(costs, 2, 3, synchronise).tolist() == [[[0, 1, 2], [3, 4, 5]]]


@pytest.mark.parametrize(("batch_size", "ranks", "accumulate"), [(1, 2, 4), (1, 4, 2), (2, 3, 1), (2, 4, 1)])
def test_no_order_has_faster_micro_batches(batch_size, ranks, accumulate):
    """With one row per rank, or two rows per rank in a single micro-batch, the rule finds the best of all orders."""
    n = batch_size * ranks * accumulate
    orders = np.array(list(permutations(range(n)))).reshape(-1, accumulate, ranks, batch_size)
    for seed in range(5):
        costs = np.random.default_rng([seed, n, batch_size]).pareto(1.0, n) + 0.1
        best = costs[orders].sum(axis=3).max(axis=2).sum(axis=1).min()
        order = deal(costs, ranks, batch_size, "micro_batch")
        assert costs[order].sum(axis=2).max(axis=1).sum() == pytest.approx(best, rel=1e-12)


def test_costly_rows_alternate_between_ranks():
    """So the sums of a whole step are balanced, too."""
    costs = np.array([8.0, 1, 6, 3, 4, 5, 2, 7])
    for synchronise in MODES:
        sums = costs[deal(costs, 2, 1, synchronise)].sum(axis=(0, 2))
        assert sums.tolist() == [18, 18]


def test_rows_that_do_not_fill_micro_batches_are_refused():
    with pytest.raises(ValueError, match=r"len\(costs\)=7: must be a multiple of ranks \* batch_size, 4"):
        deal(np.ones(7), 2, 2, "step")
    with pytest.raises(ValueError, match="synchronise='often': must be one of micro_batch, step"):
        deal(np.ones(8), 2, 2, "often")


@pytest.fixture(scope="module")
def document_lengths() -> np.ndarray:
    """The lengths of the standard library's documents in bytes, with a begin and an end token."""
    return np.array([len(document.text) + 2 for document in StdlibCorpus().documents()])


GPT2_SMALL = 6 * 124e6, 6 * 12 * 768  # FLOPs per token and per square of a length: 12 layers of width 768


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seq_len", [4096, 16384])
def test_ranks_wait_less_than_3_percent_on_the_standard_library(document_lengths, seq_len, ranks):
    squares = pack(document_lengths, seq_len).squared_lengths
    order, n = EndlessOrder(len(squares), seed=0), 8 * ranks
    per_token, per_square = GPT2_SMALL
    for synchronise in MODES:
        before, after = [], []
        for step in range(100):
            costs = per_token * seq_len + per_square * squares[order.rows(step * n, n)].astype(float)
            before.append(imbalance(costs, np.arange(n).reshape(8, ranks, 1), synchronise))
            after.append(imbalance(costs, deal(costs, ranks, 1, synchronise), synchronise))
        assert np.mean(after) < min(1.03, np.mean(before) - 0.001)


# -- the data module


def rows_of(batches) -> list[list[int]]:
    return sorted(row for batch in batches for row in batch["tokens"].tolist())


def cost_of(batch) -> float:
    return sum(length**2 for length in batch["lengths"])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("synchronise", MODES)
def test_dealt_steps_have_the_same_rows_and_wait_less(make_data, synchronise, num_workers):
    accumulate, ranks, steps = 4, 2, 8
    options = {"batch_size": 2, "accumulate": accumulate}
    plain, dealt = [], []
    for rank in range(ranks):
        share = {"rank": rank, "world_size": ranks, **options}
        plain.append(list(islice(make_data(**share).train_dataloader(), accumulate * steps)))
        data = make_data(**share, row_cost=(0.0, 1.0), synchronise=synchronise, num_workers=num_workers)
        batches, imbalances = [], []
        for batch in islice(data.train_dataloader(), accumulate * steps):
            batches.append(batch)
            if len(batches) % accumulate == 0:
                imbalances.append(data.imbalance)
            assert data.imbalance == (imbalances[-1] if imbalances else None)
        dealt.append(batches)
    waits = []
    for step in range(steps):
        part = slice(step * accumulate, (step + 1) * accumulate)
        given, found = ([rank[part] for rank in batches] for batches in (plain, dealt))
        assert rows_of(sum(found, [])) == rows_of(sum(given, []))
        loads = [np.array([[cost_of(batch) for batch in rank] for rank in batches]).T for batches in (given, found)]
        if synchronise == "step":
            loads = [load.sum(axis=0)[None] for load in loads]
        before, after = (load.max(axis=1).sum() / load.mean(axis=1).sum() for load in loads)
        assert after <= before + 1e-12 and imbalances[step] == pytest.approx(after, rel=1e-12)
        waits.append((before, after))
    assert np.mean(waits, axis=0)[1] < np.mean(waits, axis=0)[0] - 0.01


def test_equal_costs_and_one_stream_keep_the_order(make_data):
    for options in ({"row_cost": (1.0, 0.0)}, {"row_cost": (0.0, 1.0), "packing": "concat"}):
        plain = make_data(**{**options, "row_cost": None})
        dealt = make_data(**options, accumulate=3)
        assert all(map(equal_batches, islice(plain.train_dataloader(), 9), islice(dealt.train_dataloader(), 9)))
        assert dealt.imbalance == 1 and plain.imbalance is None


def test_rows_of_recall_keep_their_order():
    plain, dealt = (
        PackedDataModule(RecallCorpus(), seq_len=256, batch_size=2, accumulate=4, row_cost=cost)
        for cost in (None, (0.0, 1.0))
    )
    assert all(map(equal_batches, islice(plain.train_dataloader(), 8), islice(dealt.train_dataloader(), 8)))
    assert dealt.imbalance is None


def test_a_dealt_step_that_a_loop_leaves_continues_in_its_loader_and_begins_again_in_another(make_data):
    options = {"row_cost": (0.0, 1.0), "accumulate": 4, "batch_size": 2}
    whole = list(islice(make_data(**options).train_dataloader(), 12))
    data = make_data(**options)
    loader = data.train_dataloader()
    seen = [*islice(loader, 6)]
    assert data.consumed_rows == 8  # whole steps: 4 batches of 2
    state = data.state_dict()
    assert all(map(equal_batches, [*seen, *islice(loader, 4)], whole))
    other = make_data(**options)
    other.load_state_dict(state)
    for again in (other.train_dataloader(), make_again(make_data(**options), state)):
        assert all(map(equal_batches, islice(again, 8), whole[4:]))


def make_again(data, state):
    """A loader of a data module that has taken part of a step before it is restored."""
    list(islice(data.train_dataloader(), 3))
    data.load_state_dict(state)
    return data.train_dataloader()


@pytest.mark.parametrize("stop", [4, 5, 6, 7])
def test_a_run_that_stops_within_a_dealt_step_repeats_the_whole_step(make_data, tmp_path, stop):
    options = {"steps": 5, "accumulate_grad_batches": 4}

    def run(**more):
        return fit(make_data(row_cost=(0.0, 1.0)), tmp_path, **options, **more)

    whole, path = run(), tmp_path / "stop.ckpt"
    run(callbacks=[StopAtBatch(stop, path)])
    assert run(resume=path) == whole[4:]


def test_an_epoch_that_ends_within_a_dealt_step_is_refused(make_data):
    data = make_data(row_cost=(0.0, 1.0))
    data.trainer = FakeTrainer(0, 1)
    data.trainer.limit_train_batches, data.trainer.accumulate_grad_batches = 5, 2
    with pytest.raises(ValueError, match="limit_train_batches=5: must be a multiple of accumulate_grad_batches=2"):
        data.train_dataloader()
    data.trainer.limit_train_batches = 6
    data.train_dataloader()


class Imbalances(Recorder):
    """Also notes the imbalance after every step."""

    def __init__(self):
        super().__init__()
        self.imbalances = []

    def on_train_batch_end(self, *_):
        self.imbalances.append(self.trainer.datamodule.imbalance)


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 6}, {"overfit_batches": 4}], ids=str)
def test_a_trainer_deals_its_own_accumulation(make_data, tmp_path, options):
    """The trainer's accumulation counts, and the data module has the imbalance of each step."""
    data = make_data(row_cost=(0.0, 1.0), batch_size=3, accumulate=7, rank=1, world_size=2)
    module = Imbalances()
    seen = fit(data, tmp_path, steps=8, accumulate_grad_batches=2, module=module, **options)
    n = 2 * 2 * 3
    order = EndlessOrder(len(data._train), seed=7)
    squares = data._train.index.squared_lengths
    for step in range(8):
        first = step * n % (2 * n) if "overfit_batches" in options else step * n
        rows = order.rows(first, n)
        dealt = deal(squares[rows].astype(float), 2, 3, "micro_batch")
        expected = [[data._train[rows[i]]["tokens"].tolist() for i in batch] for batch in dealt[:, 1]]
        assert [tokens for at, tokens in seen if at == step] == expected
        assert module.imbalances[2 * step + 1] == imbalance(squares[rows].astype(float), dealt, "micro_batch")
    assert not torch.equal(torch.tensor(seen[0][1]), torch.tensor(seen[1][1]))
