"""Ablations: `python scripts/ablate.py 'sweep.seq_len=[1024,4096]' 'sweep.attention=[standard,flash]'`.

Trains every combination of the axes' values. Each one is a trial: a run in its own process, on the same data. The
tables compare step time, its parts and its spread, attention's share, tokens/s, MFU, peak memory and losses. Trials
that differ in their seed alone share a row, with the median of their runs. A trial is marked as disturbed if its step
times, or its runs, are far apart.

  sweep.AXIS=[a,b,…]  axes: seq_len  attention  dropout  packing  parallel  memory  precision  model  seed
                      The default axes are in conf/ablate.yaml; the command line or its experiment can replace each
                      of them by a fixed value.
  sweep.jobs=N        run N trials at the same time; each has GPUs of its own
  run_dir=FOLDER      where all files go; runs/ablation_TIMESTAMP by default. A second start with the same arguments
                      and run_dir repeats no finished trial. If other arguments, versions or another device made a
                      trial of the same name there, it is kept, and the sweep does not begin. The tables contain
                      the given axes only.
  KEY=VALUE           any override of flash-train, for every trial: model=125m max_steps=50 data=text data.path=… seed=1

If a trial runs out of memory, fails, or can't run here, its reason is recorded and the sweep continues. A trial is not
run if it is predicted to take over 5 % more memory than there is: it counts as oom. The exit status is 1 if no trial
ended ok and some failed, 3 if none could run here, 4 if all ran out of memory.

Examples
  python scripts/ablate.py                              nano, short rows: minutes on two cores
  python scripts/ablate.py 'sweep.seq_len=[1024,2048,4096,8192,16384]' model=125m max_steps=50
  python scripts/ablate.py 'sweep.memory=[none,selective,checkpoint]' attention=flash seq_len=16384
  python scripts/ablate.py 'sweep.parallel=[ddp,fsdp,context]' trainer.devices=2 global_batch=2 model=1b3
  python scripts/ablate.py 'sweep.seed=[0,1,2]'         three trials for each combination
  python scripts/ablate.py 'sweep.seq_len=[4096,16384]' sweep.jobs=8 model=1b3 precision=bf16-true

Documentation: docs/ablation.md
"""

import sys
import time
from contextlib import closing
from datetime import timedelta

from flash_train.cli.config.errors import UnavailableError, one_line_errors
from flash_train.cli.config.overrides import read
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.launch.interrupt import resumable
from flash_train.cli.launch.outcome import require_success
from flash_train.cli.sweep.plan import PlannedTrial, Sweep, plan
from flash_train.cli.sweep.trial import Result, Trial, known_result, run_trials


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return
    with one_line_errors():
        sweep = plan(read(arguments))
        with resumable(sweep.run_dir):
            results = run(sweep)

        from flash_train.cli.sweep.tables import report  # imports PyTorch, which takes seconds

        report(sweep, results)
        require_success([result.status for result in results.values()], "trial", str(sweep.run_dir / "ablation.md"))


def run(sweep: Sweep) -> dict[Trial, Result]:
    """Run every trial that has no result yet, and print a line as each one ends."""
    from flash_train.cli.sweep.tables import write_tables

    known = {planned.trial: result for planned in sweep.trials if (result := known_result(planned.trial))}
    if known:
        print(f"{len(known)} of {len(sweep.trials)} trials are finished already", flush=True)
    results = dict(known)
    left = [planned for planned in sweep.trials if planned.trial not in known]
    for planned in list(left):
        if (result := predicted_result(planned)) is not None:
            left.remove(planned)
            results[planned.trial] = result
            _print_result(planned.trial, results, len(sweep.trials), None)
    start = time.monotonic()
    tokens = {planned.trial: planned.tokens for planned in left}
    to_do, done = sum(tokens.values()), 0
    with closing(run_trials([planned.trial for planned in left], sweep.environs)) as running:
        for trial, result in running:
            results[trial] = result
            done += tokens[trial]
            _print_result(trial, results, len(sweep.trials), (time.monotonic() - start) / done * (to_do - done))
            write_tables(sweep, results)
    return results


def predicted_result(planned: PlannedTrial) -> Result | None:
    """The result of a trial that can't run here, or cannot fit; None if it must run."""
    config = planned.config
    if planned.unavailable:
        return Result("unavailable", planned.unavailable)
    from flash_train.cli.memory.check import (  # imports Lightning
        documents_decide,
        step_before_run,
        total_memory_of_rank,
    )
    from flash_train.profiling.memory.prediction import predict
    from flash_train.profiling.memory.results import RELATIVE
    from flash_train.records.memory_use import bytes_in_words

    try:
        step, device = step_before_run(config)
    except UnavailableError as error:
        return Result("unavailable", str(error))
    given = parallel_plan(config)
    if device.type not in ("cpu", "cuda") or config.force or config.compile or given.is_open:
        return None
    if documents_decide(config, step):
        return None
    limit = total_memory_of_rank(device, given.dims.ranks, config.trainer.devices)
    predicted = predict(step).peak_bytes
    if predicted <= (1 + RELATIVE) * limit:
        return None
    reason = f"a step would take {bytes_in_words(predicted)} and there are {bytes_in_words(limit)}"
    return Result("oom", f"predicted, not run: {reason}")


def _print_result(trial: Trial, results: dict[Trial, Result], total: int, seconds_left: float | None) -> None:
    result = results[trial]
    place = f"{len(results):>{len(str(total))}}/{total}"
    measured = result.summary if result.status == "ok" else {}
    parts = [f"{place}  {trial.name}  {result.status}" + (f" ({result.reason})" if result.reason else "")]
    if (seconds := measured.get("step_seconds")) is not None:
        parts.append(f"{seconds:.3g} s/step")
    if (peak := measured.get("peak_memory_gib")) is not None:
        parts.append(f"peak {peak:.2f} GiB")
    if seconds_left:
        parts.append(f"about {timedelta(seconds=round(seconds_left))} left")
    print("  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
