"""Hydra's flags: which of them the commands take. A wrong flag is reported here, in one line, before Hydra sees it."""

import argparse
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from flash_train.cli.config.environment import is_first_process
from flash_train.cli.config.errors import ArgumentParser, UsageError, did_you_mean

#: Hydra's flags that choose the configuration; this program has one configuration
REPLACED = {
    "config_name": ("--config-name (-cn)", "experiment=NAME, or --config-dir FOLDER for choices of your own"),
    "config_path": ("--config-path (-cp)", "--config-dir FOLDER, for choices of your own"),
    "experimental_rerun": ("--experimental-rerun", "run_dir=FOLDER resume=last"),
}
#: Lightning adds these keys to the commands of the other ranks; nobody else needs them
KEYS_OF_LIGHTNING = ("hydra.run.dir", "hydra.job.name", "hydra.output_subdir")
SHELLS = ("bash", "fish", "zsh")


def flag_parser() -> ArgumentParser:
    """Hydra's parser with the package's own `--version`; it raises `UsageError`."""
    return ArgumentParser(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")


def check_flags(args: argparse.Namespace) -> None:
    """Check the values of flags, and which flags are given together.

    Raises:
        UsageError: one line that names the flag.
    """
    for name, (flag, instead) in REPLACED.items():
        if (value := getattr(args, name)) is not None:
            raise UsageError(f"{flag} {value}: the configuration's files are fixed; allowed: {instead}")
    modes = {"--run (-r)": args.run, "--multirun (-m)": args.multirun, "--cfg (-c)": args.cfg is not None}
    modes |= {"--info (-i)": args.info is not None, "--shell-completion (-sc)": args.shell_completion}
    modes |= {"--help (-h)": args.help, "--hydra-help": args.hydra_help}
    if len(given := [flag for flag, is_given in modes.items() if is_given]) > 1:
        raise UsageError(f"{' and '.join(given)}: cannot be combined; allowed: one of them")
    if args.resolve and args.cfg is None and not args.help:
        raise UsageError("--resolve: needs --cfg, whose values it resolves; allowed: --cfg job --resolve")
    if args.package is not None and args.cfg != "job":
        raise UsageError(f"--package (-p) {args.package}: allowed: --cfg job --package {args.package}")
    if args.shell_completion:
        _check_completion(args.overrides)


def check_hydra_key(key: str) -> None:
    """Raise for one of Hydra's own settings: the program's keys and flags replace them.

    Raises:
        UsageError: names the key and what to give instead.
    """
    name = key.lstrip("+~")
    if name in KEYS_OF_LIGHTNING and not is_first_process():
        return
    if name.replace("/", ".").split(".")[0] == "hydra":
        raise UsageError(
            f"{name}: Hydra's own settings are fixed; allowed: run_dir=FOLDER for the files of a run, "
            "-m KEY=A,B for several runs, --config-dir FOLDER for choices of your own"
        )


def _check_completion(overrides: Sequence[str]) -> None:
    ways = ("install", "uninstall", "query")
    pairs = [text.partition("=") for text in overrides]
    if len(pairs) != 1 or pairs[0][0] not in ways or pairs[0][2] not in SHELLS:
        given = " ".join(overrides)
        guess = did_you_mean(pairs[0][2], SHELLS) if pairs else ""
        raise UsageError(
            f"--shell-completion (-sc) {given}: allowed: {' or '.join(f'{way}=SHELL' for way in ways)}, "
            f"where SHELL is one of {', '.join(SHELLS)}{guess}"
        )
