"""Checks on overrides beyond Hydra's grammar: the choices of a group, sizes of values, and sweeps."""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf

from flash_train.cli.config.errors import UsageError, did_you_mean
from flash_train.cli.config.overrides import CommandLine, parse
from flash_train.cli.config.paths import conf_dir

OPTIONAL = ("experiment",)  #: groups that need no choice; Hydra has no value for "none"
GLOBAL_PACKAGE = "# @package _global_"
MOST_BITS = 1000  #: a float64 holds integers of up to 1023 bits
MOST_RUNS = 1000  #: in one sweep; more is likely a typing mistake, and composing them takes minutes


def groups() -> list[str]:
    """Names of the configuration groups."""
    return sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir())


def choices_of(group: str, config_dir: str | None = None) -> list[str]:
    """The choices of a group, including the files in the user's own folder."""
    folders = [conf_dir() / group, *([Path(config_dir) / group] if config_dir else [])]
    files = [file.relative_to(folder) for folder in folders for file in folder.rglob("*.yaml")]
    return sorted({file.with_suffix("").as_posix() for file in files})


def keys_of(group: str, choice: str, config_dir: str | None = None) -> set[str]:
    """The dotted keys that a choice's file sets, and the groups whose choice it changes.

    Empty if there is no such file.
    """
    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    file = next(filter(Path.is_file, (folder / group / f"{choice}.yaml" for folder in folders)), None)
    if file is None:
        return set()
    tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    defaults = [one for one in tree.pop("defaults", []) if isinstance(one, dict)]
    others = {key.removeprefix("override ").strip("/") for one in defaults for key in one if "@" not in key}
    prefix = "" if GLOBAL_PACKAGE in file.read_text(encoding="utf-8") else f"{group}."
    return {*dotted_names(tree, prefix), *others}


def dotted_names(tree: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    """The dotted name of every key in a tree."""
    for name, child in tree.items():
        yield f"{prefix}{name}"
        if isinstance(child, dict):
            yield from dotted_names(child, f"{prefix}{name}.")


def is_choice(text: str) -> bool:
    """Whether `model=350m` (a choice of a group) rather than `seq_len=512` (a value)."""
    return text.partition("=")[0] in groups()


def check_overrides(overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Raise for what Hydra's grammar allows but the configuration does not.

    Raises:
        UsageError: an override removes or moves a key, is too large, or is no choice of its group.
    """
    known = groups()
    for text in overrides:
        override = parse(text)
        key = override.key_or_group
        if override.is_delete():
            raise UsageError(f"~{key}: no key can be removed; allowed: {key}=VALUE")
        if override.package is not None:
            raise UsageError(f"{key}@{override.package}: cannot be moved; allowed: {key}=VALUE")
        _check_size(key, text, override.value())
        if key in known and not override.is_sweep_override():
            _check_choice(key, text, override.value(), choices_of(key, config_dir))


def jobs(command_line: CommandLine) -> Iterator[tuple[str, ...]]:
    """The overrides of each run: one run, or with `-m` one for every combination of the swept values.

    Raises:
        UsageError: a sweep without values, or with more than `MOST_RUNS` runs.
    """
    parsed = [parse(text) for text in command_line.overrides]
    if not command_line.multirun:
        yield command_line.overrides
        return
    own = [override for override in parsed if not override.is_hydra_override()]
    counts = {override.input_line: _count(override) for override in own if override.is_sweep_override()}
    if prod(counts.values()) > MOST_RUNS:
        raise UsageError(f"{', '.join(map(str, counts))}: more than {MOST_RUNS} runs; allowed: fewer values")
    (batches,) = BasicSweeper.split_arguments(own, None)
    yield from map(tuple, batches)


def _check_size(key: str, text: str, value: Any) -> None:
    """Raise for an integer too large for a floating-point number: OmegaConf cannot convert it."""
    if isinstance(value, list):
        for one in value:
            _check_size(key, text, one)
    elif isinstance(value, dict):
        _check_size(key, text, list(value.values()))
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise UsageError(f"{key}: {str(value)[:20]}… is too large; allowed: a number below 1e308")


def _check_choice(group: str, text: str, choice: Any, options: Sequence[str]) -> None:
    name = str(choice) if isinstance(choice, str | int) and not isinstance(choice, bool) else ""
    if name not in options:
        given = text.partition("=")[2]
        guess, allowed = did_you_mean(name, options), ", ".join(options)
        none = f"; for none of them leave {group}= out" if group in OPTIONAL else ""
        raise UsageError(f"{group}={given}: no such choice{guess}; allowed: {allowed}{none}")


def _count(override: Override) -> int:
    """How many values a swept key has; raises for sweeps whose values are not listed."""
    text, key, sweep = override.input_line, override.key_or_group, override.value()
    if isinstance(sweep, IntervalSweep | Glob):
        raise UsageError(f"{text}: its values are not listed; allowed: {key}=A,B or {key}=range(START,STOP,STEP)")
    if getattr(sweep, "shuffle", False):
        raise UsageError(f"{text}: runs have a fixed order; allowed: {key}=A,B in the order in which they run")
    if isinstance(sweep, RangeSweep) and not sweep.step:
        raise UsageError(f"{text}: a step of 0 never ends; allowed: {key}=range(START,STOP,STEP)")
    count = len(list(islice(override.sweep_string_iterator(), MOST_RUNS + 1)))
    if not count:
        raise UsageError(f"{text}: has no values, so nothing would run; allowed: {key}=A,B")
    return count
