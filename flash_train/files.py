"""Writes files and folders whole or not at all."""

import errno
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a new temporary file in the same folder, to be written in the block.

    When the block ends without an error, the file is synced to the disk and replaces `path` in one move. Otherwise it
    is removed and `path` stays as it was. The temporary name is unique, since other processes may write the same path.

    Raises:
        FileExistsError: `path` is a device or a pipe, such as /dev/null, which a file would replace for everyone.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "is a device or a pipe, and must be a file or new", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Wait until a file's content is on the disk."""
    with open(path, "rb+") as written:
        os.fsync(written.fileno())


def remove_temporary(folder: Path, names: Iterable[str]) -> None:
    """Remove temporary files and folders that killed processes left; `names` are the final names' beginnings."""
    for name in names:
        for path in folder.glob(f".{name}*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(FileNotFoundError):
                    path.unlink()


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file in one move: a reader sees the old content or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` in UTF-8 in one move, with its line ends unchanged."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON in one move. Numbers that JSON lacks (nan, inf) become null."""
    write_text(path, json.dumps(_finite(value), indent=2, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextmanager
def whole_folder(
    folder: Path, *, earlier: Iterable[str] = (), last: str, replaces_file: bool = False
) -> Iterator[Path]:
    """Yield a new folder to write in. When the block ends without an error, its files move to `folder`.

    After an error nothing is left. If `folder` exists, its files that match the glob patterns `earlier` are removed and
    all others are kept. The file `last` is removed first and moved last: while it exists, the files belong together.
    With `replaces_file`, a file of the folder's name is removed at the end; without, it is an error.
    """
    exists = folder.exists() and not (replaces_file and folder.is_file())
    if not exists:
        folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder if exists else folder.parent))
    try:
        yield staged
        for file in filter(Path.is_file, staged.rglob("*")):
            file.chmod(0o666 & ~_umask())  # some libraries make files private
        if exists:
            _move_into(staged, folder, earlier, last)
        else:
            staged.chmod(0o777 & ~_umask())  # mkdtemp makes it private
            if replaces_file:
                folder.unlink(missing_ok=True)
            os.rename(staged, folder)
            _sync(folder.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _move_into(staged: Path, folder: Path, earlier: Iterable[str], last: str) -> None:
    (folder / last).unlink(missing_ok=True)
    for file in {file for pattern in earlier for file in folder.glob(pattern)}:
        file.unlink(missing_ok=True)
    files = sorted(file.relative_to(staged) for file in staged.rglob("*") if file.is_file())
    for file in sorted(files, key=lambda file: str(file) == last):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged / file, folder / file)
    _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
