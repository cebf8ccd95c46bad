"""The options of a resumed run: those in its config.yaml, unless the command line gives others."""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flash_train.cli.config.choices import choices_of, groups, keys_of
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import CommandLine, override_text, parse
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.paths import run_dir_of
from flash_train.cli.config.schema import DATA_SCHEMAS, LoggerSchema, TrainSchema, WandbSchema

CONFIG = "config.yaml"
#: they apply to one start, not to the run
NOT_SAVED = ("run_dir", "resume", "stop_after", "validate_only", "force", "parallel.check")
#: the key that names the choice of a group
NAMES = {
    "model": "model.name",
    "data": "data.corpus",
    "logger": "logger.name",
    "attention": "attention.backend",
    "memory": "memory.mode",
}
#: a new choice of these groups replaces this key alone: with another attention, the run keeps its dropout
CHOICE_ALONE = {
    "hardware": "trainer.accelerator",
    "attention": "attention.backend",
    "memory": "memory.mode",
}
DIVIDE_WORK = ("trainer.devices", "trainer.num_nodes", "trainer.strategy", "parallel")
SCHEMAS: dict[str, dict[str, type]] = {
    "data": {schema.corpus: schema for schema in DATA_SCHEMAS},
    "logger": {"none": LoggerSchema, "wandb": WandbSchema},
}


def with_saved_options(line: CommandLine) -> tuple[CommandLine, Path | None]:
    """Add the options of the run that the command line resumes; also return the file that they come from.

    A value on the command line wins. If the command line chooses a file of a group, all values of this file win, unless
    the run has the same choice. For attention, memory and hardware only the choice itself wins, not the file's other
    values. If the command line divides the work among devices in another way, an optimizer step keeps its number of
    rows. The returned file is None if no option comes from it: nothing is resumed, there is no such file, or the
    command line gives all options.

    Raises:
        UsageError: the file is damaged, or is no configuration of a run.
    """
    file = _file_of(line)
    if file is None or not os.path.isfile(file):  # Path.is_file raises if the name is too long
        return line, None
    saved = read_config(file)
    given = {override.key_or_group for override in map(parse, line.overrides)}
    chosen = {group: choice for group in given.intersection(groups()) if (choice := line.given(group))}
    won = given - chosen.keys() | {*NOT_SAVED}
    for group, choice in chosen.items():
        won |= _keys_that_win(group, choice, saved, line.config_dir)
    taken: dict[str, Any] = {}
    for group, schemas in SCHEMAS.items():
        if group not in chosen:
            taken[group] = OmegaConf.select(saved, NAMES[group])
        won.add(NAMES[group])
        own = schemas.get(chosen.get(group, taken.get(group, "")))
        known = [field.name for field in fields(own)] if own else saved[group]
        won |= {f"{group}.{name}" for name in saved[group] if name not in known}
    for key, value in _leaves(OmegaConf.to_container(saved)):
        parts = key.split(".")
        if not won.intersection(".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            taken[key] = value
    taken |= _kept_global_batch(given, saved)
    texts = tuple(override_text(key, value) for key, value in taken.items())
    return replace(line, overrides=(*texts, *line.overrides)), file if texts else None


def describe_options(line: CommandLine, file: Path | None) -> str | None:
    """One line on where the options of a resumed run come from; `file` is the result of `with_saved_options`.

    None if nothing is resumed, or the command line gives all options.
    """
    if file is not None:
        return f"options: from {file}, except those on the command line"
    wanted = _file_of(line)
    if wanted is None or wanted.is_file():
        return None
    return f"options: the defaults, except those on the command line, as there is no {wanted}"


def read_config(file: Path) -> DictConfig:
    """The configuration that a run has written, checked against the schema.

    Raises:
        UsageError: one line that names the file and its fault.
    """
    try:
        saved = OmegaConf.load(file)
        if not isinstance(saved, DictConfig) or not saved:
            raise ValueError("it has no keys")
        schema = OmegaConf.structured(TrainSchema)
        for group, schemas in SCHEMAS.items():
            schema[group] = OmegaConf.structured(schemas[OmegaConf.select(saved, NAMES[group])])
        merged = OmegaConf.merge(schema, saved)
        OmegaConf.resolve(merged)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, KeyError) as error:
        text = str(error) if isinstance(error, OSError) else " ".join(str(error).split("\n  full_key")[0].split())
        where = getattr(error, "full_key", None)
        raise UsageError(
            f"{file}: is damaged, or is no configuration of a run ({f'{where}: ' if where else ''}{text}); "
            "restore it, or move it away and give all options on the command line"
        ) from error
    assert isinstance(merged, DictConfig)
    return merged


def _file_of(line: CommandLine) -> Path | None:
    """The config.yaml of the resumed run; None if no run is resumed, or with `-m`."""
    resume, run_dir = line.given("resume"), line.given("run_dir")
    if resume is None or line.multirun:
        return None
    folder = run_dir if resume == "last" else run_dir_of(Path(resume))
    return Path(folder) / CONFIG if folder else None


def _keys_that_win(group: str, choice: str, saved: DictConfig, config_dir: str | None) -> set[str]:
    """The keys of a run's configuration that a choice on the command line replaces."""
    if group in CHOICE_ALONE:
        return {CHOICE_ALONE[group]}
    if choices_of(group) == [choice] or (group in NAMES and choice == OmegaConf.select(saved, NAMES[group])):
        return set()  # the run has the same choice
    return keys_of(group, choice, config_dir)


def _kept_global_batch(given: set[str], saved: DictConfig) -> dict[str, Any]:
    """The options that keep the rows of an optimizer step if the command line divides the devices' work differently."""
    divides = any(key in DIVIDE_WORK or key.startswith("parallel.") for key in given)
    if not divides or given & {"accumulate", "global_batch", "batch_size"} or saved.global_batch is not None:
        return {}
    return {"accumulate": None, "global_batch": parallel_plan(saved).global_batch}


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
