"""Convert between padded and packed tensors, under flash-attn's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch, in order. Differentiable; synchronises with the device.

    Padding may be anywhere in a row. Rows without a token become empty entries.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integer; not 0 for a token.
        unused_mask: (batch, seqlen), bool or integer; not 0 for a reserved position, which is packed like a token but
            does not count in ``seqused``.

    Returns:
        hidden_states (total, ...); indices int64 (total,), position of each token in the flattened (batch * seqlen);
        cu_seqlens int32 (batch + 1,); max_seqlen_in_batch, a Python int; seqused int32 (batch,), number of tokens per
        row without reserved positions.

    Raises:
        ValueError: masks that are not (batch, seqlen).

    Source: ``flash_attn.bert_padding`` of flash-attn 2.8.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)} and hidden_states {tuple(hidden_states.shape)}: must be "
                "(batch, seqlen) and (batch, seqlen, ...)"
            )
    used = attention_mask != 0
    packed = used if unused_mask is None else used | (unused_mask != 0)
    lengths = packed.sum(-1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = boundaries_of(lengths)
    longest = int(lengths.max()) if lengths.numel() else 0
    # the gradient of hidden_states[indices] would accumulate with atomics; this one does not, as no row repeats
    tokens = hidden_states.flatten(0, 1).index_select(0, indices)
    return tokens, indices, cu_seqlens, longest, used.sum(-1, dtype=torch.int32)


def boundaries_of(lengths: Tensor) -> Tensor:
    """Return where packed entries of these lengths, int32 (batch,), begin and end: int32 (batch + 1,)."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo ``unpad_input``: put the packed tokens into a padded batch, with 0 elsewhere. Differentiable.

    Args:
        hidden_states: (total, ...).
        indices: int64 (total,), from ``unpad_input``.
        batch, seqlen: shape of the padded batch.

    Returns:
        (batch, seqlen, ...).

    Raises:
        ValueError: the number of indices differs from the number of tokens.
    """
    if indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices have shape {tuple(indices.shape)} and hidden_states {tuple(hidden_states.shape)}: must be "
            "(total,) and (total, ...)"
        )
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))
