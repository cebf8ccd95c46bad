"""`flash-train -m`: several runs, one after another in this process."""

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from yaml import YAMLError

from flash_train.cli.config.errors import OutOfMemoryError, UnavailableError, UsageError, helpful_page, line_of
from flash_train.cli.config.overrides import CommandLine, parse
from flash_train.cli.config.paths import holds_run
from flash_train.cli.launch.interrupt import Interrupted, signals
from flash_train.cli.launch.outcome import STATUS_OF_EXIT, Status, require_success
from flash_train.cli.launch.run_table import EndedRun, run_table
from flash_train.output import LOGGER

RECORD = "multirun.yaml"  # Hydra writes it to the folder of a sweep


@dataclass
class Multirun:
    """The runs of a sweep, and how they ended; `names` has the swept values of each."""

    names: tuple[str, ...]
    begun: int = 0
    ended: list[EndedRun] = field(default_factory=list)

    @property
    def statuses(self) -> list[Status]:
        """The statuses of the runs that have ended."""
        return [run.status for run in self.ended]

    @contextmanager
    def next(self, run_dir: Path | None = None) -> Iterator[str]:
        """Run the next one in the block; yields its number and name. Its files are in `run_dir`.

        If it can't run here or runs out of memory, a message says so and the sweep continues. Any other mistake ends
        the sweep. So does a signal (`Interrupted`), with the exit status 128 + the signal's number.
        """
        name = f"run {self.begun} ({self.names[self.begun]})"
        self.begun += 1
        try:
            with signals():
                yield name
            self._add("ok", run_dir)
        except (UnavailableError, OutOfMemoryError) as error:
            self._add(STATUS_OF_EXIT[error.status], run_dir)
            LOGGER.error("%s: %s", name, line_of(error))
        except UsageError as error:
            self._add("failed", run_dir)
            self._show()
            ended = UsageError(f"{name}: {error}; {self._not_begun()}")
            ended.page = helpful_page(error)
            raise ended from error
        except (Interrupted, KeyboardInterrupt) as stop:  # the second of two signals interrupts at once
            number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
            self._add("interrupted", run_dir)
            self._show()
            LOGGER.error("stopped by %s; %s", signal.Signals(number).name, self._not_begun())
            sys.exit(128 + number)

    def end(self) -> None:
        """Print the table of the runs; `require_success` sets the exit status."""
        self._show()
        require_success(self.statuses, "run", "the message of each")

    def _add(self, status: Status, run_dir: Path | None) -> None:
        self.ended.append(EndedRun(self.names[len(self.ended)], status, run_dir))

    def _show(self) -> None:
        """Print the table of the runs that have ended; a single run needs none."""
        if len(self.ended) > 1:
            print(run_table(self.ended), flush=True)

    def _not_begun(self) -> str:
        return f"runs not begun: {len(self.names) - self.begun} of {len(self.names)}"


def swept_values(line: CommandLine, overrides: tuple[str, ...]) -> str:
    """The overrides of a run whose keys the command line sweeps over, as text."""
    keys = {override.get_key_element() for override in map(parse, line.overrides) if override.is_sweep_override()}
    return ", ".join(text for text in overrides if text.partition("=")[0] in keys)


def require_no_other_sweep(line: CommandLine) -> None:
    """Raise if the folder that a sweep names holds one with other arguments: their runs would be mixed.

    A sweep that resumes or validates runs is meant for a folder that has them.
    """
    run_dir = line.given("run_dir")
    if run_dir is None or line.given("resume") is not None or line.given("validate_only") in ("True", "true"):
        return
    file = Path(run_dir) / RECORD
    if not file.is_file() or not any(holds_run(folder) for folder in Path(run_dir).iterdir() if folder.is_dir()):
        return
    try:
        before = OmegaConf.select(OmegaConf.load(file), "hydra.overrides.task") or []
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"run_dir={run_dir}: {RECORD} cannot be read; allowed: another folder") from error
    if _of_sweep(before) != _of_sweep(line.overrides):
        raise UsageError(f"run_dir={run_dir}: holds another sweep ({RECORD}); allowed: another folder")


def _of_sweep(overrides: Iterable[str]) -> list[str]:
    """The overrides of a sweep without its folder, which may have been given as another path."""
    return [text for text in overrides if not text.startswith("run_dir=")]
