"""Composes the typed configuration from overrides, and turns Hydra's errors into one line."""

import copy
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flash_train.cli.config.choices import check_overrides, dotted_names, groups, is_choice
from flash_train.cli.config.errors import UsageError, did_you_mean
from flash_train.cli.config.overrides import parse
from flash_train.cli.config.paths import conf_dir
from flash_train.cli.config.schema import DATA_SCHEMAS, register_schema

CONFIG_NAME = "train"
TYPES = {"Integer": "an integer", "Float": "a number", "bool": "true or false", "String": "text"}


def compose_config(
    overrides: Sequence[str] = (), config_dir: str | None = None, name: str = CONFIG_NAME, *, resolve: bool = True
) -> DictConfig:
    """The configuration that `flash-train *overrides` would run with.

    Args:
        config_dir: a folder of further choices.
        name: the file under `conf` to compose.
        resolve: False keeps interpolations as text, but checks them all the same.

    Raises:
        UsageError: an unknown key or choice, a wrong value, or a missing one.
    """
    register_schema()
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UsageError(f"--config-dir (-cd) {config_dir}: no such folder; allowed: one with choices, as conf/ has")
    check_overrides(overrides, config_dir)
    extra = [f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"] if config_dir else []
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            config = compose(name, overrides=[*overrides, *extra])
            missing = OmegaConf.missing_keys(config)
            OmegaConf.resolve(config if resolve else copy.deepcopy(config))
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(_explain(error, [*overrides, *extra])) from error
        except (TypeError, ValueError) as error:  # OmegaConf's, for a key below a list that is no number
            if (key := _key_below_list([*overrides, *extra])) is None:
                raise
            raise UsageError(f"{key}: no such key; allowed: {key.rpartition('.')[0]}=[…]") from error
    if missing:
        raise UsageError(f"{min(missing)}: not given, and this choice needs it; add {min(missing)}=…")
    return config


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's error as one line: the key, what was given, what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        guess, allowed = did_you_mean(choice, error.options), ", ".join(error.options)
        return f"{group}={choice}: no such choice{guess}; allowed: {allowed}"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    override = re.search(r"Could not override '([^']+)'|Error merging override (.+)", str(error), re.DOTALL)
    if override and override[1]:
        return _unknown_key(override[1], overrides)
    wanted = re.search(r"could not be converted to (\w+)|is not a valid (bool)", str(cause))
    if override and wanted:
        return f"{override[2]}: needs {TYPES[wanted[1] or wanted[2]]}"
    if override and "is not Optional" in str(cause):
        return f"{override[2]}: needs a value; for the default leave {override[2].partition('=')[0]}= out"
    key = override[2] if override else getattr(cause, "full_key", None)
    if not key:  # an interpolation of the wrong type: OmegaConf names neither key
        key = ", ".join(text.replace("\\", "") for text in overrides if "$" in text)
    return (f"{key}: " if key else "") + str(cause).splitlines()[0]


def _chosen(overrides: Sequence[str]) -> DictConfig:
    """The configuration with only those overrides that choose a file of a group, not those that set a value."""
    choices = [text for text in overrides if is_choice(text) or text.startswith("hydra.searchpath")]
    return compose(CONFIG_NAME, overrides=choices)


def _key_below_list(overrides: Sequence[str]) -> str | None:
    """The key of the first override that names a part of a list, cut after that part."""
    config = _chosen(overrides)
    for key in (parse(text).key_or_group for text in overrides):
        parts = key.split(".")
        for count in range(1, len(parts)):
            if OmegaConf.is_list(OmegaConf.select(config, ".".join(parts[:count]))):
                return ".".join(parts[: count + 1])
    return None


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    tree = OmegaConf.to_container(_chosen(overrides), resolve=False)
    assert isinstance(tree, dict)
    known = [*dotted_names(tree), *groups()]
    parent, _, name = key.rpartition(".")
    if owners := [schema.corpus for schema in DATA_SCHEMAS if parent == "data" and name in schema.__dataclass_fields__]:
        return f"{key}: belongs to another corpus; choose it with data={'|'.join(owners)}"
    siblings = [name.rpartition(".")[2] for name in known if parent and name.rpartition(".")[0] == parent]
    listed = f"; {parent} has: {', '.join(siblings)}" if siblings else "; flash-train --help lists all"
    return f"{key}: no such key{_similar_key(key, known)}{listed}"


def _similar_key(key: str, known: Sequence[str]) -> str:
    """` (did you mean …?)`: keys that end in the given name, as optimizer.lr for lr, or a key with similar spelling."""
    ends = [name for name in dict.fromkeys(known) if name.rpartition(".")[2] == key and name != key]
    if ends:
        return f" (did you mean {' or '.join(ends)}?)"
    if guess := did_you_mean(key, known):
        return guess
    by_end = {name.rpartition(".")[2]: name for name in reversed(known)}  # of several keys, the first
    close = difflib.get_close_matches(key, by_end, n=1, cutoff=0.75)
    return f" (did you mean {by_end[close[0]]}?)" if close else ""
