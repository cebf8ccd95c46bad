"""How a run ended, and the exit status of a command that starts several runs."""

from collections.abc import Sequence
from typing import Literal

from flash_train.cli.config.errors import OutOfMemoryError, UnavailableError, UsageError

Status = Literal["ok", "oom", "failed", "unavailable", "interrupted"]

STATUS_OF_EXIT: dict[int, Status] = {OutOfMemoryError.status: "oom", UnavailableError.status: "unavailable"}
ERROR_OF_STATUS: dict[str, type[UsageError]] = {"oom": OutOfMemoryError, "unavailable": UnavailableError}


def count_statuses(statuses: Sequence[str]) -> str:
    """How many runs ended in each way, such as "3 ok, 1 oom"."""
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def require_success(statuses: Sequence[str], kind: str, where: str) -> None:
    """Raise if no run ended ok. The kind of error sets the command's exit status.

    A mix of "oom" and "unavailable" alone is no error: then every run has given its answer.

    Args:
        kind: a word for what ended, such as "run" or "trial".
        where: what gives the reasons, such as a file's path; the error ends in "{where} says why".

    Raises:
        UsageError: no run ended ok, and some failed.
        UnavailableError: no run can run on this machine.
        OutOfMemoryError: every run ran out of memory.
    """
    found = set(statuses)
    if not statuses or "ok" in found or found == set(ERROR_OF_STATUS):
        return
    error = UsageError if "failed" in found else ERROR_OF_STATUS[next(iter(found))]
    raise error(f"no {kind} ended ok ({count_statuses(statuses)}); {where} says why")
