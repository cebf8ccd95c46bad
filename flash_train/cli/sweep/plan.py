"""The trials of an ablation, from its axes. Every trial is composed and checked before the first one runs."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flash_train.cli.config import hardware
from flash_train.cli.config.choices import keys_of
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UnavailableError, UsageError, did_you_mean
from flash_train.cli.config.overrides import CommandLine, parse, quote
from flash_train.cli.config.paths import require_no_run, require_usable
from flash_train.cli.config.validate import FOLDER, require_files, validate
from flash_train.cli.run.prepare import with_pretrained_shape
from flash_train.cli.sweep.trial import Trial

PREFIX = "sweep."
MOST_JOBS = 1024
TRIALS_FOLDER = "cells"  # the name that folders of version 0.1.0 have
REFUSED_KEYS = ("resume", "validate_only", "stop_after")


@dataclass(frozen=True)
class Axis:
    """An axis of the sweep.

    Args:
        key: the override of the training command.
        place: the key of the value in the composed configuration.
        kind: the type of its values.
        words: names the values in messages.
    """

    name: str
    key: str
    place: str
    kind: type
    words: str


AXES = {
    axis.name: axis
    for axis in (
        Axis(
            "seed", "seed", "seed", int, "integers"
        ),  # first, so that runs that differ in their seed alone are far apart in time
        Axis("model", "model", "model.name", str, "names of models"),
        Axis("precision", "precision", "precision", str, "precisions"),
        Axis("packing", "data.packing", "data.packing", str, "packings"),
        Axis("dropout", "attention.dropout", "attention.dropout", float, "numbers"),
        Axis("seq_len", "seq_len", "seq_len", int, "integers"),
        Axis("parallel", "parallel", "parallel.mode", str, "plans"),
        Axis("memory", "memory", "memory.mode", str, "memory modes"),
        Axis("attention", "attention", "attention.backend", str, "attention backends"),
    )
}


@dataclass(frozen=True)
class PlannedTrial:
    """A trial of the sweep, its value on every axis, and the reason if it is known that it can't run here."""

    trial: Trial
    axes: dict[str, Any]
    config: DictConfig
    unavailable: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch: a rough measure of the time that the trial takes."""
        return self.config.seq_len * self.config.batch_size


@dataclass(frozen=True)
class Sweep:
    """All trials of an ablation. `environs` has one entry for each trial that may run at the same time."""

    run_dir: Path
    trials: tuple[PlannedTrial, ...]
    environs: tuple[Mapping[str, str], ...]


def plan(line: CommandLine) -> Sweep:
    """The sweep that a command line describes.

    Raises:
        UsageError: the configuration of a trial is wrong.
    """
    if line.multirun or line.shows or not line.composes or (line.flags and line.config_dir is None):
        raise UsageError(f"{line.flags[0]}: an ablation takes no such flag; allowed: --help, --config-dir")
    sweep_overrides, own = _split(line)
    config = compose_config(sweep_overrides, line.config_dir, "ablate")
    if not FOLDER.contains(config.run_dir):
        raise UsageError(f"run_dir={config.run_dir}: must be {FOLDER.words}")
    run_dir = Path(config.run_dir)
    require_usable("run_dir", run_dir)
    require_no_run(run_dir)
    axes = _chosen_axes(config.sweep, line)
    common = replace(line, overrides=(*config.train, *own))
    common = with_pretrained_shape(common)
    if line.given("hardware") in (None, "auto"):
        _check_values(common, axes)  # first, because detecting the hardware imports PyTorch, which takes seconds
        choice, why = hardware.choose(hardware.detect())
        common = common.with_override("hardware", choice)
        print(f"hardware: {choice} ({why})", flush=True)
    trials = tuple(_trials(common, axes, run_dir))
    return Sweep(run_dir, trials, _environs(config.sweep.jobs, trials[0].config))


def _split(line: CommandLine) -> tuple[list[str], list[str]]:
    """The checked overrides of the sweep, and the overrides of its training runs."""
    sweep: list[str] = []
    own: list[str] = []
    for text in line.overrides:
        override = parse(text)
        key = override.key_or_group
        if key in REFUSED_KEYS:
            raise UsageError(f"{key}: every trial of a sweep is a new run; to continue a sweep, give its run_dir again")
        if key == PREFIX.rstrip("."):
            raise UsageError(f"{text}: give each axis by itself; allowed: {_list_axes(AXES)}, {PREFIX}jobs=N")
        if key.startswith(PREFIX):
            _check_axis(text, key.removeprefix(PREFIX), override.is_sweep_override(), override.value())
        elif override.is_sweep_override():
            raise UsageError(f"{text}: several values; allowed: {_sweep_syntax(key, text)}")
        (sweep if key.startswith(PREFIX) or key == "run_dir" else own).append(text)
    return sweep, own


def _sweep_syntax(key: str, text: str) -> str:
    """What to write instead of `key=a,b`."""
    axis = next((axis.name for axis in AXES.values() if key in (axis.key, axis.place)), None)
    if axis:
        return f"'{PREFIX}{axis}=[{text.partition('=')[2]}]'"
    return f"one value, as {key} is no axis; the axes are {', '.join(AXES)}"


def _list_axes(names: Iterable[str]) -> str:
    return ", ".join(f"{PREFIX}{name}=[…]" for name in names)


def _check_axis(text: str, name: str, is_hydra_sweep: bool, values: Any) -> None:
    if name == "jobs":
        if not isinstance(values, int) or isinstance(values, bool) or not 1 <= values <= MOST_JOBS:
            raise UsageError(f"{text}: must be an integer from 1 to {MOST_JOBS}")
        return
    if name not in AXES:
        known = [*AXES, "jobs"]
        raise UsageError(f"{text}: no such axis{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    axis = AXES[name]
    if is_hydra_sweep:
        raise UsageError(f"{text}: must be a list in brackets, {PREFIX}{name}=[{text.partition('=')[2]}]")
    if values is None:
        return
    kinds = (int, float) if axis.kind is float else (str, int) if axis.kind is str else axis.kind
    of_kind = isinstance(values, list) and all(isinstance(x, kinds) and not isinstance(x, bool) for x in values)
    if not of_kind:
        alone = isinstance(values, kinds) and not isinstance(values, bool)
        example = text.partition("=")[2] if alone else "…,…"
        raise UsageError(f"{text}: must be a list of {axis.words}, as in {PREFIX}{name}=[{example}]")
    if not values:
        raise UsageError(f"{text}: must be one value or more")
    if len(set(values)) < len(values):
        raise UsageError(f"{text}: must be different values")


def _chosen_axes(sweep: DictConfig, line: CommandLine) -> dict[Axis, list[Any]]:
    """The axes with their values. An axis has no default values if the command line or experiment sets its key."""
    chosen: dict[Axis, list[Any]] = {}
    by_experiment = keys_of("experiment", line.given("experiment") or "", line.config_dir)
    for name, axis in AXES.items():
        asked, fixed = line.given(PREFIX + name), line.given(axis.key) or line.given(axis.place)
        if asked and fixed:
            raise UsageError(f"{axis.key}={fixed}: {PREFIX}{name}={asked} gives it too; allowed: one of them")
        if sweep[name] is not None and not fixed and (asked or not {axis.key, axis.place} & by_experiment):
            chosen[axis] = list(sweep[name])
    return chosen


def _check_values(line: CommandLine, axes: Mapping[Axis, Sequence[Any]]) -> None:
    """Compose and check each value of each axis, together with the first value of the other axes."""
    first = {axis: values[0] for axis, values in axes.items()}
    for combination in dict.fromkeys(tuple((first | {a: x}).items()) for a, values in axes.items() for x in values):
        config = compose_config((*line.overrides, *(f"{axis.key}={x}" for axis, x in combination)), line.config_dir)
        with suppress(UnavailableError):
            validate(config)
        require_files(config)


def _trials(line: CommandLine, axes: Mapping[Axis, Sequence[Any]], run_dir: Path) -> Iterator[PlannedTrial]:
    names = [axis.name for axis in axes]
    for values in product(*axes.values()):
        overrides = (*line.overrides, *(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)))
        config = compose_config(overrides, line.config_dir)
        unavailable = None
        try:
            validate(config)
        except UnavailableError as error:
            unavailable = str(error)
        name = ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True)) or "trial"
        if config.logger.name == "wandb":
            group = config.logger.group or os.environ.get("WANDB_RUN_GROUP") or run_dir.name
            config.logger.group = group  # the W&B run of the table has the same group
            overrides += (quote("logger.group", config.logger.group), quote("logger.run_name", name))
        overrides += ("force=true",)  # `ablate.predicted_result` leaves out what cannot fit, before any trial runs
        if line.config_dir:
            overrides = ("--config-dir", line.config_dir, *overrides)
        places = {axis.name: OmegaConf.select(config, axis.place) for axis in AXES.values()}
        yield PlannedTrial(Trial(run_dir / TRIALS_FOLDER / name, overrides), places, config, unavailable)


def _environs(jobs: int, config: DictConfig) -> tuple[Mapping[str, str], ...]:
    """The GPUs or threads of each trial that runs at the same time. A single one may use the whole machine."""
    if jobs == 1:
        return ({},)
    if config.trainer.accelerator != "cuda":
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        return ({"OMP_NUM_THREADS": threads},) * jobs
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    per_trial = config.trainer.devices
    if jobs * per_trial > len(gpus):
        most = len(gpus) // per_trial
        raise UsageError(
            f"sweep.jobs={jobs}: needs {jobs * per_trial} GPUs, and there are {len(gpus)}; allowed: {most}"
        )
    return tuple({"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * per_trial : (i + 1) * per_trial])} for i in range(jobs))
