"""Loggers by name. Without an account or a network, W&B runs offline, and a message says how to sync."""

import netrc
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from flash_train.cli.components.wandb_files import WandbFiles
from flash_train.cli.config.errors import blame

Mode = Literal["online", "offline"]

PROJECT = "flash-train"
NO_SERVER = ("offline", "dryrun", "disabled")  # W&B's modes without a server, where no run can be continued
NOTES = "The metrics and files of a run: docs/train.md#the-files-of-a-run"
CONNECT_SECONDS = 3.0
PROXY_VARIABLES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def build_logger(settings: DictConfig, run_dir: Path, config: Mapping[str, Any]) -> Logger | None:
    """The logger that `settings.name` names; its files are in `run_dir`.

    Args:
        config: plain values that the logger saves with the metrics.
    """
    if settings.name == "none":
        return None
    return WandbLogger(experiment=_wandb_run(settings, run_dir, config))


@rank_zero_only  # returns None on the other ranks, which log nothing
def _wandb_run(settings: DictConfig, run_dir: Path, config: Mapping[str, Any]) -> Any:
    """The W&B run: a new one, or the one of this directory if W&B's server can resume it.

    The settings win over the `WANDB_*` variables. This function chooses what neither of them sets.
    """
    import wandb

    environ = os.environ
    mode = wandb_mode(settings.mode, environ)
    offline = (mode or environ["WANDB_MODE"]) in NO_SERVER
    files = WandbFiles.of(run_dir, environ)
    run_id, part = files.next_run(online=not offline)
    name = settings.run_name or environ.get("WANDB_NAME") or run_dir.name
    group = settings.group or environ.get("WANDB_RUN_GROUP") or (name if offline or part > 1 else None)
    defaults: dict[str, Any] = {"silent": True, "console": "off", "run_notes": NOTES}
    with blame("logger=wandb"), files.undone_on_error(run_id):
        if os.path.expanduser("~") == "~":
            raise ValueError("W&B looks for its settings in the home folder, which is unknown; set HOME")
        try:
            run = wandb.init(
                project=settings.project or environ.get("WANDB_PROJECT") or PROJECT,
                name=name if part == 1 else f"{name}-{part}",
                group=group,
                dir=environ.get("WANDB_DIR") or run_dir,
                id=run_id,
                config=dict(config),
                mode=mode,
                resume=None if offline or environ.get("WANDB_RESUME") else "allow",
                settings=wandb.Settings(
                    **{
                        key: value
                        for key, value in defaults.items()
                        if f"WANDB_{key.removeprefix('run_').upper()}" not in environ
                    }
                ),
            )
        except wandb.Error as error:
            hint = "" if offline else "; logger.mode=offline needs no server"
            wandb.teardown()  # otherwise its service continues to write to the folder
            raise ValueError(f"{error}{hint}") from error
    files.remember(run_id)
    run.define_metric("trainer/global_step")  # the name under which Lightning logs the step
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return run


@rank_zero_only
def log_table(
    settings: DictConfig,
    run_dir: Path,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    files: Sequence[Path] = (),
) -> None:
    """Log a table as a W&B run of its own, in the group of the table's runs; `files` become an artifact."""
    import wandb

    run = _wandb_run(settings, run_dir, {})
    assert run is not None  # only the first rank is here
    run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)})
    if files:
        run.log_artifact(_artifact(name, files))
    run.finish()


def log_artifact(logger: Logger | None, name: str, files: Sequence[Path]) -> None:
    """Log files as an artifact of the W&B run, if the logger is W&B's."""
    if isinstance(logger, WandbLogger):
        logger.experiment.log_artifact(_artifact(name, files))


def _artifact(name: str, files: Sequence[Path]) -> Any:
    import wandb

    artifact = wandb.Artifact(name, type=f"{name}-profile")
    for path in files:
        artifact.add_file(str(path))
    return artifact


def wandb_mode(wanted: Mode | Literal["auto"], environ: Mapping[str, str]) -> Mode | None:
    """`online` or `offline`; None leaves it to WANDB_MODE. `auto` is online if there is a login and a connection."""
    if wanted != "auto":
        return wanted
    if environ.get("WANDB_MODE"):
        return None
    url = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    return "online" if has_login(host, environ) and reachable(host, port, environ) else "offline"


def has_login(host: str, environ: Mapping[str, str]) -> bool:
    """Whether W&B would find credentials for `host` without asking for them."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    given = environ.get("NETRC")
    home = Path(os.path.expanduser("~"))  # "~" itself if no home folder is known
    for path in [Path(given)] if given else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def reachable(host: str, port: int, environ: Mapping[str, str]) -> bool:
    """Whether a connection to `host` opens within a few seconds; True behind a proxy, where this cannot be tested."""
    if any(environ.get(name) for name in PROXY_VARIABLES):
        return True
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def sync_hint(logger: Logger | None, run_dir: Path) -> str | None:
    """How to upload an offline W&B run; None if there is nothing to upload."""
    if isinstance(logger, WandbLogger) and logger.experiment.offline:
        files = WandbFiles.of(run_dir, os.environ)
        which = "offline-run-*" if files.own else " ".join(f"{files.folder}/offline-run-*-{i}" for i in files.ids())
        return f"W&B is offline; upload with: wandb sync {f'{files.folder}/' if files.own else ''}{which}"
    return None
