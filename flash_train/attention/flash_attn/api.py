"""flash-attn 2.8's functions, with its names, arguments, defaults and shapes, on this project's operator.

A program that uses flash-attn changes one import. Each function translates its arguments for ``attention`` or
``cached_attention``, and also takes ``backend`` and ``rng``. They share these arguments:

Args:
    dropout_p: probability of dropping an attention weight, rounded to a multiple of 1/256 (see ``AttentionSpec``).
    softmax_scale: factor on the scores; None is ``1 / sqrt(head_dim)``.
    causal: a query attends to the keys up to its own position. Queries and keys are aligned at their ends: query ``i``
        is at the position of key ``i + seqlen_k - seqlen_q``.
    window_size: (left, right): how many keys before and after its position a query attends to; -1 leaves a side
        unbounded. With ``causal``, right is 0. Any two integers: a tuple, a list, a NumPy array or an integer tensor.
    softcap: if positive, scores become ``softcap * tanh(scores / softcap)``.
    alibi_slopes: (heads,) or (batch, heads), floating-point: the bias ``-slope * abs(i + seqlen_k - seqlen_q - j)``.
        Unlike flash-attn's, they get a gradient if they require one.
    deterministic: require bitwise repeatable gradients. This runs the portable kernels, whose gradients always are
        repeatable; other kernels have repeatable gradients under ``torch.use_deterministic_algorithms``.
    return_attn_probs: return ``(out, softmax_lse, None)``. flash-attn's third value is for its own tests: the weights
        with the dropout mask in their signs, or an empty tensor if ``dropout_p`` is 0. Here it is always None; use
        ``keep_mask`` for the dropout mask.
    cu_seqlens_q, block_table and other indices: int32 tensors on the device of q, or lists of integers.
    backend: as in ``attention``.
    rng: dropout state; None draws one from PyTorch's generator.
    s_aux: sinks, (heads,), as kernels for gpt-oss take them. Only ``flash_attn_func`` and ``flash_attn_varlen_func``
        have this argument.

Returns:
    out (batch, seqlen_q, heads, v_head_dim), packed (total_q, heads, v_head_dim), in the dtype of q; exactly 0 for
    queries that attend to no key. softmax_lse is the natural log-sum-exp of the scores, fp32, (batch, heads, seqlen_q),
    packed (heads, total_q). It differs from flash-attn's in two ways: it is -inf, not +inf, for queries that attend to
    no key; and with causal ALiBi it includes the whole bias, from which flash-attn omits a constant per row.

Raises:
    ValueError, TypeError: the same errors as ``attention``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flash_train.attention.backends import resolve_backend
from flash_train.attention.checks import integer, integer_tensor, integers
from flash_train.attention.decoding.cache_rows import CacheRows, gather_packed
from flash_train.attention.decoding.kvcache import cached_attention
from flash_train.attention.decoding.rotary import rotate
from flash_train.attention.dropout import RngState
from flash_train.attention.functional import attention
from flash_train.attention.index_tensors import IntegerData
from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.attention.masks import Causal, Full, Window
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
    s_aux: Tensor | None = None,
) -> Result:
    """Compute the attention of q (batch, seqlen_q, heads, head_dim) to k, v (batch, seqlen_k, kv_heads, head_dim).

    The module's docstring has the arguments, results and errors.
    """
    spec = spec_of(dropout_p, softmax_scale, causal, window_size, softcap)
    return _attend(q, k, v, spec, None, alibi_slopes, deterministic, return_attn_probs, backend, rng, s_aux)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
) -> Result:
    """Compute the self-attention of qkv (batch, seqlen, 3, heads, head_dim), without copies of q, k and v.

    The module's docstring has the arguments, results and errors.
    """
    q, k, v = _split_packed("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        backend=backend, rng=rng,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
) -> Result:
    """Compute the attention of q (batch, seqlen_q, heads, head_dim) to kv (batch, seqlen_k, 2, kv_heads, head_dim).

    The module's docstring has the arguments, results and errors.
    """
    k, v = _split_packed("kv", kv, "(batch, seqlen, 2, kv_heads, head_dim)")
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        backend=backend, rng=rng,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: IntegerData,
    cu_seqlens_k: IntegerData,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: IntegerData | None = None,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
    s_aux: Tensor | None = None,
) -> Result:
    """Compute the attention of packed q (total_q, heads, head_dim) to packed k, v (total_k, kv_heads, head_dim).

    Each entry of q attends to its own entry of k and v.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), the boundaries of the entries.
        max_seqlen_q, max_seqlen_k: length of the longest entry, or None. A tensor is not read and counts as None.
        block_table: int32 (batch, blocks per entry): k and v are pages (num_blocks, page_size, kv_heads, head_dim) of
            any page size. They are first copied to packed tensors of ``batch * max_seqlen_k`` rows, and get gradients.
            For decoding use ``flash_attn_with_kvcache``, which does not copy.
    """
    packing = _packing(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    pages = integer_tensor("block_table", block_table, q.device)
    if pages is not None:
        k, v = _copy_pages(q, k, v, packing, pages)
    spec = spec_of(dropout_p, softmax_scale, causal, window_size, softcap)
    return _attend(q, k, v, spec, packing, alibi_slopes, deterministic, return_attn_probs, backend, rng, s_aux)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: IntegerData,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
) -> Result:
    """Compute the self-attention of packed qkv (total, 3, heads, head_dim); see ``flash_attn_varlen_func``.

    The module's docstring has the arguments, results and errors.
    """
    q, k, v = _split_packed("qkv", qkv, "(total, 3, heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        backend=backend, rng=rng,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: IntegerData,
    cu_seqlens_k: IntegerData,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
) -> Result:
    """Compute the attention of packed q (total_q, heads, head_dim) to packed kv (total_k, 2, kv_heads, head_dim).

    The module's docstring has the arguments, results and errors.
    """
    k, v = _split_packed("kv", kv, "(total, 2, kv_heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        backend=backend, rng=rng,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: IntegerData | int | None = None,
    cache_batch_idx: IntegerData | None = None,
    cache_leftpad: IntegerData | None = None,
    block_table: IntegerData | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    backend: str = "auto",
    rng: RngState | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into the cache, in place, and attend to the whole cache. No gradients.

    The caches have the shapes of ``cached_attention``, which also has trees, sinks and dropout.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_new, kv_heads, head_dim): written from position ``cache_seqlens`` on. Without them the
            cache is only read.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), for any even rotary_dim up to head_dim; only with k and v.
            New key ``i`` is rotated by row ``cache_seqlens + i``. So is query ``i`` with ``causal`` or a window;
            without them, all queries are rotated by row ``cache_seqlens``.
        cache_seqlens: int32 (batch,) or an int: how many positions of each cache row are filled, including
            ``cache_leftpad``; required with k and v. None is the capacity. A row with a negative length, or with a
            negative page for its last key, is padding: output 0, nothing written.
        cache_batch_idx, cache_leftpad, block_table, num_splits: as in ``cached_attention``. Pages may have any size
            and can be combined with ``cache_leftpad``.
        causal, window_size: aligned at the end of the keys, including the new keys.
        rotary_interleaved: True rotates dimensions (0, 1), (2, 3), ...; False (0, rotary_dim / 2), ...
        return_softmax_lse: also return the log-sum-exp, (batch, heads, seqlen_q).
        backend: as in ``cached_attention``.
        rng: ignored, since there is no dropout; present so that all functions of this module take the same options.

    Returns:
        out (batch, seqlen_q, heads, v_head_dim), and the log-sum-exp if requested.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing has been written then.
    """
    spec = spec_of(0.0, softmax_scale, causal, window_size, softcap)
    n_splits = integer(num_splits)
    length = None if isinstance(cache_seqlens, Tensor) else integer(cache_seqlens)
    lengths = cache_seqlens if length is None else length
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("one of rotary_cos and rotary_sin was given: must be both, or neither")
    if rotary_cos is not None and rotary_sin is not None:
        if k is None or lengths is None:
            raise ValueError(
                "rotary_cos was given without k, v and cache_seqlens: only new keys and their queries can be rotated"
            )
        rows = CacheRows.of_call(q, k_cache, v_cache, lengths, cache_batch_idx, cache_leftpad, block_table)
        first = rows.lengths.masked_fill(rows.padding(k_cache, k.shape[1]), 0)[:, None]  # padding has no position
        steps = torch.arange(max(q.shape[1], k.shape[1]), device=q.device)
        q_steps = torch.zeros_like(steps) if isinstance(spec.mask, Full) else steps
        q = rotate(q, rotary_cos, rotary_sin, first + q_steps[: q.shape[1]], rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, first + steps[: k.shape[1]], rotary_interleaved)
    out, lse = cached_attention(
        q,
        k_cache,
        v_cache,
        lengths,
        spec,
        k=k,
        v=v,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits if n_splits is None else n_splits,
        backend=backend,
        rng=rng,
    )
    return (out, lse) if return_softmax_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    packing: Packing | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    backend: str,
    rng: RngState | None,
    sinks: Tensor | None,
) -> Result:
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        head_dim = max(q.shape[-1], v.shape[-1])
        name, _ = resolve_backend(backend, device=q.device, dtype=q.dtype, head_dim=head_dim, spec=spec)
        backend = PORTABLE.name if name == "flash" else backend
        if (name in FAMILIES and not FAMILIES[name].repeatable) or (name == "sdpa" and q.is_cuda):
            raise ValueError(
                f"deterministic=True, and backend={name} gives repeatable gradients only under "
                "torch.use_deterministic_algorithms(True): call that, or use backend=flash"
            )
    call = partial(
        attention, q, k, v, spec, packing=packing, rng=rng, alibi_slopes=alibi_slopes, sinks=sinks, backend=backend
    )
    return (*call(return_lse=True), None) if return_attn_probs else call()


