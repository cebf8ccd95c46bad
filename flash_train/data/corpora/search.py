"""Finds the files at a path (a file, a folder or a glob), and records which files it skips, and why."""

import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

SHOWN = 3  # names per reason in the line about skipped files
HIDDEN, OTHER_KIND, FOLDER = "hidden", "another kind of file", "a folder, which only ** in a glob searches"

Entry = tuple[int, str, Path, str]  # number of links in the file's path, its key, its path, its path without links


class SkippedFiles:
    """Names of the files and folders that a search skipped, by reason."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def add(self, reason: str, name: str) -> None:
        self.names.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        return "; ".join(f"{_shorten_list(sorted(names))} ({reason})" for reason, names in sorted(self.names.items()))


def find_files(
    path: str | Path, is_readable: Callable[[Path], bool]
) -> tuple[list[tuple[str, Path, str]], SkippedFiles]:
    """Return the files at `path` that `is_readable` accepts, and the skipped ones.

    Each file is (key, file, real path); they are sorted by key.

    A key is the path relative to the folder, or to the part of a glob before its first wildcard. Links to folders are
    followed. A file or folder that is reached by several paths is read once, by the path with the fewest links (the
    first in order among equals). Hidden files and folders inside a folder are skipped, and so are those that we have
    no permission to read.

    Raises FileNotFoundError if there is nothing at `path`, ValueError if nothing there is readable.
    """
    expanded, skipped = Path(path).expanduser(), SkippedFiles()
    if expanded.is_file():
        found = [(0, expanded.name, expanded, os.path.realpath(expanded))]
    elif expanded.is_dir():
        found = list(walk(expanded, skipped))
    else:
        found = list(_expand_glob(expanded, skipped))
        if not found and skipped.names.keys() <= {HIDDEN}:
            raise FileNotFoundError(f"data.path={path}: no such file or folder, and no glob that matches any")
    files: dict[str, tuple[str, Path, str]] = {}
    for _, key, file, real in sorted(found, key=lambda entry: entry[:2]):
        if not is_readable(file):
            skipped.add(OTHER_KIND, key)
        elif not os.access(file, os.R_OK):
            skipped.add("Permission denied", key)
        else:
            files.setdefault(real, (key, file, real))
    return sorted(files.values()), skipped


def walk(root: Path, skipped: SkippedFiles) -> Iterator[Entry]:
    """Yield every regular file under `root`; read each folder once, by the path with the fewest links."""
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
                skipped.add(error.strerror or str(error), _key(folder, root))
                continue
            for entry in entries:
                key = _key(entry.path, root)
                if entry.name.startswith("."):
                    skipped.add(HIDDEN, key)
                    continue
                try:
                    mode = entry.stat().st_mode
                except OSError as error:
                    skipped.add("broken link" if entry.is_symlink() else error.strerror or str(error), key)
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
                    skipped.add("not a regular file", key)
        folders, links = sorted(linked, reverse=True), links + 1


def _expand_glob(pattern: Path, skipped: SkippedFiles) -> Iterator[Entry]:
    """Yield the files that a glob matches."""
    fixed = list(takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root, parts = Path(*fixed), pattern.parts[len(fixed) :]
    if not parts or not root.is_dir():
        return
    if "**" in parts:  # `glob` follows links in circles, and does not report folders that it cannot read
        yield from (entry for entry in walk(root, skipped) if _matches(entry[1].split("/"), parts))
        return
    if not os.access(root, os.R_OK | os.X_OK):
        skipped.add("Permission denied", str(root))
    for match in glob.glob(str(pattern)):
        file, key = Path(match), _key(match, root)
        if any(part.startswith(".") for part in Path(key).parts):
            skipped.add(HIDDEN, key)
        elif file.is_file():
            yield int(file.is_symlink()), key, file, os.path.realpath(file)
        else:
            skipped.add(FOLDER if file.is_dir() else "not a regular file", key)


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the names of a path match the parts of a glob, where ``**`` matches any number of folders."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[i:], parts[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatch(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _key(path: str, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _shorten_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
