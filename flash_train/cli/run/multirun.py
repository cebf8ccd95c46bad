"""`flash-train -m`: runs one after another in this process, and what the end of one means for those behind it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flash_train.cli.config.errors import OutOfMemoryError, UnavailableError, UsageError, tell
from flash_train.cli.config.overrides import CommandLine, parse
from flash_train.cli.run.interrupt import Interrupted, signals
from flash_train.cli.run.run_table import EndedRun, run_table
from flash_train.cli.sweep.trial import STATUSES, Status, require_one


@dataclass
class Multirun:
    """The runs of a sweep; `names` has the swept values of each."""

    names: tuple[str, ...]
    begun: int = 0
    ended: list[EndedRun] = field(default_factory=list)

    @property
    def statuses(self) -> list[Status]:
        """Of the runs that have ended."""
        return [run.status for run in self.ended]

    @contextmanager
    def next(self, run_dir: Path | None = None) -> Iterator[str]:
        """Within it is the next run, whose number and name it yields; its files are in `run_dir`.

        One that can't run here or runs out of memory is told in a line, and the sweep goes on: that is its answer.
        Any other mistake ends the sweep, as does a signal (`Interrupted`), which exits with 128 and its number.
        """
        name = f"run {self.begun} ({self.names[self.begun]})"
        self.begun += 1
        try:
            with signals():
                yield name
            self._add("ok", run_dir)
        except (UnavailableError, OutOfMemoryError) as error:
            self._add(STATUSES[error.status], run_dir)
            tell(f"{name}: {error}")
        except UsageError as error:
            self._add("failed", run_dir)
            self._show()
            raise UsageError(f"{name}: {error}; {self._not_begun()}") from error
        except (Interrupted, KeyboardInterrupt) as stop:  # the second of two signals interrupts at once
            number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
            self._add("interrupted", run_dir)
            self._show()
            print(f"stopped by {signal.Signals(number).name}; {self._not_begun()}", file=sys.stderr)
            sys.exit(128 + number)

    def end(self) -> None:
        """Print the table of the runs. What came of all of them is the exit status: see `require_one`."""
        self._show()
        require_one(self.statuses, "run", "the line of each")

    def _add(self, status: Status, run_dir: Path | None) -> None:
        self.ended.append(EndedRun(self.names[len(self.ended)], status, run_dir))

    def _show(self) -> None:
        """The table of the runs that have ended; one alone has said by itself what came of it."""
        if len(self.ended) > 1:
            print(run_table(self.ended), flush=True)

    def _not_begun(self) -> str:
        return f"runs not begun: {len(self.names) - self.begun} of {len(self.names)}"


def swept(line: CommandLine, overrides: tuple[str, ...]) -> str:
    """Of a run's overrides those that the command line gives several values, in words."""
    keys = {override.get_key_element() for override in map(parse, line.overrides) if override.is_sweep_override()}
    return ", ".join(text for text in overrides if text.partition("=")[0] in keys)
