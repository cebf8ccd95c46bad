"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the path of a temporary file, new and in the same folder, to be written in the block.

    When the block ends well, the file is brought to the disk and takes the place of `path` in one move; otherwise it is
    removed and `path` stays as it was. Its name is its own: other processes may be writing the same `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporary(folder: Path, names: Iterable[str]) -> None:
    """Remove the temporary files of killed processes; `names` are those files' names, or the beginnings of names."""
    for name in names:
        for path in folder.glob(f".{name}*.tmp"):
            with suppress(FileNotFoundError):
                path.unlink()
