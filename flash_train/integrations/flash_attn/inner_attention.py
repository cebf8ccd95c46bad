"""The attention inside `MHA`: the two modules of `flash_attn.modules.mha` without projections, and ALiBi's slopes."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from flash_train.attention import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_train.attention.backends import backend_names
from flash_train.checks import check_name


def get_alibi_slopes(nheads: int) -> list[float]:
    """Return the slopes of ALiBi (Press et al., 2022, arXiv:2108.12409), one for each head.

    A power of two has the slopes ``2 ** (-8 i / nheads)``. Other numbers add every other slope of the next power.
    """
    power = 2 ** (nheads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return (slopes + [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)])[:nheads]


class _InnerAttention(nn.Module):
    """What both modules hold. Dropout acts in training only, as `nn.Dropout` does."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: tuple[int, int],
        alibi_slopes: Tensor | None,
        deterministic: bool,
        backend: str,
    ) -> None:
        super().__init__()
        check_name("backend", backend, backend_names())
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic
        self.backend = backend

    @property
    def dropout(self) -> float:
        return self.drop.p if self.training else 0.0

    def options(self, causal: bool | None) -> dict[str, Any]:
        """Return the arguments that all functions of flash-attn share."""
        return {
            "dropout_p": self.dropout,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
            "backend": self.backend,
        }


class FlashSelfAttention(_InnerAttention):
    """Attention of packed queries, keys and values: `flash_attn.modules.mha.FlashSelfAttention`.

    Args:
        causal, softmax_scale, window_size, alibi_slopes, deterministic: as in `flash_train.attention.flash_attn.api`.
        attention_dropout: probability of dropping a weight in training.
        backend: of `flash_train.attention.attention`; not in flash-attn.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic, backend)

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Attend.

        Args:
            qkv: (batch, seqlen, 3, heads, head_dim); with `cu_seqlens` (total, 3, heads, head_dim).
            causal: replaces the module's own.
            cu_seqlens: int32 (batch + 1,), the boundaries of packed entries.
            max_seqlen: not needed.

        Returns:
            (batch, seqlen, heads, head_dim), or (total, heads, head_dim).
        """
        options = self.options(causal)
        if cu_seqlens is None:
            return cast(Tensor, flash_attn_qkvpacked_func(qkv, **options))
        return cast(Tensor, flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options))


class FlashCrossAttention(_InnerAttention):
    """Attention of queries to packed keys and values: `flash_attn.modules.mha.FlashCrossAttention`.

    It takes the arguments of `FlashSelfAttention`. As in flash-attn, `alibi_slopes` precedes `window_size`.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic, backend)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            q: (batch, seqlen_q, heads, head_dim); with `cu_seqlens` (total_q, heads, head_dim).
            kv: (batch, seqlen_k, 2, kv_heads, head_dim); with `cu_seqlens_k` (total_k, 2, kv_heads, head_dim).
            causal: replaces the module's own. Queries and keys are aligned at their ends.
            cu_seqlens, cu_seqlens_k: int32 (batch + 1,), the boundaries of packed entries, both or neither.
            max_seqlen, max_seqlen_k: not needed.

        Returns:
            (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim).

        Raises:
            ValueError: one of `cu_seqlens` and `cu_seqlens_k` without the other.
        """
        if (cu_seqlens is None) != (cu_seqlens_k is None):
            raise ValueError("one of cu_seqlens and cu_seqlens_k was given: must be both, or neither")
        options = self.options(causal)
        if cu_seqlens is None or cu_seqlens_k is None:
            return cast(Tensor, flash_attn_kvpacked_func(q, kv, **options))
        lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        return cast(Tensor, flash_attn_varlen_kvpacked_func(q, kv, *lengths, **options))
