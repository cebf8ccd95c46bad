"""`torch.nn.MultiheadAttention` over this project's attention operator."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.attention import AttentionSpec, Causal, Document, Full, Packing, attention, unpad_input
from flash_train.attention.backends import backend_names
from flash_train.attention.rows import take_rows
from flash_train.attention.tracing import has_no_values
from flash_train.attention.transforms import transforming
from flash_train.checks import check_name


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` without a matrix of all pairs: same arguments, results and names in a state dict.

    Pass ``need_weights=False``: with PyTorch's default, True, the result includes this matrix.
    `nn.TransformerEncoderLayer` passes it, and can use this class: ``layer.self_attn = MultiheadAttention(...)``.

    The operator computes full attention, with `key_padding_mask`, and causal attention (`is_causal=True`), both with
    dropout. PyTorch's own forward computes the rest, which needs all pairs or has them as its argument: `need_weights`,
    other masks, causal attention with padding, padding masks with numbers other than 0 and -inf, `add_bias_kv`,
    `add_zero_attn`, and nested tensors that are not jagged. In a compiled or exported program it computes all padding
    masks of numbers, because their values are not known there.

    Args:
        backend: of `flash_train.attention.attention`.
        others: as in `torch.nn.MultiheadAttention`.

    Raises:
        ValueError: an unknown backend, or a dropout that `AttentionSpec` refuses; from `forward`, shapes that do not
            fit, and ``is_causal=True`` without `attn_mask`, as in PyTorch.
    """

    def __init__(self, *arguments, backend: str = "auto", **options) -> None:
        super().__init__(*arguments, **options)
        check_name("backend", backend, backend_names())
        AttentionSpec(dropout=self.dropout)  # raises for a rate that attention does not have
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: see `torch.nn.MultiheadAttention.forward`.

        Args:
            query: (seq_len, batch, width), with `batch_first` (batch, seq_len, width), or without a batch.
            key, value: likewise; the lengths and widths may differ from the query's.
            key_padding_mask: bool (batch, keys), True where a key is ignored; or in floating point, -inf where a key is
                ignored and 0 elsewhere, as `nn.TransformerEncoderLayer` passes it.
            need_weights: also return the weights of all pairs. PyTorch computes them.
            attn_mask: for `is_causal` PyTorch wants the causal mask, too; it is not read.

        Returns:
            The output, in the query's layout, and None or the weights.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True without attn_mask: must have the causal mask, as in PyTorch")
        ignored, masked = None, key_padding_mask is not None
        if (
            need_weights
            or (attn_mask is not None and not is_causal)
            or (is_causal and (masked or query.shape != key.shape))
            or self.bias_k is not None
            or self.add_zero_attn
            or (query.is_nested and query.layout != torch.jagged)
            or (masked and (ignored := _ignored_keys(key_padding_mask)) is None)  # last, as it reads a mask of numbers
        ):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check_shapes(query, key, value, ignored)
        has_batch = query.dim() == 3
        if not has_batch:
            query, key, value = (x[None] for x in (query, key, value))
            ignored = None if ignored is None else ignored[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value)
        out = self.out_proj(self._attend(q, k, v, ignored, is_causal).flatten(-2))
        if not has_batch:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor, ignored: Tensor | None) -> None:
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.dim() not in (2, 3) or x.shape[-1] != width:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: must have two or three dimensions, the last {width}"
                )
            if x.dim() != query.dim():
                raise ValueError(f"{name} has {x.dim()} dimensions and query {query.dim()}: must be equal")
        if ignored is not None:
            keys = key.shape[:-1] if key.dim() == 2 or self.batch_first else key.shape[1::-1]
            if ignored.shape != keys:
                raise ValueError(f"key_padding_mask has shape {tuple(ignored.shape)}: must be {tuple(keys)}")

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Project to heads: (batch, seq_len, heads, head_dim)."""
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = zip((query, key, value), weights, biases, strict=True)
        return [F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)) for x, weight, bias in inputs]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, is_causal: bool) -> Tensor:
        spec = AttentionSpec(Causal() if is_causal else Full(), dropout=self.dropout if self.training else 0.0)
        batch, length = q.shape[:2]
        if ignored is None or batch == 0:
            return attention(q, k, v, spec, backend=self.backend)
        if has_no_values(q) or transforming():  # unpadding reads how many keys there are
            ids = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
            mask = Document(ids, ignored.to(torch.int32))
            return attention(q, k, v, replace(spec, mask=mask), backend=self.backend)
        used = ~ignored
        k, rows, boundaries_k, *_ = unpad_input(k, used)
        v = take_rows(v.flatten(0, 1), rows)
        boundaries_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        packing = Packing(boundaries_q, boundaries_k)
        return attention(q.flatten(0, 1), k, v, spec, packing=packing, backend=self.backend).view(q.shape)


def _ignored_keys(mask: Tensor | None) -> Tensor | None:
    """Return a padding mask as bool, True where a key is ignored; None if it may have other numbers than 0 and -inf."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if has_no_values(mask):
        return None
    ignored = mask == float("-inf")
    return ignored if bool((ignored | (mask == 0)).all()) else None