def spec_of(
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float
) -> AttentionSpec:
    """Translate flash-attn's arguments; in `window_size`, negative is no bound."""
    bounds = integers(window_size)
    if bounds is None or len(bounds) != 2:
        raise ValueError(f"window_size={window_size!r}: must be two integers (left, right), -1 for no bound")
    left, right = (None if bound < 0 else bound for bound in bounds)
    if causal:
        right = 0
    if left is None and right in (None, 0):
        return AttentionSpec(Full() if right is None else Causal(), softmax_scale, softcap, dropout_p)
    return AttentionSpec(Window(left, right), softmax_scale, softcap, dropout_p)


def _packing(
    q: Tensor, cu_seqlens_q: IntegerData, cu_seqlens_k: IntegerData, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> Packing:
    longest_q, longest_k = (None if isinstance(x, Tensor) else integer(x) for x in (max_seqlen_q, max_seqlen_k))
    cu_q = integer_tensor("cu_seqlens_q", cu_seqlens_q, q.device)
    cu_k = cu_q if cu_seqlens_k is cu_seqlens_q else integer_tensor("cu_seqlens_k", cu_seqlens_k, q.device)
    return Packing(cu_q, cu_k, longest_q, longest_k)


def _split_packed(name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Return q, k, v or k, v as views of one tensor, so that their gradients are stacked only once."""
    parts = len(name)
    if packed.dim() != layout.count(",") + 1 or packed.shape[-3] != parts:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}: must be {layout}")
    return packed.unbind(-3)


def _copy_pages(q: Tensor, k: Tensor, v: Tensor, packing: Packing, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Copy k and v of ``flash_attn_varlen_func`` from pages into packed tensors."""
    packing.validate(q.device, q.shape[0])
    for name, pages in (("k", k), ("v", v)):
        if pages.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(pages.shape)}: must be (num_blocks, page_size, kv_heads, head_dim) with "
                "block_table"
            )
    batch = packing.cu_seqlens_k.numel() - 1
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table is {block_table.dtype} of shape {tuple(block_table.shape)}: must be int32 ({batch}, blocks "
            "per entry)"
        )
    k, v = (gather_packed(pages, packing.cu_seqlens_k, packing.max_seqlen_k, block_table) for pages in (k, v))
    return k, v
