"""The spread of steps and runs, and trials of several seeds combined into one."""

import math
from itertools import permutations

import pytest

from flash_train.profiling.ablation.repeats import combine_seeds, relative_spread, step_spread
from flash_train.profiling.ablation.row import DISTURBED, Row

NAN = float("nan")


def run(seed, seconds=1.0, spread=0.02, status="ok", attention="sdpa", **measured):
    measured = {"step_seconds": seconds, "step_spread": spread, **measured} if status == "ok" else {}
    reason = None if status == "ok" else "a bug"
    axes = {"seed": seed, "seq_len": 64, "memory": "none", "attention": attention}
    return Row(axes, status, reason, measured, dict.fromkeys((1, 2, 3), 3.0 + seed))


def test_spread_is_the_interquartile_range_and_ignores_one_outlier():
    assert relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert relative_spread([1.0] * 9 + [100.0]) == 0.0
    assert relative_spread([10 * x for x in (1.0, 2.0, 3.0)]) == pytest.approx(relative_spread([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0, 2.0, NAN], [0.0, 0.0, 0.0, 0.0]])
def test_no_spread_with_fewer_than_three_times(values):
    assert relative_spread(values) is None


def test_first_step_is_left_out_of_the_spread():
    assert step_spread([50.0, 1.0, 1.0, 1.0]) == 0.0
    assert step_spread([1.0, 1.0, 1.0]) is None


def test_different_work_per_step_is_not_a_disturbance():
    work = [1.0, 1.0, 2.0, 4.0, 3.0]
    assert step_spread(work) > DISTURBED
    assert step_spread(work, [flops / seconds for flops, seconds in zip(work, work, strict=True)]) == 0.0
    assert step_spread([1.0] * 5, work) == 0.0  # a backend that computes all pairs


def test_single_seed_is_unchanged():
    rows = [run(0), run(0, attention="flash")]
    assert combine_seeds(rows) == rows and combine_seeds([]) == []
    without = [Row({"seq_len": 64, "attention": "sdpa"}, "ok")]
    assert combine_seeds(without) == without


def test_trials_of_several_seeds_become_one_with_the_median():
    rows = [run(seed, x, attention=name) for seed, x in ((0, 1.0), (1, 1.04), (2, 1.01)) for name in ("sdpa", "flash")]
    found = combine_seeds(rows)
    assert [(row.axes["attention"], row.axes["seed"]) for row in found] == [("sdpa", "[0,1,2]"), ("flash", "[0,1,2]")]
    assert found[0].measured == {"step_seconds": 1.01, "step_spread": pytest.approx(0.04 / 1.01), "runs": 3}
    assert found[0].losses == rows[0].losses and not found[0].disturbed


def test_disturbed_run_is_left_out_if_others_exist():
    (found,) = combine_seeds([run(0, 9.0, spread=0.5), run(1, 1.0), run(2, 1.02)])
    assert found.measured == {"step_seconds": pytest.approx(1.01), "step_spread": 0.02, "runs": 2}
    (found,) = combine_seeds([run(0, 9.0, spread=0.5), run(1, 8.0, spread=0.4)])
    assert found.measured["runs"] == 2 and found.disturbed


def test_memory_and_losses_of_a_disturbed_run_count():
    losses = {"train_loss": (3.0, 4.0, 5.0), "val_loss": (3.1, 4.1, 5.1), "peak_memory_gib": (7.0, 7.5, 8.0)}
    spreads = (0.5, 0.02, 0.02)
    found = combine_seeds(
        [run(i, spread=spread, **{name: x[i] for name, x in losses.items()}) for i, spread in enumerate(spreads)]
    )
    assert [found[0].measured[name] for name in losses] == [4.0, 4.1, 7.5] and found[0].measured["runs"] == 2


def test_runs_that_differ_more_than_their_steps_are_disturbed():
    (found,) = combine_seeds([run(0, 1.0), run(1, 1.5)])
    assert found.measured["step_spread"] == pytest.approx(0.4) and found.disturbed


def test_failed_run_does_not_fail_its_trial():
    (found,) = combine_seeds([run(0, status="failed"), run(1, 2.0, val_loss=3.0)])
    assert (found.status, found.reason, found.measured["runs"], found.measured["val_loss"]) == ("ok", None, 1, 3.0)
    (found,) = combine_seeds([run(0, status="oom"), run(1, status="oom")])
    assert (found.status, found.reason, dict(found.measured)) == ("oom", "a bug", {})


def test_metric_of_some_runs_is_the_median_of_those_runs():
    (found,) = combine_seeds([run(0, mfu=None), run(1, mfu=0.4), run(2)])
    assert found.measured["mfu"] == 0.4 and math.isfinite(found.measured["step_seconds"])


@pytest.mark.parametrize("losses", permutations([2.0, math.nan, 3.0]))
def test_a_loss_that_is_no_number_is_the_median_in_any_order(losses):
    (found,) = combine_seeds([run(seed, train_loss=loss) for seed, loss in enumerate(losses)])
    assert math.isnan(found.measured["train_loss"])
