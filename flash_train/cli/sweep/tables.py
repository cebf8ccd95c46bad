"""The tables and plots of a sweep."""

import json
from collections.abc import Callable
from functools import partial

from omegaconf import DictConfig

from flash_train.cli.config.errors import blame
from flash_train.cli.launch.outcome import count_statuses
from flash_train.cli.sweep.plan import TRIALS_FOLDER, PlannedTrial, Sweep
from flash_train.cli.sweep.trial import RECORD, Result, Trial
from flash_train.files import write_text
from flash_train.profiling.ablation.plot import plot_ablation, plot_losses
from flash_train.profiling.ablation.repeats import step_spread
from flash_train.profiling.ablation.row import DISTURBED
from flash_train.profiling.ablation.table import (
    COLUMNS,
    Row,
    format_versions,
    header,
    loss_differences,
    losses_to_csv,
    title,
    to_csv,
    to_markdown,
    values,
)
from flash_train.records import read_column

FILES = ("ablation.csv", "ablation.md", "ablation.png", "ablation_losses.csv", "ablation_losses.png")


def measured_of(result: Result) -> dict[str, float | None]:
    """The values of the columns that the run's summary has; empty for a run that is not ok."""
    if result.status != "ok":
        return {}
    measured = {column.name: result.summary.get(column.name) for column in COLUMNS}
    attention, step = measured["attention_seconds"], measured["step_seconds"]
    measured["attention_share"] = attention / step if attention is not None and step else None
    return measured


def rows_of(sweep: Sweep, results: dict[Trial, Result]) -> list[Row]:
    """A row for each trial with a result, in the order of the sweep."""
    return [row_of(planned, results[planned.trial]) for planned in _with_result(sweep, results)]


def _with_result(sweep: Sweep, results: dict[Trial, Result]) -> list[PlannedTrial]:
    return [planned for planned in sweep.trials if planned.trial in results]


def row_of(planned: PlannedTrial, result: Result) -> Row:
    table = planned.trial.folder / "metrics.csv"
    with blame(f"run_dir={planned.trial.folder}"):
        losses = read_column(table, "train/loss") if result.status == "ok" else ([], [])
    by_step = dict(zip(*losses, strict=True))
    measured = measured_of(result)
    if result.status == "ok":
        seconds, used = (read_column(table, name)[1] for name in ("time/step_seconds", "throughput/mfu"))
        measured["step_spread"] = step_spread(seconds, used)
    ran = result.summary.get("attention") if result.status == "ok" else None
    return Row(planned.axes, result.status, result.reason, measured, by_step, ran)


def write_tables(sweep: Sweep, results: dict[Trial, Result]) -> list[Row]:
    """Write ablation.csv, ablation_losses.csv and ablation.md with the results so far."""
    rows = rows_of(sweep, results)
    write_text(sweep.run_dir / "ablation.csv", to_csv(rows))
    write_text(sweep.run_dir / "ablation_losses.csv", losses_to_csv(rows))
    write_text(sweep.run_dir / "ablation.md", to_markdown(rows, title_of(results), common_of(sweep, results)))
    return rows


def title_of(results: dict[Trial, Result]) -> str:
    """The title of the tables: device and steps of the first trial that is ok."""
    summaries = [result.summary for result in results.values() if result.status == "ok"]
    return title(summaries[0]["device"], summaries[0]["steps"]) if summaries else "Ablation"


def common_of(sweep: Sweep, results: dict[Trial, Result]) -> list[str]:
    """What all trials share besides their axes: data, seed, batch size, and the versions of the first that is ok."""
    found = [result.summary["versions"] for result in results.values() if result.status == "ok"]
    at_once = [f"jobs={len(sweep.environs)}"] if len(sweep.environs) > 1 else []  # on a CPU they slow each other down
    return shared_settings(sweep.trials[0].config) + at_once + (format_versions(found[0]) if found else [])


def shared_settings(config: DictConfig) -> list[str]:
    """The settings that all trials share, besides axes and versions, from the configuration of any one."""
    return [f"data={config.data.corpus}", f"seed={config.seed}", f"batch_size={config.batch_size}"]


def report(sweep: Sweep, results: dict[Trial, Result]) -> None:
    """Write tables and plots; print how far the losses differ, which trials are left out, and where the files are.

    Raises:
        UsageError: W&B does not accept its table. Everything else is written and printed before.
    """
    rows, heading = write_tables(sweep, results), title_of(results)
    folder = sweep.run_dir / TRIALS_FOLDER
    memory_of = next((result.summary["peak_memory_of"] for result in results.values() if result.status == "ok"), "")
    drawn: dict[str, Callable[..., bool]] = {
        "ablation.png": partial(plot_ablation, memory_of=memory_of),
        "ablation_losses.png": plot_losses,
    }
    for name, draw in drawn.items():
        if not draw(rows, sweep.run_dir / name, title=heading):
            (sweep.run_dir / name).unlink(missing_ok=True)  # an earlier sweep drew it, of other trials
    if disturbed := [each.trial for each, row in zip(_with_result(sweep, results), rows, strict=True) if row.disturbed]:
        print(
            f"disturbed: {'; '.join(trial.name for trial in disturbed)}: the step times spread over more than "
            f"{DISTURBED:.0%} of their median. To run a trial again, remove its folder in {folder}, and start the "
            "sweep again"
        )
    for difference in loss_differences(rows):
        print(f"losses{f' at {difference.settings}' if difference.settings else ''}: {difference.finding}")
    if others := finished_elsewhere(sweep):
        print(
            f"left out: {others} finished {'trial' if others == 1 else 'trials'} in {folder} that the "
            "axes given now don't include; for a table with them, give all values again"
        )
    written = [name for name in FILES if (sweep.run_dir / name).is_file()] + [f"{TRIALS_FOLDER}/"]
    settings = sweep.trials[0].config.logger
    try:
        if settings.name == "wandb":
            from flash_train.cli.components.loggers import log_table  # imports Lightning, which takes seconds

            log_table(settings, sweep.run_dir, "ablation", header(rows), [values(row) for row in rows])
            written.append("wandb/")
    finally:
        print(f"{sweep.run_dir}: {', '.join(written)}")
        print(count_statuses([result.status for result in results.values()]), flush=True)


def finished_elsewhere(sweep: Sweep) -> int:
    """How many trials in the sweep's folder are ok but do not belong to this sweep."""
    own = {planned.trial.folder.name for planned in sweep.trials}
    records = [path for path in (sweep.run_dir / TRIALS_FOLDER).glob(f"*/{RECORD}") if path.parent.name not in own]
    return sum(json.loads(path.read_text(encoding="utf-8"))["result"]["status"] == "ok" for path in records)
