"""Ablations: `python scripts/ablate.py 'sweep.seq_len=[1024,4096]' 'sweep.attention=[standard,flash]'`.

Trains every combination of the axes' values, each in a process of its own, on the same data, and lays the runs side by
side: the step's time, its parts and its spread, attention's share, tokens/s, MFU, peak memory, losses. Cells of several
seeds are one in the tables: the median of their runs. A cell whose steps or runs lie far apart is marked as disturbed.

  sweep.AXIS=[a,b,…]  axes: seq_len  attention  dropout  packing  memory  precision  model  seed
                      what is swept where none is given stands in conf/ablate.yaml, but for keys that the command
                      line or its experiment gives
  sweep.jobs=N        cells that run at once; on GPUs, each has its own
  run_dir=FOLDER      where everything goes; runs/ablation_TIMESTAMP by default. Started again with the same arguments
                      and the same run_dir, finished cells are not run again; those of other arguments, versions or
                      another device are left alone, and the sweep does not begin. Its tables have the cells of the axes
                      given, no others that are there.
  KEY=VALUE           any override of flash-train, for every cell: model=125m max_steps=50 data=text data.path=… seed=1

A cell that runs out of memory, fails, or can't run here is recorded with its reason, and the sweep goes on. One that is
predicted to take over 5 % more than there is, on one GPU or on a CPU, is not run: oom, too, and its reason says so. The
exit status is 1 where no cell ended ok and some failed, 3 where none could run here, 4 where all ran out of memory.

Examples
  python scripts/ablate.py                              nano, short rows: minutes on two cores
  python scripts/ablate.py 'sweep.seq_len=[1024,2048,4096,8192,16384]' model=125m max_steps=50
  python scripts/ablate.py 'sweep.memory=[none,selective,checkpoint]' attention=flash seq_len=16384
  python scripts/ablate.py 'sweep.seed=[0,1,2]'         three runs of each cell
  python scripts/ablate.py 'sweep.seq_len=[4096,16384]' sweep.jobs=8 model=1b3 precision=bf16-true
"""

import sys
import time
from contextlib import closing
from datetime import timedelta

from flash_train.cli.config.errors import UnavailableError, one_line_errors
from flash_train.cli.config.overrides import read
from flash_train.cli.run.interrupt import going_on_later
from flash_train.cli.sweep.plan import Planned, Sweep, plan
from flash_train.cli.sweep.trial import Cell, Result, known_result, require_one, run_cells


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

        from flash_train.cli.sweep.tables import report  # and with it PyTorch, for which mistakes need not wait

        report(sweep, results)
        require_one([result.status for result in results.values()], "cell", str(sweep.run_dir / "ablation.md"))


def run(sweep: Sweep) -> dict[Cell, Result]:
    """Run every cell that has no result yet, a line for each as it ends."""
    from flash_train.cli.sweep.tables import write_tables

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
    tokens = {planned.cell: planned.tokens for planned in left}
    to_do, done = sum(tokens.values()), 0
    with closing(run_cells([planned.cell for planned in left], sweep.environs)) as running:
        for cell, result in running:
            results[cell] = result
            done += tokens[cell]
            _tell(cell, results, len(sweep.cells), (time.monotonic() - start) / done * (to_do - done))
            write_tables(sweep, results)
    return results


def known_before(planned: Planned) -> Result | None:
    """What comes of a cell that can't run here, or surely won't fit on one GPU or CPU: it takes no process to tell."""
    config = planned.config
    if planned.unavailable:
        return Result("unavailable", planned.unavailable)
    from flash_train.cli.run.memory_check import capacity, documents_decide, step_before_run  # and with it Lightning
    from flash_train.profiling.memory.prediction import predict
    from flash_train.profiling.memory.results import RELATIVE
    from flash_train.records.memory_use import bytes_in_words

    try:
        step, device = step_before_run(config)
    except UnavailableError as error:
        return Result("unavailable", str(error))
    several = config.trainer.devices * config.trainer.num_nodes > 1
    if device.type not in ("cpu", "cuda") or config.force or config.compile or several:
        return None
    if documents_decide(config, step):
        return None
    predicted, limit = predict(step).peak_bytes, capacity(device)
    if predicted <= (1 + RELATIVE) * limit:
        return None
    words = f"a step would take {bytes_in_words(predicted)} and there are {bytes_in_words(limit)}"
    return Result("oom", f"predicted, not run: {words}")


def _tell(cell: Cell, results: dict[Cell, Result], total: int, seconds_left: float | None) -> None:
    result = results[cell]
    place = f"{len(results):>{len(str(total))}}/{total}"
    measured = result.summary if result.status == "ok" else {}
    parts = [f"{place}  {cell.name}  {result.status}" + (f" ({result.reason})" if result.reason else "")]
    if (seconds := measured.get("step_seconds")) is not None:
        parts.append(f"{seconds:.3g} s/step")
    if (peak := measured.get("peak_memory_gib")) is not None:
        parts.append(f"peak {peak:.2f} GiB")
    if seconds_left:
        parts.append(f"about {timedelta(seconds=round(seconds_left))} left")
    print("  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
