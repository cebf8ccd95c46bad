"""`scripts/profile_memory.py find_max=true`: the longest row that trains here, by attention backend and memory mode."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UnavailableError
from flash_train.cli.config.overrides import CommandLine
from flash_train.cli.run.loggers import log_table
from flash_train.cli.run.memory_check import BY_DOCUMENT, capacity, step_before_run
from flash_train.cli.run.resolve import device_of
from flash_train.cli.sweep.find_max_options import Search
from flash_train.cli.sweep.trial import Cell, Result, known_result, require_one, run_cell
from flash_train.files import write_json, write_text
from flash_train.profiling.memory.longest import UNIT, Longest, Row, markdown, plot_longest, search, to_record
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records import device_name, versions

TRIALS, TOLERANCE = 4, 0.02
TRIAL_STEPS = "2"  # the first makes the optimizer's state, the second has it
TRIAL = (
    *(
        f"max_steps={TRIAL_STEPS}",
        "force=true",
        "logger=none",
        "trainer.checkpoints=false",
        "trainer.progress_bar=false",
        "callbacks.sample.tokens=0",
    ),
    "data.val_batches=1",  # there is no run without a validation, which takes less memory than a step does
)
NOTHING = Longest(0, None, ())
FILES = ("find_max.json", "find_max.md", "find_max.png")
SHORT = 512  # tokens in a row while only the shape of the model is asked for


class EndedOtherwise(Exception):
    """A trial neither ran nor ran out of memory."""

    def __init__(self, result: Result, words: str) -> None:
        super().__init__(words)
        self.result = result


def find_max(line: CommandLine, asked: Search, run_dir: Path) -> None:
    """Search for every backend and mode, a trial in a process of its own, and write `find_max.json`, `.md` and `.png`.

    Started again with the same arguments and run_dir, trials that have ended are not run again.

    Raises:
        UsageError: no row was found, for any backend and mode; the files are written all the same.
    """
    config = compose_config((*line.overrides, f"seq_len={SHORT}"), line.config_dir)
    device = device_of(config.trainer.accelerator)
    limit, attentions = asked.on(device.type == "cuda")
    rows: list[Row] = []
    for attention, memory in ((a, m) for a in attentions for m in asked.memory):
        rows.append(_search(line, limit, run_dir, attention, memory))
        print(f"attention={attention} memory={memory}: {row_in_words(rows[-1])}", flush=True)
        _write(rows, run_dir, device_name(device))
    print(f"{run_dir}: {', '.join(FILES)}, trials/")
    if config.logger.name == "wandb":
        records = [to_record(row, TOLERANCE) for row in rows]
        columns = [name for name in records[0] if name != "trials"]
        table = [[record[name] for name in columns] for record in records]
        log_table(config.logger, run_dir, "find_max", columns, table, [run_dir / name for name in FILES])
    require_one([row.status for row in rows], "search", str(run_dir / "find_max.md"))


def _search(line: CommandLine, limit: int, run_dir: Path, attention: str, memory: str) -> Row:
    overrides = (*line.overrides, f"attention={attention}", f"memory={memory}", *TRIAL)
    if attention in BY_DOCUMENT and line.given("data.packing") is None:
        overrides += ("data.packing=concat",)
    try:
        step, device = step_before_run(compose_config((*overrides, f"seq_len={SHORT}"), line.config_dir))
    except UnavailableError as error:
        return Row(attention, memory, NOTHING, None, None, False, limit, "unavailable", str(error))
    guess = predicted_longest(step, capacity(device), limit)
    results: dict[int, Result] = {}

    def fits(length: int) -> bool:
        cell = Cell(run_dir / "trials" / f"{attention}-{memory}-{length}", (*overrides, f"seq_len={length}"))
        if (result := known_result(cell)) is None:
            print(f"  {cell.name}: trying", flush=True)
            result = run_cell(cell)
        results[length] = result
        told = {"ok": "fits", "oom": "does not fit"}.get(result.status)
        print(f"  {cell.name}: {told or f'{result.status}, {result.reason}'}, {result.seconds:.0f} s", flush=True)
        if told is None:
            raise EndedOtherwise(result, f"the trial at {length:,} tokens: {result.reason}")
        return result.status == "ok"

    # What is predicted to be the longest is likely too long, for not all of a device can be had: it is tried second.
    first = guess if guess >= limit else int(guess / (1 + TOLERANCE))
    try:
        found = search(fits, first, limit, TRIALS, TOLERANCE)
    except EndedOtherwise as error:
        return Row(attention, memory, NOTHING, guess, None, False, limit, error.result.status, str(error))
    if not found.seq_len:
        reason = results[min(results)].reason
        return Row(attention, memory, found, guess, None, False, limit, "oom", reason)
    peak = results[found.seq_len].summary.get("peak_memory_gib")
    exact = found.seq_len < limit and found.within(TOLERANCE, limit)
    return Row(attention, memory, found, guess, peak, exact, limit)


def predicted_longest(step: Step, limit_bytes: int, limit: int) -> int:
    """The longest row whose predicted peak is within so many bytes, in multiples of UNIT."""
    low, high = 1, max(1, limit // UNIT)
    while low < high:
        middle = (low + high + 1) // 2
        within = predict(replace(step, seq_len=middle * UNIT)).peak_bytes <= limit_bytes
        low, high = (middle, high) if within else (low, middle - 1)
    return low * UNIT


def row_in_words(row: Row) -> str:
    if row.status != "ok":
        return f"{row.answer()}: {row.reason}"
    count = len(row.found.trials)
    return f"{row.answer(' tokens')}, {count} {'trial' if count == 1 else 'trials'}"


def _write(rows: Sequence[Row], run_dir: Path, device: str) -> None:
    title = f"Longest row that trains on {device}"
    records = [to_record(row, TOLERANCE) for row in rows]
    write_json(run_dir / "find_max.json", {"device": device, "versions": versions(), "records": records})
    write_text(run_dir / "find_max.md", markdown(rows, title))
    plot_longest(rows, run_dir / "find_max.png", title)
