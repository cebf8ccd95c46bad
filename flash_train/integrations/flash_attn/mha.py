"""Multi-head attention with the names and weights of `flash_attn.modules.mha`, over this project's operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_train.attention import (
    AttentionSpec,
    Causal,
    Document,
    Full,
    Mask,
    Window,
    attention,
    flash_attn_with_kvcache,
)
from flash_train.integrations.flash_attn.inner_attention import (
    FlashCrossAttention,
    FlashSelfAttention,
    get_alibi_slopes,
)
from flash_train.integrations.flash_attn.rotary import RotaryEmbedding

__all__ = ["MHA", "FlashCrossAttention", "FlashSelfAttention", "InferenceParams", "get_alibi_slopes"]


@dataclass
class InferenceParams:
    """The caches of all layers in a generation: `flash_attn.utils.generation.InferenceParams`.

    Attributes:
        max_seqlen: positions of a row of the caches.
        max_batch_size: rows of the caches.
        seqlen_offset: how many positions are filled; the caller advances it after each step.
        batch_size_offset: first row of the caches that a call uses.
        key_value_memory_dict: each layer's cache, by its `layer_idx`.
        lengths_per_sample: int32 (batch,): how many positions of each row are filled, instead of `seqlen_offset`.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin another generation with caches that are kept."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


