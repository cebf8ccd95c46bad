"""`resume` takes its options from the config.yaml of the run that it continues; the command line wins over them."""

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
from flash_train.cli.config.paths import run_dir_of
from flash_train.cli.config.schema import DATA_SCHEMAS, LoggerSchema, TrainSchema, WandbSchema

CONFIG = "config.yaml"
OF_ONE_START = ("run_dir", "resume", "stop_after", "validate_only", "force")  # not of the run as a whole
#: where the configuration has the name of a group's choice
NAMES = {
    "model": "model.name",
    "data": "data.corpus",
    "logger": "logger.name",
    "attention": "attention.backend",
    "memory": "memory.mode",
}
#: what a choice of these groups replaces, whatever else its file says: the run's dropout stays with another attention
CHOICE_ALONE = {
    "hardware": "trainer.accelerator",
    "attention": "attention.backend",
    "memory": "memory.mode",
}
SCHEMAS: dict[str, dict[str, type]] = {
    "data": {schema.corpus: schema for schema in DATA_SCHEMAS},
    "logger": {"none": LoggerSchema, "wandb": WandbSchema},
}


def with_saved_options(line: CommandLine) -> tuple[CommandLine, Path | None]:
    """The command line with the options of the run that it resumes, and the file that they come from.

    A value on the command line wins, and so do the values of a group's file that is chosen there, unless the run has
    the same choice; of an attention, a memory mode or a hardware only the choice itself. The file is None where nothing
    is taken from one: nothing is resumed, there is no such file, or the command line gives all.

    Raises:
        UsageError: the file is damaged, or no configuration of a run.
    """
    file = _file_of(line)
    if file is None or not file.is_file():
        return line, None
    saved = read_config(file)
    given = {override.key_or_group for override in map(parse, line.overrides)}
    chosen = {group: choice for group in given.intersection(groups()) if (choice := line.given(group))}
    won = given - chosen.keys() | {*OF_ONE_START}
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
    texts = tuple(override_text(key, value) for key, value in taken.items())
    return replace(line, overrides=(*texts, *line.overrides)), file if texts else None


def describe_options(line: CommandLine, file: Path | None) -> str | None:
    """Where the options of a resumed run come from, in a line; `file` is what `with_saved_options` has returned.

    None where nothing is resumed, or the command line gives all.
    """
    if file is not None:
        return f"options: from {file}, where the command line gives no other"
    wanted = _file_of(line)
    if wanted is None or wanted.is_file():
        return None
    return f"options: the defaults, where the command line gives no other, as there is no {wanted}"


def read_config(file: Path) -> DictConfig:
    """The configuration that a run has written, checked against the schema.

    Raises:
        UsageError: one line that names the file, and what is wrong with it.
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
    """The config.yaml of the run whose checkpoint `resume` names; None where nothing, or more than one, is resumed."""
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


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
