"""Bytes as they come and go: an account of memory by kind, and the most that each phase held."""

from dataclasses import dataclass, field

ROUND = 512  # what PyTorch's allocators round a tensor up to

#: phases that are measured, as pages and pictures call them
PHASE_NAMES = {"forward": "forward", "backward": "backward", "step": "optimizer"}


@dataclass(frozen=True)
class Moment:
    """What was held at one time, in bytes by kind."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class Ledger:
    """Named holdings, each of a kind. `moments` has one entry per change, in order, with the phase it fell into."""

    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    moments: list[tuple[str, Moment]] = field(default_factory=list)
    phase: str = ""

    def hold(self, name: str, kind: str, size: float) -> None:
        """Take `size` bytes under a name that is free."""
        if name in self.held:
            raise ValueError(f"{name} is held already")
        rounded = -(-int(size) // ROUND) * ROUND
        self.held[name] = (kind, rounded)
        self.parts[kind] = self.parts.get(kind, 0) + rounded
        if rounded:
            self.moments.append((self.phase, Moment({kind: size for kind, size in self.parts.items() if size})))

    def drop(self, *names: str) -> None:
        """Give back what is held under these names; one that is not held is passed over."""
        for name in names:
            if name in self.held:
                kind, size = self.held.pop(name)
                self.parts[kind] -= size

    def pass_by(self, name: str, kind: str, size: float) -> None:
        """Take and give back."""
        self.hold(name, kind, size)
        self.drop(name)

    def rename(self, old: str, new: str) -> None:
        """Hold under another name; what is not held is passed over."""
        if old in self.held:
            self.held[new] = self.held.pop(old)

    def size_of(self, name: str) -> int:
        return self.held[name][1] if name in self.held else 0

    def peak(self, phase: str | None = None) -> Moment:
        """The fullest moment, of a phase or of all."""
        return max((m for p, m in self.moments if phase in (None, p)), key=lambda moment: moment.total)
