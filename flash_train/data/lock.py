"""A lock between processes: one does the work, the others wait.

It uses `flock` on a file, which the system releases when the holder ends, even if it is killed. The file exists while
a process holds the lock or waits for it. A killed holder leaves the file behind; the next holder removes it.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from flash_train.data.notice import say_if_slow

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # the errors of network file systems without locks
UNLINKED = (errno.ENOENT, errno.ESTALE)


@contextmanager
def exclusive(path: Path, waiting: str) -> Iterator[bool]:
    """Run the block in one process at a time, for all processes that give the same `path`.

    Prints `waiting` if another process holds the lock for long. Yields whether the lock is held. It is False if the
    operating system or the file system has no locks; several processes may then run the block at once, so the block
    must be correct in this case too. The same can happen with True: some file systems (Lustre with `localflock`) lock
    within one host only, and give no sign of it.
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
            path.unlink(missing_ok=True)  # while the lock is held: later the file may belong to another process
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not release it in processes that were forked meanwhile


def _lock(path: Path) -> IO[bytes] | None:
    """Open and lock the file at `path`; return None if locks are not supported."""
    while fcntl is not None:
        with ExitStack() as closing:
            file = closing.enter_context(open(path, "ab"))  # writable: NFS needs this for an exclusive lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # The previous holder may have unlinked this file, and another process may hold a new one at `path`.
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
