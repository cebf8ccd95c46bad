"""W&B's files in a run directory: which W&B run comes next, and the cleanup after one that W&B refuses."""

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flash_train.files import write_text


@dataclass(frozen=True)
class WandbFiles:
    """The folder that W&B writes to, and the ids of the W&B runs that a run directory has logged to.

    Args:
        folder: W&B's folder. Each run has a folder in it: `offline-run-<time>-<id>`, or `run-<time>-<id>` if online.
        id_file: one id per line, the newest last.
        own: whether only this run directory uses `folder`.
        given_id: the id in WANDB_RUN_ID, or None.
    """

    folder: Path
    id_file: Path
    own: bool
    given_id: str | None

    @classmethod
    def of(cls, run_dir: Path, environ: Mapping[str, str]) -> "WandbFiles":
        """The files of a run directory; WANDB_DIR names another folder for W&B."""
        elsewhere = environ.get("WANDB_DIR")
        folder = Path(elsewhere or run_dir) / "wandb"
        return cls(folder, run_dir / "wandb" / "run_id", not elsewhere, environ.get("WANDB_RUN_ID") or None)

    def ids(self) -> list[str]:
        """The ids so far, oldest first."""
        own = self.id_file.read_text(encoding="utf-8").split() if self.id_file.is_file() else []
        return [self.given_id] if self.given_id else own

    def next_run(self, *, online: bool) -> tuple[str, int]:
        """The id of the run to log to, and its place, from 1, among the runs of the run directory.

        An offline run cannot be resumed: its files begin at W&B's history offset 0, and their upload would replace what
        the server has under the same id. So each offline part is a W&B run of its own. A part that follows an offline
        part which isn't uploaded yet is a new W&B run, too.
        """
        ids = self.ids()
        if self.given_id or (ids and not self._would_replace(ids[-1], online)):
            return ids[-1], len(ids)
        return uuid.uuid4().hex[:8], len(ids) + 1

    def remember(self, run_id: str) -> None:
        """Save the id of a run that has begun, for the runs that resume it."""
        if run_id not in (ids := self.ids()):
            write_text(self.id_file, "\n".join([*ids, run_id]) + "\n")

    @contextmanager
    def undone_on_error(self, run_id: str) -> Iterator[None]:
        """Remove the files of a W&B run if W&B refuses it."""
        existed = self.folder.is_dir()
        before = {path.name for path in self.folder.iterdir()} if existed else set()
        try:
            yield
        except BaseException:
            there = list(self.folder.iterdir()) if self.folder.is_dir() else []
            for path in there:
                new = path.name not in before and (self.own or path.name.endswith(f"-{run_id}"))
                if new and path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif new:
                    path.unlink()
            for path in there:  # W&B's links to the newest run
                if path.is_symlink() and not path.exists():
                    path.unlink()
            if not existed and self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()
            raise

    def _would_replace(self, run_id: str, online: bool) -> bool:
        """Whether logging to that W&B run again would replace an earlier part instead of adding to it."""
        offline = list(self.folder.glob(f"offline-run-*-{run_id}"))
        if not online:
            return bool(offline) or any(self.folder.glob(f"run-*-{run_id}"))
        return any(not list(folder.glob("*.synced")) for folder in offline)
