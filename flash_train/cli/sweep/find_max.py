"""`flash-train-memory find_max=true`: finds the longest row that trains here, by attention backend and memory mode."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from flash_train.cli.components.loggers import log_table
from flash_train.cli.components.model_config import device_of
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UnavailableError
from flash_train.cli.config.overrides import CommandLine
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.launch.outcome import require_success
from flash_train.cli.memory.check import AUTO, BY_DOCUMENT, host_memory_of_rank, step_before_run, total_memory_of_rank
from flash_train.cli.memory.choice import most_on_host
from flash_train.cli.memory.parallel_choice import of_plan, possible_plans
from flash_train.cli.sweep.find_max_options import Search
from flash_train.cli.sweep.trial import Result, Trial, known_result, run_trial
from flash_train.files import write_json, write_text
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.longest import UNIT, Longest, Row, markdown, plot_longest, search, to_record
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records import device_name, versions

MAX_TRIALS, TOLERANCE = 4, 0.02
TRIAL_STEPS = "2"  # the first step creates the optimizer's state, the second has it
TRIAL_OVERRIDES = (
    *(
        f"max_steps={TRIAL_STEPS}",
        "force=true",
        "logger=none",
        "trainer.checkpoints=false",
        "trainer.progress_bar=false",
        "trainer.cuda_graph=false",  # the memory of a step is measured
        "callbacks.sample.tokens=0",
    ),
    "data.val_batches=1",  # every run validates; that takes less memory than a step
)
NOTHING = Longest(0, None, ())
FILES = ("find_max.json", "find_max.md", "find_max.png")
SHORT = 512  # tokens in a row when only the model and the device are needed


class TrialFailed(Exception):
    """A trial ended with another status than "ok" or "oom"."""

    def __init__(self, result: Result, text: str) -> None:
        super().__init__(text)
        self.result = result


def find_max(line: CommandLine, request: Search, run_dir: Path) -> None:
    """Search for every backend and mode, each trial in its own process; write `find_max.json`, `.md` and `.png`.

    A second start with the same arguments and run_dir repeats only trials that failed or were interrupted.

    Raises:
        UsageError: no row was found for any backend and mode. The files are written before.
    """
    config = compose_config((*line.overrides, f"seq_len={SHORT}"), line.config_dir)
    device = device_of(config.trainer.accelerator)
    devices = device_name(device)
    if config.trainer.devices > 1:
        devices = f"{config.trainer.devices} {'×' if device.type == 'cuda' else 'processes on'} {devices}"
    limit, attentions = request.on(device.type == "cuda")
    rows: list[Row] = []
    for attention, memory in ((a, m) for a in attentions for m in request.memory):
        rows.append(_search(line, limit, run_dir, attention, memory))
        print(f"attention={attention} memory={memory}: {describe_row(rows[-1])}", flush=True)
        _write(rows, run_dir, devices)
    print(f"{run_dir}: {', '.join(FILES)}, trials/")
    if config.logger.name == "wandb":
        records = [to_record(row, TOLERANCE) for row in rows]
        columns = [name for name in records[0] if name != "trials"]
        table = [[record[name] for name in columns] for record in records]
        log_table(config.logger, run_dir, "find_max", columns, table, [run_dir / name for name in FILES])
    require_success([row.status for row in rows], "search", str(run_dir / "find_max.md"))


def _search(line: CommandLine, limit: int, run_dir: Path, attention: str, memory: str) -> Row:
    overrides = (*line.overrides, f"attention={attention}", f"memory={memory}", *TRIAL_OVERRIDES)
    if attention in BY_DOCUMENT and line.given("data.packing") is None:
        overrides += ("data.packing=concat",)
    config = compose_config((*overrides, f"seq_len={SHORT}"), line.config_dir)
    # Fix what a run would otherwise choose by the available memory: this setting, and the moments' format below.
    if config.optimizer.in_backward is None:
        overrides += ("optimizer.in_backward=false",)
        config.optimizer.in_backward = False
    if PRECISIONS[config.precision].has_bf16_weights and config.optimizer.moments is None:
        overrides += ("optimizer.moments=bf16",)
        config.optimizer.moments = "bf16"
    empty = Row(
        attention, memory, NOTHING, None, None, False, limit, model=config.model.name, optimizer=describe(config)
    )
    try:
        guess = predicted_length(config, limit)
    except UnavailableError as error:
        return replace(empty, status="unavailable", reason=str(error))
    empty = replace(empty, predicted=guess)
    results: dict[int, Result] = {}

    def fits(length: int) -> bool:
        trial = Trial(run_dir / "trials" / f"{attention}-{memory}-{length}", (*overrides, f"seq_len={length}"))
        if (result := known_result(trial)) is None:
            print(f"  {trial.name}: trying", flush=True)
            result = run_trial(trial)
        results[length] = result
        answer = {"ok": "fits", "oom": "does not fit"}.get(result.status)
        print(f"  {trial.name}: {answer or f'{result.status}, {result.reason}'}, {result.seconds:.0f} s", flush=True)
        if answer is None:
            raise TrialFailed(result, f"the trial at {length:,} tokens: {result.reason}")
        return result.status == "ok"

    # The predicted longest row is likely too long, because some of the device's memory is taken: it is tried second.
    first = guess if guess >= limit else int(guess / (1 + TOLERANCE))
    try:
        found = search(fits, first, limit, MAX_TRIALS, TOLERANCE)
    except TrialFailed as error:
        return replace(empty, status=error.result.status, reason=str(error))
    if not found.seq_len:
        return replace(empty, found=found, status="oom", reason=results[min(results)].reason)
    summary = results[found.seq_len].summary
    peak, seconds = summary.get("peak_memory_gib"), summary.get("step_seconds")
    exact = found.seq_len < limit and found.within(TOLERANCE, limit)
    return replace(empty, found=found, peak_gib=peak, exact=exact, step_seconds=seconds)


def describe(config: DictConfig) -> str:
    """How the optimizer stores weights and moments, in a few words."""
    if not PRECISIONS[config.precision].has_bf16_weights:
        return "fp32 weights"
    master = {"none": "no", None: "exact"}.get(config.optimizer.master, config.optimizer.master)
    where = ", in the host's memory" if config.optimizer.offload else ""
    when = ", updated within the backward" if config.optimizer.in_backward else ""
    return f"{master} master, {config.optimizer.moments} moments{where}{when}"


def predicted_length(config: DictConfig, limit: int) -> int:
    """The longest row that is predicted to fit; of several devices, with the plan that fits the longest row.

    Raises:
        UnavailableError: the attention does not run here.
    """
    step, device = step_before_run(config)
    plan = parallel_plan(config)
    plans = possible_plans(config, step) if plan.is_open else [plan]
    most = total_memory_of_rank(device, plan.dims.ranks, config.trainer.devices)
    share = host_memory_of_rank(config.trainer.devices) if config.memory.offload == AUTO else None
    return max(predicted_longest(of_plan(step, plan), most, limit, share) for plan in plans)


def predicted_longest(step: Step, limit_bytes: int, limit: int, host_bytes: int | None = None) -> int:
    """The longest row, at most `limit` tokens, whose predicted peak is at most `limit_bytes`; a multiple of UNIT.

    With `host_bytes`, as many inputs of blocks as these hold are in the host's memory.
    """
    low, high = 1, max(1, limit // UNIT)
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(step, seq_len=middle * UNIT)
        if host_bytes is not None:
            tried = replace(tried, offload=most_on_host(tried, host_bytes) / step.model.n_layers)
        within = predict(tried).peak_bytes <= limit_bytes
        low, high = (middle, high) if within else (low, middle - 1)
    return low * UNIT


def describe_row(row: Row) -> str:
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
