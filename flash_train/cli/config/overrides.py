"""The arguments in Hydra's grammar: paths are quoted, and a mistake in the grammar is reported in one line."""

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.flags import check_flags, check_hydra_key, flag_parser

PATH_KEYS = ("resume", "init_from", "run_dir", "data.path", "data.name", "data.tokenizer", "data.cache_dir")

TOKEN_KEYS = ("data.bos", "data.eos")  # their values are plain text: [SEP] is a token, not a list

LIST_KEY = "data.path"  # may also be a list of paths, [a,b]

BETAS_KEY = "optimizer.betas"  # must be a list of numbers


@dataclass(frozen=True)
class CommandLine:
    """`flags` are Hydra's own (`--cfg job`, `-m`); `overrides` are `key=value` in Hydra's grammar."""

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    config_dir: str | None = None  # --config-dir: a folder of further choices
    multirun: bool = False
    shows: bool = False  # --cfg or --info: the configuration is composed and shown, nothing runs
    package: str | None = None  # --package: the part of the configuration that --cfg shows
    helps: bool = False  # --help, which shows the configuration too
    resolves: bool = False  # --resolve: interpolations are replaced by their values
    composes: bool = True  # False for --help, --hydra-help and --shell-completion

    def given(self, key: str) -> str | None:
        """The last value given for a key, as text without quotes; None if it isn't given."""
        values = [override.value() for override in map(parse, self.overrides) if override.key_or_group == key]
        return str(values[-1]) if values and values[-1] is not None else None

    def several(self) -> str | None:
        """The first override with several values, such as seed=0,1; None if each has one."""
        return next((text for text in self.overrides if parse(text).is_sweep_override()), None)

    def with_override(self, key: str, value: Any) -> "CommandLine":
        """The same with one more `key=value`, quoted if needed; it wins over an earlier one."""
        return replace(self, overrides=(*self.overrides, override_text(key, value)))

    def arguments(self) -> list[str]:
        return [*self.flags, *self.overrides]


def read(arguments: list[str]) -> CommandLine:
    """Split the arguments into Hydra's flags and overrides; quote paths and tokens among the overrides."""
    args, unknown = flag_parser().parse_known_intermixed_args(arguments)  # flags may come anywhere
    if unknown:
        raise UsageError(
            f"{unknown[0]}: no such flag; arguments are written key=value, for example seq_len=16384; "
            "--hydra-help lists the flags"
        )
    check_flags(args)
    for text in args.overrides:
        check_hydra_key(text.partition("=")[0])
        _check_list(text)
    given = [] if args.hydra_help else args.overrides  # no override changes Hydra's own help
    waiting = list(args.overrides)
    flags = []
    for argument in arguments:  # the overrides keep their order between the flags
        if waiting and argument == waiting[0]:
            waiting.pop(0)
        else:
            flags.append(argument)
    return CommandLine(
        flags=tuple(flags),
        overrides=tuple(_with_quoted_path(text, sweeps=args.multirun) for text in given),
        config_dir=args.config_dir,
        multirun=args.multirun,
        shows=args.cfg is not None or args.info is not None,
        package=args.package,
        helps=args.help,
        resolves=args.resolve,
        composes=not (args.help or args.hydra_help or args.shell_completion),
    )


@lru_cache(maxsize=1024)  # Hydra's parser takes a millisecond, and a start asks for each override a hundred times
def parse(text: str) -> Override:
    """Parse one override, which callers must not change.

    A mistake raises `UsageError`, which names the argument and says how to write it.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, equals, value = text.partition("=")
        if not equals:
            shown = text.strip() or repr(text)
            raise UsageError(f"{shown}: arguments are written key=value, for example seq_len=16384") from error
        raise UsageError(
            f"{key}: {value} has characters that mean something in the grammar of the command line "
            f"(= ~ , quotes, spaces, brackets); quote the value for it as well as for the shell: \"{key}='…'\""
        ) from error
    if not override.key_or_group:
        raise UsageError(f"{text}: has no key; arguments are written key=value, for example seq_len=16384")
    return override


def quote(key: str, value: str) -> str:
    """`key=value` that Hydra reads as exactly this text; quoted only if needed."""
    if _value_of(f"{key}={value}") == value:
        return f"{key}={value}"
    return f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    # Hydra's grammar: a quote is escaped by \, and so is each \ directly before a quote, the closing one included.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"'{escaped}'"


def override_text(key: str, value: Any) -> str:
    """`key=value` that Hydra reads as exactly this value: text, a number, true or false, null, or a list of these."""
    return quote(key, value) if isinstance(value, str) else f"{key}={_grammar(value)}"


def _grammar(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_grammar, value))}]"
    if isinstance(value, str):
        return _quoted(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _with_quoted_path(text: str, sweeps: bool) -> str:
    """Quote a path or token that Hydra would split, and expand the `~` of a path."""
    key, equals, value = text.partition("=")
    if key in TOKEN_KEYS and equals and value not in ("", "null") and value[0] not in "'\"":
        return text if sweeps and "," in value else quote(key, value)
    if key not in PATH_KEYS or not equals or value in ("", "null") or value[0] in "'\"" or (sweeps and "," in value):
        return text
    if key == LIST_KEY and isinstance(_value_of(text), list):
        return text
    require_home(key, value)
    return quote(key, os.path.expanduser(value))


def require_home(key: str, path: str) -> None:
    """Raise for a `~` whose home folder is unknown: HOME is not set, or there is no such user."""
    if path.startswith("~") and os.path.expanduser(path) == path:
        raise UsageError(f"{key}={path}: no home folder is known for ~; allowed: the whole path, or ./~… for the name")


def _check_list(text: str) -> None:
    """Raise for a single value of `optimizer.betas`: OmegaConf's error names its own types."""
    value = _value_of(text) if text.startswith(f"{BETAS_KEY}=") else None
    if value is not None and not isinstance(value, list) and "$" not in text:
        raise UsageError(f"{text}: must be two numbers in [0, 1), such as {BETAS_KEY}=[0.9,0.95]")


def _value_of(text: str) -> Any:
    """The value that Hydra reads in `key=value`; None if its grammar refuses it or the value is a sweep."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return None
    return None if override.is_sweep_override() else override.value()
