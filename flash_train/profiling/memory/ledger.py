"""A ledger of allocated bytes: the memory held of each kind, and the peak of each phase."""

from dataclasses import dataclass, field

ROUND = 512  # PyTorch's allocators round a tensor's bytes up to a multiple of this

#: the measured phases, and their names in reports and plots
PHASE_NAMES = {"forward": "forward", "backward": "backward", "step": "optimizer"}


@dataclass(frozen=True)
class Moment:
    """The memory held at one time, in bytes by kind."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class Ledger:
    """Named holdings, each of a kind. `moments` has one entry per holding, in order, with its phase."""

    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    moments: list[tuple[str, Moment]] = field(default_factory=list)
    phase: str = ""

    def hold(self, name: str, kind: str, size: float) -> None:
        """Hold `size` bytes. Raises ValueError if the name is held already."""
        if name in self.held:
            raise ValueError(f"{name} is held already")
        rounded = -(-int(size) // ROUND) * ROUND
        self.held[name] = (kind, rounded)
        self.parts[kind] = self.parts.get(kind, 0) + rounded
        if rounded:
            self.moments.append((self.phase, Moment({kind: size for kind, size in self.parts.items() if size})))

    def release(self, *names: str) -> None:
        """Release the bytes under these names. Raises ValueError for a name that is not held."""
        for name in names:
            self._require(name)
            kind, size = self.held.pop(name)
            self.parts[kind] -= size

    def hold_briefly(self, name: str, kind: str, size: float) -> None:
        """Hold `size` bytes and release them at once, so that they count only for the peak."""
        self.hold(name, kind, size)
        self.release(name)

    def rename(self, old: str, new: str) -> None:
        """Change the name of a holding. Raises ValueError if `old` is not held."""
        self._require(old)
        self.held[new] = self.held.pop(old)

    def size_of(self, name: str) -> int:
        """Return the bytes held under a name. Raises ValueError if it is not held."""
        self._require(name)
        return self.held[name][1]

    def peak(self, phase: str | None = None) -> Moment:
        """Return the fullest moment of a phase, or of all."""
        return max((m for p, m in self.moments if phase in (None, p)), key=lambda moment: moment.total)

    def _require(self, name: str) -> None:
        if name not in self.held:
            raise ValueError(f"{name} is not held")
