"""Reads the files of a saved model. The error for a damaged file names it and the likely cause, in one line."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

LFS = b"version https://git-lfs.github.com/spec/"  # the beginning of a Git LFS pointer


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, on the CPU, by their names in the file.

    Raises:
        ValueError: the file is cut off, damaged, or a Git LFS pointer.
    """
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"init_from={file.parent}: {_describe_damage(file)} ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut off, damaged, or a Git LFS pointer.
    """
    if not file.is_file():
        raise FileNotFoundError(f"init_from={file.parent}: {file.name} is missing")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"init_from={file.parent}: {_describe_damage(file, 'is not JSON: it ')} ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"init_from={file.parent}: {file.name} holds {type(found).__name__}, not an object of keys")
    return found


def _describe_damage(file: Path, fault: str = "") -> str:
    with open(file, "rb") as opened:
        start = opened.read(len(LFS))
    if start == LFS:
        return f"{file.name} is a Git LFS pointer, not the file itself; `git lfs pull` in that folder fetches it"
    return f"{file.name} {fault}is damaged or cut off, with {file.stat().st_size:,} bytes; copy or download it again"
