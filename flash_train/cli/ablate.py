"""Ablations: `python scripts/ablate.py 'sweep.seq_len=[1024,4096]' 'sweep.attention=[standard,flash]'`.

Trains every combination of the axes' values, each in a process of its own, from one seed on the same data, and lays the
runs side by side: the step's time and its parts, attention's share, tokens/s, MFU, peak memory, losses.

  sweep.AXIS=[a,b,…]  axes: seq_len  attention  dropout  packing  memory  precision  model
                      what is swept where none is given stands in conf/ablate.yaml, but for keys that the command
                      line or its experiment gives
  sweep.jobs=N        cells that run at once; on GPUs, each has its own
  run_dir=FOLDER      where everything goes; runs/ablation_TIMESTAMP by default. Started again with the same arguments
                      and the same run_dir, finished cells are not run again; those of other arguments, versions or
                      another device are left alone, and the sweep does not begin.
  KEY=VALUE           any override of flash-train, for every cell: model=125m max_steps=50 data=text data.path=… seed=1

A cell that runs out of memory, fails, or can't run here is recorded with its reason, and the sweep goes on. One that is
predicted to take over 5 % more than the GPU has is not run: oom, too, and its reason says so.

Examples
  python scripts/ablate.py                              nano, short rows: minutes on two cores
  python scripts/ablate.py 'sweep.seq_len=[1024,2048,4096,8192,16384]' model=125m max_steps=50
  python scripts/ablate.py 'sweep.memory=[none,selective,checkpoint]' attention=flash seq_len=16384
  python scripts/ablate.py 'sweep.seq_len=[4096,16384]' sweep.jobs=8 model=1b3 precision=bf16-true
"""

import sys
import time
from collections.abc import Iterable
from contextlib import closing
from datetime import timedelta

from flash_train.cli.cells import Cell, Result, known_result, run_cells
from flash_train.cli.errors import UnavailableError, one_line_errors
from flash_train.cli.interrupt import going_on_later
from flash_train.cli.overrides import read
from flash_train.cli.sweep import Planned, Sweep, plan
from flash_train.profiling import read_column, write_text
from flash_train.profiling.ablation import (
    COLUMNS,
    Row,
    header,
    loss_differences,
    losses_to_csv,
    to_csv,
    to_markdown,
    values,
)
from flash_train.profiling.ablation_plot import plot_ablation, plot_losses
from flash_train.profiling.memory_results import RELATIVE
from flash_train.profiling.prediction import predict

FILES = ("ablation.csv", "ablation.md", "ablation.png", "ablation_losses.csv", "ablation_losses.png")


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return
    with one_line_errors():
        sweep = plan(read(arguments))
        with going_on_later(sweep.run_dir):
            results = run(sweep)
        report(sweep, results)


def run(sweep: Sweep) -> dict[Cell, Result]:
    """Run every cell that has no result yet, a line for each as it ends."""
    known = {planned.cell: result for planned in sweep.cells if (result := known_result(planned.cell))}
    if known:
        print(f"{len(known)} of {len(sweep.cells)} cells are finished already", flush=True)
    results = dict(known)
    left = [planned for planned in sweep.cells if planned.cell not in known]
    for planned in list(left):
        if (result := known_before(planned)) is not None:
            left.remove(planned)
            results[planned.cell] = result
            _tell(planned.cell, results, len(sweep.cells), None)
    start = time.monotonic()
    with closing(run_cells([planned.cell for planned in left], sweep.environs)) as running:
        for ended, (cell, result) in enumerate(running, 1):
            results[cell] = result
            each = (time.monotonic() - start) / ended
            _tell(cell, results, len(sweep.cells), each * (len(left) - ended))
            write_tables(sweep, results)
    return results


