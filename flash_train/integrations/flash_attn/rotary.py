"""Rotary position embedding under the names of `flash_attn.layers.rotary`, on any device.

On CUDA a kernel rotates in place (`rotary_kernel`); elsewhere and under `torch.compile` PyTorch's operations do. Both
compute in fp32. The functions share these arguments:

Args:
    cos, sin: (seqlen_rotary, rotary_dim / 2), floating-point: a row for each position. Positions past the last row are
        an error if the host knows them, and otherwise give NaN.
    interleaved: True pairs dimensions (0, 1), (2, 3), ... (GPT-J); False pairs (0, rotary_dim / 2), ... (GPT-NeoX).
    seqlen_offsets: position of the first token, an int or int32 (batch,).

Only the first rotary_dim dimensions turn. Functions whose name ends in ``_`` rotate in place, as ``inplace=True`` does.
Autograd knows about it: PyTorch refuses leaves that require a gradient, which flash-attn overwrites.

Raises:
    ValueError: shapes, dtypes or devices that do not fit together.
    RuntimeError: in place, a leaf that requires a gradient.

Source: RoFormer (Su et al., 2021, arXiv:2104.09864), section 3.2; XPos (Sun et al., 2022, arXiv:2212.10554).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flash_train.attention.checks import integer, integer_tensor
from flash_train.attention.decoding.rotary import rotate
from flash_train.attention.index_tensors import IntegerData, index_tensor
from flash_train.attention.packing import Packing

Part = tuple[int | slice, Tensor, Tensor]  # x[:, :, index] turns by the tables cos and sin


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | IntegerData = 0,
    cu_seqlens: IntegerData | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate x (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with `cu_seqlens`.

    Args:
        cu_seqlens: int32 (batch + 1,), the boundaries of the entries, whose positions all begin at their offset.
            Rows past the last boundary have position 0.
        max_seqlen: not needed.
    """
    _check_shape("x", x, "(batch, seqlen, heads, head_dim)" if cu_seqlens is None else "(total, heads, head_dim)")
    return _rotated(x, [(slice(None), cos, sin)], interleaved, inplace, seqlen_offsets, cu_seqlens)


