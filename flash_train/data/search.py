"""The files at a path: a file, a folder that is searched through, or a glob; and what a search leaves out, and why."""

import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

SHOWN = 3  # names of each reason in the line that says what is not read
HIDDEN, OTHER_KIND, FOLDER = "hidden", "another kind of file", "a folder, which only ** in a glob searches"

Entry = tuple[int, str, Path, str]  # links on the way to the file, its key, its path, and that without links


class LeftOut:
    """Names of what a search did not read, by reason."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        self.names.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        return "; ".join(f"{_some(sorted(names))} ({reason})" for reason, names in sorted(self.names.items()))


def find_files(path: str | Path, is_readable: Callable[[Path], bool]) -> tuple[list[tuple[str, Path, str]], LeftOut]:
    """The (key, file, real path) at `path` that `is_readable` accepts, sorted by key, and what is left out.

    A key is the path relative to the folder, or to the part of a glob before its first wildcard. Links to folders are
    followed. A file or folder that is reached in several ways is read once, under the name with the fewest links (the
    first in order, if there are several). Hidden files and folders inside a folder are left out, and so are those that
    the system does not let us read.

    Raises FileNotFoundError if there is nothing at `path`, ValueError if nothing there is readable.
    """
    whole, left = Path(path).expanduser(), LeftOut()
    if whole.is_file():
        found = [(0, whole.name, whole, os.path.realpath(whole))]
    elif whole.is_dir():
        found = list(walk(whole, left))
    else:
        found = list(_expand(whole, left))
        if not found and left.names.keys() <= {HIDDEN}:
            raise FileNotFoundError(f"data.path={path}: no such file or folder, and no glob that matches any")
    files: dict[str, tuple[str, Path, str]] = {}
    for _, key, file, real in sorted(found, key=lambda entry: entry[:2]):
        if not is_readable(file):
            left.add(OTHER_KIND, key)
        elif not os.access(file, os.R_OK):
            left.add("Permission denied", key)
        else:
            files.setdefault(real, (key, file, real))
    return sorted(files.values()), left


def walk(root: Path, left: LeftOut) -> Iterator[Entry]:
    """Every regular file under `root`. Each folder is read once: where links lead to it, too, by the fewest links."""
    seen: set[str] = set()
    folders, links = [(str(root), os.path.realpath(root))], 0
    while folders:
        linked: list[tuple[str, str]] = []
        while folders:
            folder, real = folders.pop()
            if real in seen:
                continue
            seen.add(real)
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                left.add(error.strerror, _key(folder, root))
                continue
            for entry in entries:
                key = _key(entry.path, root)
                if entry.name.startswith("."):
                    left.add(HIDDEN, key)
                    continue
                try:
                    mode = entry.stat().st_mode
                except OSError as error:
                    left.add("broken link" if entry.is_symlink() else error.strerror, key)
                    continue
                if stat.S_ISDIR(mode):
                    if entry.is_symlink():
                        linked.append((entry.path, os.path.realpath(entry.path)))
                    else:
                        folders.append((entry.path, os.path.join(real, entry.name)))
                elif stat.S_ISREG(mode):
                    is_link = entry.is_symlink()
                    real_file = os.path.realpath(entry.path) if is_link else os.path.join(real, entry.name)
                    yield links + is_link, key, Path(entry.path), real_file
                else:
                    left.add("not a regular file", key)
        folders, links = sorted(linked, reverse=True), links + 1


def _expand(pattern: Path, left: LeftOut) -> Iterator[Entry]:
    """The files that a glob matches."""
    fixed = list(takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root, parts = Path(*fixed), pattern.parts[len(fixed) :]
    if not parts or not root.is_dir():
        return
    if "**" in parts:  # `glob` follows links in circles, and does not report folders that it cannot read
        yield from (entry for entry in walk(root, left) if _matches(entry[1].split("/"), parts))
        return
    if not os.access(root, os.R_OK | os.X_OK):
        left.add("Permission denied", str(root))
    for match in glob.glob(str(pattern)):
        file, key = Path(match), _key(match, root)
        if any(part.startswith(".") for part in Path(key).parts):
            left.add(HIDDEN, key)
        elif file.is_file():
            yield int(file.is_symlink()), key, file, os.path.realpath(file)
        else:
            left.add(FOLDER if file.is_dir() else "not a regular file", key)


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the names of a path match the parts of a glob, in which ``**`` is any number of folders."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[i:], parts[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatch(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _key(path: str, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