class MHA(nn.Module):
    """Multi-head attention: the arguments, results and state dict of `flash_attn.modules.mha.MHA`.

    Args:
        embed_dim, num_heads, num_heads_kv: widths; `num_heads_kv` for grouped queries.
        cross_attn: project queries and keys from different inputs (`Wq`, `Wkv` instead of `Wqkv`).
        qkv_proj_bias, out_proj_bias: whether the projections have biases.
        dropout: of attention weights, in training.
        softmax_scale, causal, window_size: as in `flash_train.attention.flash_attn.api`.
        layer_idx: number of the layer, needed for `inference_params`.
        dwconv: must be False.
        rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: see `RotaryEmbedding`; 0 for
            none. Not with `cross_attn`.
        use_alibi: add the biases of `get_alibi_slopes`.
        fused_bias_fc, use_flash_attn: without effect. One operator computes all calls.
        return_residual: also return the input.
        checkpointing: compute attention again in the backward, instead of keeping its tensors.
        backend: of `flash_train.attention.attention`; not in flash-attn.

    Raises:
        ValueError: arguments that do not fit together, or dwconv.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if dwconv:
            raise ValueError("dwconv=True: must be False, since this MHA has no convolutions; add nn.Conv1d around it")
        if cross_attn and rotary_emb_dim:
            raise ValueError(f"rotary_emb_dim={rotary_emb_dim} with cross_attn=True: must be 0")
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim}: must be a multiple of num_heads, {num_heads}")
        if num_heads % self.num_heads_kv:
            raise ValueError(f"num_heads={num_heads}: must be a multiple of num_heads_kv, {num_heads_kv}")
        self.embed_dim, self.head_dim = embed_dim, embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.rotary_emb_dim, self.return_residual, self.checkpointing = rotary_emb_dim, return_residual, checkpointing
        if rotary_emb_dim:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        kv_dim = 2 * self.num_heads_kv * self.head_dim
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, qkv_proj_bias, device, dtype)
            self.Wkv = nn.Linear(embed_dim, kv_dim, qkv_proj_bias, device, dtype)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, qkv_proj_bias, device, dtype)
        slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
        inner: dict[str, Any] = {"window_size": window_size, "alibi_slopes": slopes, "backend": backend}
        self.inner_attn = FlashSelfAttention(causal, softmax_scale, dropout, **inner)
        self.inner_cross_attn = FlashCrossAttention(causal, softmax_scale, dropout, **inner)
        self.out_proj = nn.Linear(embed_dim, embed_dim, out_proj_bias, device, dtype)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: InferenceParams | None = None,
        *,
        causal: bool | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend. Queries that see no key have the bias of `out_proj` as their result.

        Args:
            x: (batch, seqlen, embed_dim); with `cu_seqlens` (total, embed_dim).
            x_kv: the input of keys and values, with `cross_attn` only; None: x.
            key_padding_mask: bool (batch, keys), True for a key that counts.
            cu_seqlens: int32 (batch + 1,), the boundaries of packed entries. Rotary positions begin at 0 in each.
            max_seqlen: length of the longest entry; not needed. With rotary positions it keeps the tables short.
            mixer_subset: which positions of x are queries, a slice or an index tensor, with `cross_attn` only.
            inference_params: caches of keys and values, which the call extends; flash-attn's own object serves, too.
                No gradients.
            causal: replaces the module's own.
            cu_seqlens_k, max_seqlen_k: of a packed `x_kv`.

        Returns:
            (batch, seqlen, embed_dim) or (total, embed_dim); with `return_residual` also x.

        Raises:
            ValueError: arguments that do not fit together.
        """
        self._check_call(x_kv, key_padding_mask, cu_seqlens, mixer_subset, inference_params)
        if self.cross_attn:
            queries = x if mixer_subset is None else x[:, mixer_subset]
            q = self.Wq(queries).unflatten(-1, (self.num_heads, self.head_dim))
            kv = self.Wkv(x if x_kv is None else x_kv).unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        else:
            qkv = self.Wqkv(x).unflatten(-1, (-1, self.head_dim))
            if self.rotary_emb_dim:
                qkv = self._rotated(qkv, cu_seqlens, max_seqlen, inference_params)
            q, kv = qkv.split((self.num_heads, 2 * self.num_heads_kv), -2)
            kv = kv.unflatten(-2, (2, self.num_heads_kv))
        if cu_seqlens_k is None and x_kv is None:
            cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
        if inference_params is not None:
            context = self._attend_to_cache(q, kv, inference_params, causal)
        elif key_padding_mask is not None:
            context = self._run(self._attend_to_unmasked, q, kv, key_padding_mask, causal)
        elif self.cross_attn or self.num_heads != self.num_heads_kv:
            lengths = (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k)
            context = self._run(self.inner_cross_attn, q, kv, causal, *lengths)
        else:
            context = self._run(self.inner_attn, qkv.unflatten(-2, (3, -1)), causal, cu_seqlens, max_seqlen)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty cache of keys and values, (batch_size, max_seqlen, 2, num_heads_kv, head_dim)."""
        weight = self.out_proj.weight
        size = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(size, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _check_call(
        self,
        x_kv: Tensor | None,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        mixer_subset: Any,
        inference_params: InferenceParams | None,
    ) -> None:
        given = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens, "inference_params": inference_params}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} were given: must be at most one")
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("x_kv or mixer_subset was given with cross_attn=False: must be None")
        if inference_params is not None and self.layer_idx is None:
            raise ValueError("inference_params was given to a module with layer_idx=None: must be the layer's number")
        if inference_params is not None and self.inner_cross_attn.dropout > 0:
            raise ValueError("inference_params was given in training with dropout: call eval() before")

    def _rotated(
        self, qkv: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, cache: InferenceParams | None
    ) -> Tensor:
        """Rotate queries and keys of (..., num_heads + 2 num_heads_kv, head_dim)."""
        offset: int | Tensor = 0
        if cache is not None:
            offset, max_seqlen = _filled(cache, qkv.shape[0]), cache.max_seqlen
        return self.rotary_emb(qkv, None, offset, max_seqlen, self.num_heads, cu_seqlens=cu_seqlens)

    def _run(self, attend: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self.checkpointing:
            return checkpoint(attend, *arguments, use_reentrant=False)
        return attend(*arguments)

    def _attend_to_unmasked(self, q: Tensor, kv: Tensor, counts: Tensor, causal: bool | None) -> Tensor:
        """Attend to the keys that count, by a mask instead of unpadding, so the host need not wait for the device."""
        inner = self.inner_cross_attn
        options = inner.options(causal)
        left, right = (None if bound < 0 else bound for bound in inner.window_size)
        mask: Mask = Causal() if options["causal"] else Full()
        mask = mask if left is right is None else mask & Window(left, right)
        if self.cross_attn and not isinstance(mask, Full):
            raise ValueError(
                "key_padding_mask was given to causal or windowed cross-attention: must be None, since padding moves "
                "the diagonal; give packed tensors with cu_seqlens and cu_seqlens_k"
            )
        if counts.shape != kv.shape[:2]:
            raise ValueError(f"key_padding_mask has shape {tuple(counts.shape)}: must be {tuple(kv.shape[:2])}")
        ids_q = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
        mask = mask & Document(ids_q, (counts == 0).to(torch.int32))
        spec = AttentionSpec(mask, inner.softmax_scale, dropout=inner.dropout)
        k, v = kv.unbind(-3)
        return attention(q, k, v, spec, alibi_slopes=inner.alibi_slopes, backend=inner.backend)

    def _attend_to_cache(self, q: Tensor, kv: Tensor, cache: InferenceParams, causal: bool | None) -> Tensor:
        """Write the new keys and values into the layer's cache, and attend to all of it."""
        caches, rows = cache.key_value_memory_dict, q.shape[0]
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(cache.max_batch_size, cache.max_seqlen, kv.dtype)
        k_cache, v_cache = caches[self.layer_idx][cache.batch_size_offset :][:rows].unbind(2)
        options = self.inner_cross_attn.options(causal)
        del options["dropout_p"], options["deterministic"]  # a cache has neither
        k, v = kv.unbind(2)
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=_filled(cache, rows), **options)
        return cast(Tensor, out)


def _filled(cache: InferenceParams, rows: int) -> int | Tensor:
    """Return how many positions of the cache are filled, for all rows or for each."""
    lengths = cache.lengths_per_sample
    return cache.seqlen_offset if lengths is None else lengths[:rows]