apply_rotary_emb_func = apply_rotary_emb  # flash-attn's older name


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | IntegerData = 0,
    num_heads_q: int | None = None,
    *,
    cu_seqlens: IntegerData | None = None,
) -> Tensor:
    """Rotate the queries and keys of qkv in place.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or with `num_heads_q` (batch, seqlen, num_heads_q + 2 kv_heads,
            head_dim). With `cu_seqlens` these are packed: (total, ...).
        cos_k, sin_k: tables of the keys, if they differ from the queries'.
        cu_seqlens: as in `apply_rotary_emb`; not in flash-attn.

    Returns:
        qkv.
    """
    rows = "batch, seqlen" if cu_seqlens is None else "total"
    tables_k = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    if num_heads_q is None or qkv.dim() == (5 if cu_seqlens is None else 4):
        _check_shape("qkv", qkv, f"({rows}, 3, heads, head_dim)")
        parts: list[Part] = [(0, cos, sin), (1, *tables_k)]
    else:
        _check_shape("qkv", qkv, f"({rows}, num_heads_q + 2 * kv_heads, head_dim)")
        others = qkv.shape[-2] - num_heads_q
        if others < 2 or others % 2:
            raise ValueError(
                f"num_heads_q={num_heads_q} and qkv has shape {tuple(qkv.shape)}: must be ({rows}, num_heads_q + 2 * "
                "kv_heads, head_dim)"
            )
        end = num_heads_q + others // 2
        if cos_k is None and sin_k is None:
            parts = [(slice(end), cos, sin)]
        else:
            parts = [(slice(num_heads_q), cos, sin), (slice(num_heads_q, end), *tables_k)]
    return _rotated(qkv, parts, interleaved, True, seqlen_offsets, cu_seqlens)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | IntegerData = 0
) -> Tensor:
    """Rotate the keys of kv (batch, seqlen, 2, kv_heads, head_dim) in place, and return kv."""
    _check_shape("kv", kv, "(batch, seqlen, 2, kv_heads, head_dim)")
    return _rotated(kv, [(0, cos, sin)], interleaved, True, seqlen_offsets, None)


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines, and the rotation by them: `flash_attn.layers.rotary.RotaryEmbedding`.

    The tables grow with the longest sequence. They have the dtype of the queries, as in flash-attn. The buffers are not
    in the state dict, as in flash-attn 2.8. If the module is cast, the frequencies are computed again in fp32.

    Args:
        dim: rotary_dim, the number of dimensions that turn.
        base: of the frequencies, ``base ** (-2i / dim)``.
        interleaved: which dimensions are pairs.
        scale_base: if given, XPos also scales queries and keys by powers that grow with ``position / scale_base``.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
        *,
        cu_seqlens: IntegerData | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with `kv`, the queries alone, (batch, seqlen, heads, head_dim).
            kv: (batch, seqlen, 2, kv_heads, head_dim).
            seqlen_offset: position of the first token, an int or int32 (batch,). A tensor needs `max_seqlen`, which
                says how many positions the tables must have, unless they are long enough.
            cu_seqlens: as in `apply_rotary_emb_qkv_`; not with `kv`. Without `max_seqlen` the tables have as many
                positions as qkv has rows.

        Returns:
            qkv, or the queries and kv.
        """
        if kv is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens was given with kv: must be None, or qkv holds queries, keys and values")
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = qkv.shape[0 if cu_seqlens is not None else 1] + seqlen_offset
        if max_seqlen is None and self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor and max_seqlen=None: must be the number of positions")
        self._update_cos_sin_cache(max_seqlen or self._seq_len_cached, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        assert cos is not None and sin is not None
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q, cu_seqlens=cu_seqlens
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        tables_k = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *tables_k, self.interleaved, seqlen_offset)

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor:
        dimensions = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (dimensions + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Compute the tables for positions up to ``seqlen``, unless the present ones serve."""
        old = self._cos_cached
        if (
            old is not None
            and seqlen <= self._seq_len_cached
            and (old.device, old.dtype) == (device, dtype)
            # a backward cannot save tables of inference mode; a compiler cannot ask for the mode
            and (torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not old.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = positions[:, None] * _in_fp32(self.inv_freq, self._compute_inv_freq, device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is not None:
            assert self.scale_base is not None  # the scale was computed because it is given
            # centred, so that the powers stay small; the product of a query and a key does not depend on the centre
            powers = (positions - seqlen // 2) / self.scale_base
            growth = _in_fp32(self.scale, self._compute_scale, device) ** powers[:, None]
            self._cos_k_cached, self._sin_k_cached = (cos / growth).to(dtype), (sin / growth).to(dtype)
            cos, sin = cos * growth, sin * growth
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)


def _in_fp32(buffer: Tensor, compute: Callable[..., Tensor], device: torch.device | str | None) -> Tensor:
    """Return the buffer on the device; compute it again if a cast of the module has rounded it."""
    return buffer.to(device) if buffer.dtype == torch.float32 else compute(device)


def _rotated(
    x: Tensor,
    parts: list[Part],
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | IntegerData,
    cu_seqlens: IntegerData | None,
) -> Tensor:
    """Turn ``x[:, :, index]`` for each part; packed, ``x[:, index]``."""
    for _, cos, sin in parts:
        if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
            raise ValueError(
                f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}: must be equal, (seqlen_rotary, "
                f"rotary_dim / 2), with rotary_dim up to head_dim, {x.shape[-1]}"
            )
        if not cos.is_floating_point() or cos.device != x.device or (sin.dtype, sin.device) != (cos.dtype, cos.device):
            raise ValueError(
                f"cos is {cos.dtype} on {cos.device} and sin {sin.dtype} on {sin.device}: must be floating-point on "
                f"{x.device}"
            )
    positions = _positions(x, seqlen_offsets, cu_seqlens, min(cos.shape[0] for _, cos, _ in parts))
    whole = x if cu_seqlens is None else x[None]
    if _kernel_runs(x):
        from flash_train.integrations.flash_attn import rotary_kernel

        out = rotary_kernel.rotated(whole, parts, positions, interleaved, inplace)
    else:
        out = whole if inplace else whole.clone()
        for index, cos, sin in parts:
            part = out[:, :, index]
            part.copy_(rotate(part, cos, sin, positions, interleaved))
    if inplace:
        return x
    return out if cu_seqlens is None else out[0]


def _kernel_runs(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and x.stride(-1) == 1 and not torch.compiler.is_compiling()


def _positions(x: Tensor, seqlen_offsets: int | IntegerData, cu_seqlens: IntegerData | None, table_rows: int) -> Tensor:
    """Return the position of each token: int64 (batch, seqlen), packed (1, total)."""
    packing = None
    if cu_seqlens is not None:
        boundaries = integer_tensor("cu_seqlens", cu_seqlens, x.device)
        packing = Packing(boundaries, boundaries)
        packing.validate(x.device, x.shape[0])
    batch = x.shape[0] if packing is None else packing.cu_seqlens_q.numel() - 1
    is_tensor = isinstance(seqlen_offsets, Tensor) and seqlen_offsets.dim() > 0
    offset = None if is_tensor else integer(seqlen_offsets)
    if offset is None:
        offsets = index_tensor("seqlen_offsets", seqlen_offsets, (batch,), x.device).long()  # type: ignore[arg-type]
    if packing is None:
        if offset is not None and offset + x.shape[1] > table_rows:
            raise ValueError(f"cos has {table_rows} rows: must have {offset + x.shape[1]}, seqlen_offsets + seqlen")
        steps = torch.arange(x.shape[1], device=x.device)
        return (steps + (offsets[:, None] if offset is None else offset)).expand(batch, -1)
    rows = torch.arange(x.shape[0], device=x.device)
    entry = torch.bucketize(rows, boundaries[1:], right=True).clamp(max=batch - 1)
    positions = rows - boundaries[entry] + (offsets[entry] if offset is None else offset)
    return positions.where(rows < boundaries[-1], 0)[None]


def _check_shape(name: str, x: Tensor, layout: str) -> None:
    sizes = layout.strip("()").split(", ")
    fixed = {i - len(sizes): int(size) for i, size in enumerate(sizes) if size.isdecimal()}
    if x.dim() != len(sizes) or any(x.shape[i] != size for i, size in fixed.items()):
        raise ValueError(f"{name} has shape {tuple(x.shape)}: must be {layout}")
