"""A lock among processes, so that one does what the others need only wait for.

It is `flock` on a file: the system gives it back when its holder ends, however that is. The file exists while somebody
holds the lock or waits for it, and after a holder that was killed, until the next one leaves.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from flash_train.data.notice import say_if_slow

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what network file systems mounted without locks answer
UNLINKED = (errno.ENOENT, errno.ESTALE)


@contextmanager
def exclusive(path: Path, waiting: str) -> Iterator[bool]:
    """Lets in one at a time of the processes that name `path`; `waiting` is said if that takes long.

    Yields whether it does: False where the system or the file system has no such locks, and others may be inside, too.
    What is done here must be right then as well, if only done twice. That holds, too, where a file system (Lustre with
    `localflock`) keeps its locks to each host, of which nobody is told.
    """
    with say_if_slow(waiting):
        file = _lock(path)
    if file is None:
        yield False
        return
    with file:
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)  # while it is held: after that it may be another's
            fcntl.flock(file, fcntl.LOCK_UN)  # closing it would leave the lock to processes forked in between


def _lock(path: Path) -> IO[bytes] | None:
    """The file at `path`, locked; None where that cannot be."""
    while fcntl is not None:
        with ExitStack() as closing:
            file = closing.enter_context(open(path, "ab"))  # to be written: NFS locks no other for one alone
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Who held it before has unlinked it, and others may hold a new file of that name.
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    closing.pop_all()
                    return file
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    path.unlink(missing_ok=True)
                    return None
                if error.errno not in UNLINKED:
                    raise
    return None
