"""Checkpoints of sharded weights: a folder with PyTorch's distributed checkpoint, and one file for all other values.

A folder appears whole or not at all. Any number of ranks can load it, also one process without a process group.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from flash_train.files import sync_file, whole_folder

VALUES = "values.pt"  # everything except sharded tensors, as `torch.save` writes it
METADATA = ".metadata"  # PyTorch's list of the tensors and where their parts are

Place = tuple[str | int, ...]  # the keys that lead to a tensor in a checkpoint
T = TypeVar("T")


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether a path is a complete folder that `save_sharded` wrote."""
    return (path / VALUES).is_file() and (path / METADATA).is_file()


def save_sharded(checkpoint: Mapping[str, Any], path: Path, group: ProcessGroup | None = None) -> None:
    """Write a checkpoint; each rank writes its parts of the `DTensor`s. All ranks call it.

    Args:
        checkpoint: nested dictionaries. The first rank's values are saved for everything that is not sharded.
        path: the folder; a checkpoint there is replaced, a file too.
        group: all ranks, for the communication; None: the default group.

    Raises:
        OSError: a rank could not write; on all ranks. The folder is then as it was before.
        Exception: a rank raised another error while it wrote its part; on all ranks. A note names the rank.
    """
    tensors: dict[str, Tensor] = {}
    values = _take_sharded(checkpoint, (), tensors)
    first = dist.get_rank() == 0
    with ExitStack() as on_first_rank:  # after an error it removes what was written

        def begin() -> str:
            folder = whole_folder(path, earlier=("*.distcp", METADATA), last=VALUES, replaces_file=True)
            return str(on_first_rank.enter_context(folder))

        staged = Path(_on_first_rank(begin, group))
        try:
            dcp.save(tensors, storage_writer=FileSystemWriter(staged), process_group=group)
        except CheckpointException as error:
            raise _cause(error) from None

        def save_values() -> None:
            with open(staged / VALUES, "wb") as file:
                write_archive(values, file)
            sync_file(staged / VALUES)

        _on_first_rank(save_values, group)
        _on_first_rank(on_first_rank.pop_all().close if first else lambda: None, group)


def read_values(path: Path) -> dict[str, Any]:
    """Return everything in a checkpoint except the sharded tensors; loads plain values and tensors only."""
    return torch.load(path / VALUES, map_location="cpu", weights_only=True)


def load_whole(path: Path) -> dict[str, Any]:
    """Return a checkpoint with whole tensors on the CPU; needs no process group."""
    values, stored = read_values(path), _stored(path)
    found = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in stored}
    with warnings.catch_warnings():
        # It says that one process loads alone, which is what this function is for
        warnings.filterwarnings("ignore", r"torch\.distributed is disabled, unavailable or uninitialized, assuming the")
        dcp.load(found, storage_reader=_Reader(path), no_dist=True)
    for key, whole in found.items():
        _insert(values, _place(key), whole)
    return values


def load_sharded(path: Path, destination: Callable[[Place, torch.Size, torch.dtype], Tensor | None]) -> dict[str, Any]:
    """Return a checkpoint whose sharded tensors were read into given ones; all ranks call it.

    Args:
        destination: takes a tensor's place in the checkpoint, its shape and its dtype; returns the tensor to read into,
            sharded in any way, or None to leave it out.

    Raises:
        ValueError: a tensor has another shape than the one to read into.
    """
    values = read_values(path)
    found: dict[str, Tensor] = {}
    for key, stored in _stored(path).items():
        place = _place(key)
        tensor = destination(place, stored.size, stored.properties.dtype)
        if tensor is None:
            continue
        if tensor.shape != stored.size:
            name = " ".join(map(str, place))
            raise ValueError(f"{path}: {name} has shape {tuple(stored.size)}, and {tuple(tensor.shape)} here")
        found[key] = tensor
    dcp.load(found, storage_reader=_Reader(path))
    for key, read in found.items():
        _insert(values, _place(key), read)
    return values


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, a file or a folder; one that is gone is no error."""
    if path.is_dir() and not path.is_symlink():
        (path / VALUES).unlink(missing_ok=True)  # from here on it does not count as a checkpoint
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def make_way_for_file(path: Path) -> None:
    """Remove a sharded checkpoint, whole or not, at a path to which a file is to move; leave anything else."""
    if path.is_dir() and any(True for pattern in (VALUES, METADATA, "*.distcp") for _ in path.glob(pattern)):
        remove_checkpoint(path)


def write_archive(values: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write as `torch.save` does; if the system refuses, as on a full disk, raise its OSError."""
    writer = _Writer(file)
    try:
        torch.save(values, writer)  # type: ignore[arg-type]
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None


def _take_sharded(tree: Any, place: Place, tensors: dict[str, Tensor]) -> Any:
    """Copy nested dictionaries and lists without their `DTensor`s, which go to `tensors`."""
    if isinstance(tree, Mapping):
        rest: dict[Any, Any] = {}
        for key, value in tree.items():
            if isinstance(value, DTensor):
                tensors[json.dumps([*place, key])] = value.detach()
            else:
                rest[key] = _take_sharded(value, (*place, key), tensors)
        return rest
    if isinstance(tree, list):
        return [_take_sharded(value, (*place, index), tensors) for index, value in enumerate(tree)]
    return tree


def _insert(values: dict[str, Any], place: Place, tensor: Tensor) -> None:
    node: Any = values
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = tensor


def _place(key: str) -> Place:
    return tuple(json.loads(key))


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    found = _Reader(path).read_metadata().state_dict_metadata
    return {key: stored for key, stored in found.items() if isinstance(stored, TensorStorageMetadata)}


def _on_first_rank(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run an action on the first rank; its result, or its OSError, reaches all ranks."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = (error.errno, error.strerror or str(error))
    dist.broadcast_object_list(outcome, 0, group)
    if outcome[1] is not None:
        raise OSError(*outcome[1])
    return outcome[0]


def _cause(error: CheckpointException) -> BaseException:
    """Return the OSError of the first rank that could not write, else the first other exception of a rank.

    An exception that ends a program, as a KeyboardInterrupt does, was meant for one rank: `error` stays as it is then.
    """
    failures = sorted(error.failures.items())
    for rank, (cause, _) in failures:
        if isinstance(cause, OSError):
            return OSError(cause.errno, f"rank {rank}: {cause.strerror or cause}")
    for rank, (cause, frames) in failures:
        if isinstance(cause, Exception):
            where = "".join(traceback.format_list(frames))  # an exception loses it on the way to other ranks
            cause.add_note(f"Rank {rank} raised this while it wrote its part of a checkpoint:\n{where}".rstrip())
            return cause
    return error


class _Writer:
    """A file for `torch.save` that remembers the system's error: `torch.save` may raise a RuntimeError instead."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


class _Reader(FileSystemReader):
    """Reads the list of tensors without running code from the file: PyTorch's reader unpickles any object."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with open(os.path.join(self.path, METADATA), "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is damaged: {METADATA} cannot be read ({error})") from error
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if module == "torch":
            found = getattr(torch, name, None)
            if not (found is torch.Size or isinstance(found, torch.dtype | torch.layout)):
                found = None
        elif (module, name) in ALLOWED or module == "torch.distributed.checkpoint.metadata":
            found = super().find_class(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        return found


ALLOWED = frozenset(
    {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }
)
