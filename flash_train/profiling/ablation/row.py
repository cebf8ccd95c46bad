"""A row of an ablation: the settings of a trial and its measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DISTURBED = 0.1  # if a trial's steps spread more than this, something else ran on the machine


@dataclass(frozen=True)
class Row:
    """A trial: its value on every axis, how it ended (status ok, oom, failed or unavailable), and its measurements.

    Args:
        measured: by the names of `COLUMNS`; None or absent if unknown.
        losses: the training losses, by optimizer step.
        ran: the attention backend that ran, if known.
    """

    axes: Mapping[str, Any]
    status: str
    reason: str | None = None
    measured: Mapping[str, float | None] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    ran: str | None = None

    def shown(self, axis: str) -> str:
        """Return the value on an axis, as tables show it; for `attention=auto` it includes the backend that ran."""
        value = str(self.axes[axis])
        return f"{value}: {self.ran}" if axis == "attention" and value == "auto" and self.ran else value

    @property
    def disturbed(self) -> bool:
        """Whether its steps, or its runs, spread more than they do on an undisturbed machine."""
        return (self.measured.get("step_spread") or 0.0) > DISTURBED

    def without(self, *names: str) -> tuple[Any, ...]:
        """Return the values on all axes except these."""
        return tuple(value for name, value in self.axes.items() if name not in names)
