"""Divides the rows of a batch among the ranks that share them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from flash_train.attention.parallel import Method, SharedRow, plan_row

PER_TOKEN = ("tokens", "labels", "positions")  # entries of a batch, (batch, seq_len)


def own_part(
    batch: dict[str, Any], lengths: tuple[int, ...], group: ProcessGroup, method: Method = "auto"
) -> tuple[dict[str, Any], SharedRow]:
    """Return this rank's tokens of a batch, and the layout that the attention over them needs.

    The batch is one stream of batch * seq_len tokens, the same on all ranks of the group.

    Args:
        batch: ``tokens``, ``labels`` and maybe ``positions``, each int64 (batch, seq_len).
        lengths: of all documents of the stream.
        group: the ranks that share the batch.
        method: of the attention, as for `shared_attention`.

    Returns:
        The same entries, (1, batch * seq_len / ranks), always with ``positions``; and the shared row.

    Raises:
        ValueError: the ranks do not divide the tokens of the batch.
    """
    tokens = batch["tokens"]
    row = SharedRow(plan_row(lengths, tokens.numel(), group.size()), group, tokens.device, method)
    if batch.get("positions") is None:
        batch = {**batch, "positions": torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)}
    return {name: row.own(batch[name].reshape(-1))[None] for name in PER_TOKEN if name in batch}, row
