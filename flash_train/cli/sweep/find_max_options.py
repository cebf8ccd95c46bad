"""The keys `find_max…` of the command line, checked before anything slow is imported."""

from dataclasses import dataclass, replace

from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import CommandLine, parse
from flash_train.cli.config.validate import RULES

KEYS = ("find_max", "find_max.limit", "find_max.memory", "find_max.attention")
MODES = RULES["memory.mode"].choices
MEMORY = (*MODES, "offload")
ATTENTIONS = tuple(name for name in RULES["attention.backend"].choices if name != "auto")
UNIT = 64  #: tokens; as in profiling.memory.longest, which is slow to import
LIMIT, ATTENTION = 1 << 20, ("flash", "standard")
LIMIT_OFF_CUDA, ATTENTION_OFF_CUDA = 1 << 14, ("sdpa", "standard")  # a step of a million tokens takes hours on a CPU


@dataclass(frozen=True)
class Search:
    """A search for the longest row.

    Args:
        limit: the longest row to try, in tokens. None: depends on the device.
        memory: files of conf/memory.
        attention: attention backends. None: depends on the device.
    """

    limit: int | None = None
    memory: tuple[str, ...] = MODES
    attention: tuple[str, ...] | None = None

    def on(self, cuda: bool) -> tuple[int, tuple[str, ...]]:
        """The limit and the attention backends on this kind of device."""
        limit = self.limit or (LIMIT if cuda else LIMIT_OFF_CUDA)
        return limit, self.attention or (ATTENTION if cuda else ATTENTION_OFF_CUDA)


def split(line: CommandLine) -> tuple[CommandLine, Search | None]:
    """The command line without the keys `find_max…`, and the search that they describe; None if there is none.

    Raises:
        UsageError: an unknown key, or a wrong value.
    """
    asked: dict[str, object] = {}
    rest = []
    for text in line.overrides:
        override = parse(text)
        key, value = override.key_or_group, override.value()
        if not key.startswith("find_max"):
            rest.append(text)
        elif key not in KEYS:
            raise UsageError(f"{key}: no such key; allowed: {', '.join(KEYS)}")
        else:
            asked[key] = _checked(key, value)
    line = replace(line, overrides=tuple(rest))
    if not asked or asked.get("find_max") is False:
        return line, None
    if "find_max" not in asked:
        raise UsageError(f"{next(iter(asked))} belongs to the search for the longest row; add find_max=true")
    for key in ("seq_len", "memory", "attention"):
        if line.given(key):
            raise UsageError(
                f"{key}={line.given(key)}: find_max=true sets it; allowed: find_max.limit, .memory, .attention"
            )
    chosen = {key.removeprefix("find_max."): value for key, value in asked.items() if key != "find_max"}
    return line, Search(**chosen)  # type: ignore[arg-type]


def _checked(key: str, value: object) -> object:
    if key == "find_max":
        if not isinstance(value, bool):
            raise UsageError(f"find_max={value}: must be true or false")
        return value
    if key == "find_max.limit":
        if not isinstance(value, int) or isinstance(value, bool) or value < UNIT or value % UNIT:
            raise UsageError(f"find_max.limit={value}: must be a multiple of {UNIT}, and {UNIT} or more")
        return value
    allowed = MEMORY if key.endswith("memory") else ATTENTIONS
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(allowed):
        raise UsageError(f"{key}={value}: must be a list of {', '.join(allowed)}, as in {key}=[{allowed[0]}]")
    if len(set(value)) < len(value):
        raise UsageError(f"{key}={value}: must be different values")
    return tuple(map(str, value))
