"""A folder whose files appear all together, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flash_train.data.special_tokens import MODEL_CONFIG, TOKENIZER_FILES
from flash_train.model.pretrained_source import TEMPLATES

GENERATION = "generation_config.json"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write a model in, which becomes `folder` at the end; after an error nothing is left of it.

    In a `folder` that is there, the files of an earlier model are removed and others are kept. config.json goes first
    and comes last, so that no reader takes a mixture of two models for one.
    """
    exists = folder.exists()
    if not exists:
        folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder if exists else folder.parent))
    try:
        yield staged
        if exists:
            _move_into(staged, folder)
        else:
            staged.chmod(0o777 & ~_umask())  # mkdtemp's are the owner's alone
            os.rename(staged, folder)
            _sync(folder.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _move_into(staged: Path, folder: Path) -> None:
    (folder / MODEL_CONFIG).unlink(missing_ok=True)
    earlier = [*(folder / name for name in (*TOKENIZER_FILES, GENERATION)), *folder.glob(f"{TEMPLATES}/*.jinja")]
    for file in (*earlier, *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        file.unlink(missing_ok=True)
    files = sorted(file.relative_to(staged) for file in staged.rglob("*") if file.is_file())
    for file in sorted(files, key=lambda file: str(file) == MODEL_CONFIG):
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
