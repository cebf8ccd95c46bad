"""This project's attention in models of `transformers`: one line before the model is loaded.

    from flash_train.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=register())

Padded batches are unpadded for attention. Packed rows are found by their `position_ids`, or given by `cu_seq_lens_q`
and `cu_seq_lens_k`. Where the documents are is found once for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_train.attention import AttentionSpec, Causal, Full, Packing, Window, attention, pad_input
from flash_train.attention.backends import backend_names
from flash_train.attention.flash_attn.padding import boundaries_of
from flash_train.attention.rows import take_rows
from flash_train.checks import check_name

if TYPE_CHECKING:
    from torch import nn

# transformers takes any name with "flash" for a kernel of its hub
NAME = "fused_triton"


def register(name: str = NAME, *, backend: str = "auto") -> str:
    """Add this project's attention to `transformers`, and return the name for `attn_implementation`.

    It supports causal and bidirectional attention, sliding windows, softcap, sinks, grouped queries, dropout, values
    with another head dimension, padding on either side, packed rows, and caches of keys and values. It returns no
    attention weights (`output_attentions`), and takes no masks with four dimensions.

    Args:
        name: must not contain "flash", which `transformers` takes for a kernel of its hub.
        backend: of `flash_train.attention.attention`; auto takes this project's kernels where they run.

    Raises:
        ValueError: a name that cannot be used, or an unknown backend.
        ImportError: `transformers` is not installed.
    """
    if "flash" in name or not name:
        raise ValueError(f"name={name!r}: must not be empty or contain 'flash', which transformers keeps for its hub")
    check_name("backend", backend, backend_names())
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, partial(attention_forward, backend=backend))
    AttentionMaskInterface.register(name, padding_mask)
    return name


def padding_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    cache_position: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return which keys are tokens, bool (batch, keys), or None if all are: a mask function of `transformers`.

    A cache of fixed size has more keys than have been seen; the mask is then only as long as these. The first releases
    of transformers 5 give the queries' positions as `cache_position`, later ones as `q_offset` and `q_length`.

    Raises:
        NotImplementedError: the model adds a mask of its own to the causal one.
    """
    if use_vmap:
        raise NotImplementedError(
            "this model combines its causal mask with another one, which only attn_implementation=sdpa or eager can do"
        )
    if q_length is None:
        assert cache_position is not None
        q_length, q_offset = len(cache_position), cache_position[0]
    seen = int(q_offset) + q_length - kv_offset  # reads a tensor if the cache has a fixed size
    if attention_mask is None:
        if seen >= kv_length:
            return None
        device = q_offset.device if isinstance(q_offset, Tensor) else None
        return torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    mask = attention_mask[:, -kv_length:].bool()
    return None if mask.shape[1] == kv_length and bool(mask.all()) else mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    packing: Packing | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend: an attention function of `transformers`.

    Args:
        query, key, value: (batch, heads, seqlen, head_dim); key and value may have fewer heads.
        attention_mask: bool (batch, keys), which keys are tokens; None: all.
        s_aux: sinks, (heads,).
        position_ids: (batch, seqlen) or (1, seqlen); where they do not go up by 1, another document begins.
        cu_seq_lens_q, cu_seq_lens_k: int (documents + 1,), the documents' boundaries in the flattened batch.
        packing: the same boundaries, as `flash_train.attention` takes them.

    Returns:
        (batch, seqlen, heads, head_dim of the values), and None in the place of the attention weights.

    Raises:
        ValueError: options that this attention does not support.
    """
    if options.get("output_attentions"):
        raise ValueError("output_attentions=True: must be False, or the model needs attn_implementation='eager'")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: must be (batch, seqlen); masks with four "
            "dimensions need attn_implementation='sdpa'"
        )
    q, k, v = (x.transpose(1, 2) for x in _in_one_dtype(module, query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    spec = AttentionSpec(_mask(causal, sliding_window), scaling, softcap or 0.0, dropout)
    batch, length = q.shape[:2]
    if attention_mask is not None:
        k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
        found = _once(attention_mask, length, lambda: Unpadded.of(attention_mask, length))
        q, k, v = (take_rows(x.flatten(0, 1), rows) for x, rows in ((q, found.q), (k, found.k), (v, found.k)))
        out = attention(q, k, v, spec, packing=found.packing, sinks=s_aux, backend=backend)
        return pad_input(out, found.q, batch, length), None
    if packing is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        packing = Packing(cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32))
    elif packing is None and position_ids is not None and length == k.shape[1] > 1:
        packing = _once(position_ids, batch, lambda: packing_of(position_ids, batch))
    if packing is None:
        return attention(q, k, v, spec, sinks=s_aux, backend=backend), None
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = attention(q, k, v, spec, packing=packing, sinks=s_aux, backend=backend)
    return out.view(batch, length, *out.shape[1:]), None


@dataclass(frozen=True)
class Unpadded:
    """The tokens of a padded batch: rows of the flattened queries and keys, int64, and their packing."""

    q: Tensor
    k: Tensor
    packing: Packing

    @classmethod
    def of(cls, mask: Tensor, queries: int) -> Unpadded:
        """Return the tokens of a mask (batch, keys); the queries are the last ones. Synchronises with the device."""
        used_q = mask[:, -queries:]
        rows_q, rows_k = (used.flatten().nonzero().flatten() for used in (used_q, mask))
        begin_q, begin_k = (boundaries_of(used.sum(-1, dtype=torch.int32)) for used in (used_q, mask))
        return cls(rows_q, rows_k, Packing(begin_q, begin_k))


def packing_of(position_ids: Tensor, batch: int) -> Packing | None:
    """Return the documents of packed rows, which begin where positions do not go up by 1; None if rows are not packed.

    Synchronises with the device.
    """
    if position_ids.dim() != 2:  # of several axes, as in models of images
        return None
    positions = position_ids.expand(batch, -1)
    is_first = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    starts = is_first.flatten().nonzero().flatten().tolist()
    if len(starts) == batch:
        return None
    boundaries = torch.tensor([*starts, positions.numel()], dtype=torch.int32)
    lengths = tuple(boundaries.diff().tolist())
    boundaries = boundaries.to(positions.device)
    return Packing(boundaries, boundaries, lengths=lengths)


def _mask(causal: bool, sliding_window: int | None) -> Any:
    if sliding_window is None:
        return Causal() if causal else Full()
    return Window(sliding_window - 1, 0 if causal else sliding_window - 1)


def _in_one_dtype(module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Cast fp32 tensors to the weights' dtype: adapters keep the norms of 16-bit models in fp32."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) or not any(x.dtype == torch.float32 for x in tensors):
        return list(tensors)
    weights = (layer.weight.dtype for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    dtype = next((dtype for dtype in weights if dtype.is_floating_point), tensors[0].dtype)
    return [x.to(dtype) for x in tensors]


_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@torch.compiler.disable  # it looks at values
def _once(tensor: Tensor, key: int, find: Any) -> Any:
    """Return what was found in a tensor, which all layers get; look again if it was changed."""
    version, results = _found.get(tensor, (None, None))
    if version != tensor._version:
        version, results = tensor._version, {}
        _found[tensor] = version, results
    if key not in results:
        results[key] = find()
    return results[key]
