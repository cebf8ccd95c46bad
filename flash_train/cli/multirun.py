"""`flash-train -m`: runs one after another in this process, and what the end of one means for those behind it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flash_train.cli.cells import STATUSES, Status, require_one
from flash_train.cli.errors import OutOfMemoryError, UnavailableError, UsageError, tell
from flash_train.cli.interrupt import Interrupted, signals
from flash_train.cli.overrides import CommandLine, parse


@dataclass
class Multirun:
    """The runs of a sweep; `names` has the swept values of each."""

    names: tuple[str, ...]
    begun: int = 0
    statuses: list[Status] = field(default_factory=list)  # of those that have ended

    @contextmanager
    def next(self) -> Iterator[str]:
        """Within it is the next run, whose number and name it yields.

        One that can't run here or runs out of memory is told in a line, and the sweep goes on: that is its answer.
        Any other mistake ends the sweep, as does a signal (`Interrupted`), which exits with 128 and its number.
        """
        name = f"run {self.begun} ({self.names[self.begun]})"
        self.begun += 1
        try:
            with signals():
                yield name
            self.statuses.append("ok")
        except (UnavailableError, OutOfMemoryError) as error:
            self.statuses.append(STATUSES[error.status])
            tell(f"{name}: {error}")
        except UsageError as error:
            raise UsageError(f"{name}: {error}; {self._not_begun()}") from error
        except (Interrupted, KeyboardInterrupt) as stop:  # the second of two signals interrupts at once
            number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
            print(f"stopped by {signal.Signals(number).name}; {self._not_begun()}", file=sys.stderr)
            sys.exit(128 + number)

    def end(self) -> None:
        """What came of all runs is the exit status: see `require_one`."""
        require_one(self.statuses, "run", "the line of each")

    def _not_begun(self) -> str:
        return f"runs not begun: {len(self.names) - self.begun} of {len(self.names)}"


def swept(line: CommandLine, overrides: tuple[str, ...]) -> str:
    """Of a run's overrides those that the command line gives several values, in words."""
    keys = {override.get_key_element() for override in map(parse, line.overrides) if override.is_sweep_override()}
    return ", ".join(text for text in overrides if text.partition("=")[0] in keys)
