"""The spread of repeated measurements: the steps of a run, and runs that differ only in their seed."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from flash_train.profiling.ablation.row import Row

SEED = "seed"
UNTIMED = ("peak_memory_gib", "train_loss", "val_loss", "val_tokens")  #: do not depend on what else runs on the machine


def relative_spread(values: Sequence[float]) -> float | None:
    """Return the interquartile range over the median; None for fewer than three finite values above 0."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    if len(known) < 3:
        return None
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive")
    return (high - low) / middle


def step_spread(seconds: Sequence[float], utilisation: Sequence[float] = ()) -> float | None:
    """Return `relative_spread` of a run's steps without the first, which includes compilation and warm-up.

    Steps of packed documents differ in the FLOPs of attention. If the model-FLOP utilisation is known and spreads less
    than the seconds, its spread is returned: utilisation does not depend on the FLOPs of a step.
    """
    found = (relative_spread(values[1:]) for values in (seconds, utilisation))
    return min((spread for spread in found if spread is not None), default=None)


def combine_seeds(rows: Sequence[Row]) -> list[Row]:
    """Merge trials that differ only in their seed: the median of each measurement, and the number of runs.

    Times of runs whose steps were disturbed are left out if there are others; `runs` says how many are not. Memory and
    losses (`UNTIMED`) are of all runs, so that trials are compared over the same seeds. `step_spread` becomes the range
    of the runs' step times over their median, if this is more than the median spread of their steps. Trials of a single
    seed, or without that axis, are returned as they are.
    """
    if len({row.axes.get(SEED) for row in rows}) < 2:
        return list(rows)
    seeds = f"[{','.join(map(str, dict.fromkeys(row.axes[SEED] for row in rows)))}]"
    places = list(dict.fromkeys(row.without(SEED) for row in rows))
    in_order = sorted(rows, key=lambda row: places.index(row.without(SEED)))
    return [_combined(list(runs), seeds) for _, runs in groupby(in_order, key=lambda row: row.without(SEED))]


def _combined(runs: Sequence[Row], seeds: str) -> Row:
    ran = [row for row in runs if row.status == "ok"]
    if not ran:
        return replace(runs[0], axes={**runs[0].axes, SEED: seeds})
    used = [row for row in ran if not row.disturbed] or ran
    names = dict.fromkeys(name for row in ran for name in row.measured)
    measured = {name: _median(row.measured.get(name) for row in (ran if name in UNTIMED else used)) for name in names}
    times = [seconds for row in used if (seconds := row.measured.get("step_seconds")) is not None]
    between = (max(times) - min(times)) / statistics.median(times) if len(times) > 1 else None
    spreads = [spread for spread in (measured.get("step_spread"), between) if spread is not None]
    measured |= {"step_spread": max(spreads, default=None), "runs": len(used)}
    return replace(ran[0], axes={**ran[0].axes, SEED: seeds}, measured=measured)


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; NaN if one is, for `statistics.median` then depends on their order."""
    known = [value for value in values if value is not None]
    if any(map(math.isnan, known)):
        return math.nan
    return statistics.median(known) if known else None
