"""Packed batches: the documents in their rows, as the model needs them."""

from collections.abc import Mapping
from typing import Any

import torch

from flash_train.attention import Packing
from flash_train.attention.backends import flash_unavailable
from flash_train.attention.kernels.families import is_own
from flash_train.checks import brief

Batch = dict[str, Any]
"""`tokens`, `labels` and, for packed rows, `positions`, `cu_seqlens` and `lengths` (see `flash_train.data.dataset`)."""


PACKED = ("positions", "cu_seqlens", "lengths")  # the entries of packed rows


def check_batch(batch: Any, *needed: str) -> None:
    """Refuse a batch without what training needs.

    Raises:
        TypeError: it is not a dictionary, or its lengths are a tensor.
        ValueError: it lacks an entry in `needed`, or has only some of the entries of packed rows.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch={brief(batch)}: must be a dictionary with {' and '.join(needed)}")
    if missing := [name for name in needed if name not in batch]:
        raise ValueError(f"batch: has {', '.join(map(str, batch))}: must also have {' and '.join(missing)}")
    if not ("cu_seqlens" in batch or "lengths" in batch):
        return
    if missing := [name for name in PACKED if name not in batch]:
        given = [name for name in PACKED if name in batch]
        raise ValueError(
            f"batch: has {' and '.join(given)} without {' and '.join(missing)}: packed rows need "
            f"{', '.join(PACKED)}, and plain rows have neither cu_seqlens nor lengths"
        )
    if isinstance(batch["lengths"], torch.Tensor):
        raise TypeError("batch: lengths is a tensor: must be Python ints, lengths.tolist(), since the host reads them")


def document_layout(batch: Batch, *, on_device: bool) -> dict[str, Any]:
    """Return the model's arguments `positions` and `packing`; packing is None for a batch of plain rows.

    Args:
        on_device: leave out the lengths on the host. `torch.compile` would specialise on every batch's lengths, and
            this project's kernels read the boundaries on the device.
    """
    if "cu_seqlens" not in batch:
        return {"positions": batch.get("positions"), "packing": None}
    boundaries = batch["cu_seqlens"]
    packing = Packing(boundaries, boundaries, lengths=None if on_device else batch["lengths"])
    return {"positions": batch["positions"], "packing": packing}


def document_lengths(batch: Batch) -> tuple[int, ...]:
    """Return the lengths of all documents of a batch, as Python ints; each row of a plain batch is one document."""
    batch_size, seq_len = batch["tokens"].shape
    return batch.get("lengths", (seq_len,) * batch_size)


def uses_own_kernels(attention: str, device: torch.device, head_dim: int) -> bool:
    """Whether this backend runs this project's kernels on the device; for `auto`, whether it chooses them there."""
    if attention == "auto":
        return flash_unavailable(device, torch.float16, head_dim) is None
    return is_own(attention)