def known_before(planned: Planned) -> Result | None:
    """What comes of a cell that can't run here, or surely won't fit on the GPU: it takes no process to tell."""
    config = planned.config
    if planned.unavailable:
        return Result("unavailable", planned.unavailable)
    several = config.trainer.devices * config.trainer.num_nodes > 1
    if config.trainer.accelerator != "cuda" or config.force or config.compile or several:
        return None
    from flash_train.cli.predict import BY_DOCUMENT, capacity, in_words, step_before_run  # and with it Lightning

    try:
        step, device = step_before_run(config)
    except UnavailableError as error:
        return Result("unavailable", str(error))
    if step.attention in BY_DOCUMENT and config.data.packing != "concat":
        return None
    predicted, limit = predict(step).peak_bytes, capacity(device)
    if predicted <= (1 + RELATIVE) * limit:
        return None
    words = f"a step would take {in_words(predicted)} and the device has {in_words(limit)}"
    return Result("oom", f"predicted, not run: {words}")


def _tell(cell: Cell, results: dict[Cell, Result], total: int, seconds_left: float | None) -> None:
    result = results[cell]
    place = f"{len(results):>{len(str(total))}}/{total}"
    measured = measured_of(result)
    parts = [f"{place}  {cell.name}  {result.status}" + (f" ({result.reason})" if result.reason else "")]
    if (seconds := measured.get("step_seconds")) is not None:
        parts.append(f"{seconds:.3g} s/step")
    if result.status == "ok" and (peak := measured.get("peak_memory_gib")) is not None:
        parts.append(f"peak {peak:.2f} GiB")
    if seconds_left:
        parts.append(f"about {timedelta(seconds=round(seconds_left))} left")
    print("  ".join(parts), flush=True)


def measured_of(result: Result) -> dict[str, float | None]:
    """The columns' values, as far as the run's summary has them; nothing of a run that did not end well."""
    if result.status != "ok":
        return {}
    measured = {column.name: result.summary.get(column.name) for column in COLUMNS}
    attention, step = measured["attention_seconds"], measured["step_seconds"]
    return measured | {"attention_share": attention / step if attention is not None and step else None}


def rows_of(sweep: Sweep, results: dict[Cell, Result]) -> list[Row]:
    """A row for each cell that has a result, in the order of the sweep."""
    return [row_of(planned, results[planned.cell]) for planned in sweep.cells if planned.cell in results]


def row_of(planned: Planned, result: Result) -> Row:
    table = planned.cell.folder / "metrics.csv"
    losses = read_column(table, "train/loss") if result.status == "ok" else ([], [])
    by_step = dict(zip(*losses, strict=True))
    return Row(planned.axes, result.status, result.reason, measured_of(result), by_step)


def write_tables(sweep: Sweep, results: dict[Cell, Result]) -> list[Row]:
    """Write ablation.csv, ablation_losses.csv and ablation.md of the results so far."""
    rows = rows_of(sweep, results)
    write_text(sweep.run_dir / "ablation.csv", to_csv(rows))
    write_text(sweep.run_dir / "ablation_losses.csv", losses_to_csv(rows))
    write_text(sweep.run_dir / "ablation.md", to_markdown(rows, title_of(results)))
    return rows


def title_of(results: dict[Cell, Result]) -> str:
    """What ran on what, by the first cell that did."""
    summaries = [result.summary for result in results.values() if result.status == "ok"]
    return f"Ablation on {summaries[0]['device']}, {summaries[0]['steps']} steps" if summaries else "Ablation"


def report(sweep: Sweep, results: dict[Cell, Result]) -> None:
    """Tables and pictures; in words, how far losses differ and where everything is; last, what may fail: W&B."""
    rows, title = write_tables(sweep, results), title_of(results)
    memory_of = next((result.summary["peak_memory_of"] for result in results.values() if result.status == "ok"), "")
    plot_ablation(rows, sweep.run_dir / "ablation.png", title=title, memory_of=memory_of)
    plot_losses(rows, sweep.run_dir / "ablation_losses.png", title=title)
    for words, spread in loss_differences(rows):
        print(f"losses{' at ' + words if words else ''}: largest relative difference {spread:.1e}")
    print(f"{sweep.run_dir}: {', '.join(name for name in FILES if (sweep.run_dir / name).is_file())}, cells/")
    print(_count(results.values()))
    settings = sweep.cells[0].config.logger
    if settings.name == "wandb":
        from flash_train.cli.loggers import log_table  # and with it Lightning, for which mistakes need not wait

        log_table(settings, sweep.run_dir, "ablation", header(rows), [values(row) for row in rows])


def _count(results: Iterable[Result]) -> str:
    statuses = [result.status for result in results]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
