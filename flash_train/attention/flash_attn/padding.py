"""Convert between padded and packed tensors, under flash-attn's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_train.attention.rows import put_rows, take_rows
from flash_train.attention.tracing import has_no_values


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Take some rows of a tensor. Differentiable; the backward writes each row once, and adds nothing up.

    Args:
        input: (rows, ...).
        indices: int64 (total,), distinct. The gradient of a row that repeats would have one summand only, as in
            flash-attn; ``input[indices]`` adds them up.

    Returns:
        (total, ...).

    Raises:
        ValueError: indices that are not (total,); on the CPU, rows that repeat, if ``input`` needs a gradient.
    """
    if indices.dim() != 1:
        raise ValueError(f"indices have shape {tuple(indices.shape)}: must be (total,)")
    needs_gradient = input.requires_grad and torch.is_grad_enabled()
    if needs_gradient and indices.device.type == "cpu" and not has_no_values(indices):
        repeated = indices.numel() - indices.unique().numel()
        if repeated:
            raise ValueError(f"{repeated} of {indices.numel()} indices repeat a row: must be distinct for the gradient")
    return take_rows(input, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Write values into some rows of a new tensor, which is 0 elsewhere. Differentiable.

    Args:
        values: (total, ...).
        indices: int64 (total,), distinct.
        first_axis_dim: number of rows.

    Returns:
        (first_axis_dim, ...).

    Raises:
        ValueError: the number of indices differs from the number of values.
    """
    if indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices have shape {tuple(indices.shape)} and values {tuple(values.shape)}: must be (total,) and "
            "(total, ...)"
        )
    return put_rows(values, indices, first_axis_dim)


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
    tokens = take_rows(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a padded batch whose rows hold several sequences each. Differentiable; synchronises with the device.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: integer (batch, seqlen): the lengths of a row's sequences, which lie one after the
            other from the row's beginning, and 0. Only the order of the lengths counts: [2, 3, 0, 0, 0, 0] is a row
            with a sequence of 2 tokens, one of 3, and padding.

    Returns:
        hidden_states (total, ...); indices int64 (total,), position of each token in the flattened (batch * seqlen);
        cu_seqlens int32 (sequences + 1,); max_seqlen_in_batch, a Python int.

    Raises:
        ValueError: lengths that are not (batch, seqlen) or not integers, or a row whose lengths exceed ``seqlen``.

    Source: ``flash_attn.bert_padding`` of flash-attn 2.8; its issue 432 has the motivation.
    """
    lengths, shape = attention_mask_in_length, hidden_states.shape[:2]
    if lengths.shape != shape or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"attention_mask_in_length is {lengths.dtype} of shape {tuple(lengths.shape)} and hidden_states has shape "
            f"{tuple(hidden_states.shape)}: must be integers (batch, seqlen), and (batch, seqlen, ...)"
        )
    totals, found = lengths.sum(-1), lengths[lengths != 0]
    longest, most = (int(x.max()) if x.numel() else 0 for x in (found, totals))
    if most > shape[1]:
        raise ValueError(f"a row of attention_mask_in_length has {most} tokens: must be at most seqlen, {shape[1]}")
    tokens = torch.arange(shape[1], device=lengths.device) < totals[:, None]
    indices = tokens.flatten().nonzero().flatten()
    return take_rows(hidden_states.flatten(0, 1), indices), indices, boundaries_of(found), longest


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
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
