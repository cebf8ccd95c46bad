"""This project's attention in models of `transformers`: one line before the model is loaded.

    from flash_train.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=register())

Padded batches are unpadded for attention. Packed rows are found by their `position_ids`, or given by `cu_seq_lens_q`
and `cu_seq_lens_k`. The boundaries of the documents are found once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_train.attention import AttentionSpec, Causal, Full, Packing, Window, attention, pad_input
from flash_train.attention.backends import backend_names
from flash_train.attention.flash_attn.padding import boundaries_of
from flash_train.attention.rows import take_rows
from flash_train.checks import check_name
from flash_train.integrations.transformers_masks import TOO_SHORT, padding_mask

if TYPE_CHECKING:
    from torch import nn

# transformers takes any name with "flash" for a kernel of its hub
NAME = "fused_triton"

# Arguments of attention functions that change which keys count, or how much
OTHER_SCORES = ("position_bias", "indices", "block_indices", "sinks")


def register(name: str = NAME, *, backend: str = "auto") -> str:
    """Add this project's attention to `transformers`, and return the name for `attn_implementation`.

    It supports causal, bidirectional and cross-attention, sliding windows, softcap, sinks, grouped queries, dropout,
    values with another head dimension, padding on either side, packed rows, and caches of keys and values. It returns
    no attention weights (`output_attentions`), and takes no masks with four dimensions.

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
        attention_mask: bool (batch, keys), which keys are tokens; None: all. For packed rows also int64
            (batch, 1, seqlen), each token's document, which counts if nothing else says where documents begin.
        sliding_window: keys that a query sees on one side, with its own. Without a causal mask, the number in the
            layer's configuration does not count its own.
        is_causal: replaces the layer's own.
        s_aux: sinks, (heads,).
        position_ids: (batch, seqlen) or (1, seqlen); where they do not go up by 1, another document begins.
        cu_seq_lens_q, cu_seq_lens_k: int (documents + 1,), the documents' boundaries in the flattened batch.
        packing: the same boundaries, as `flash_train.attention` takes them.

    Returns:
        (batch, seqlen, heads, head_dim of the values), and None in the place of the attention weights.

    Raises:
        ValueError: options that this attention does not support, a mask that does not fit the tokens, or a sliding
            window over a row with padding between a document's tokens.
        NotImplementedError: the model changes the scores in a way that this attention does not support.
    """
    if options.get("output_attentions"):
        raise ValueError("output_attentions=True: must be False, or the model needs attn_implementation='eager'")
    if other := [name for name in OTHER_SCORES if options.get(name) is not None]:
        raise NotImplementedError(
            f"this model's attention has {', '.join(other)}, which only attn_implementation='sdpa' or 'eager' can do"
        )
    documents = None
    if attention_mask is not None and attention_mask.dim() == 3 and attention_mask.dtype == torch.int64:
        documents, attention_mask = attention_mask, None
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: must be (batch, seqlen); masks with four "
            "dimensions need attn_implementation='sdpa'"
        )
    q, k, v = (x.transpose(1, 2) for x in _in_one_dtype(module, query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and not causal and sliding_window == _configured_window(module):
        sliding_window += 1  # the mask has this many keys on each side of the query; other layers count the query, too
    spec = AttentionSpec(_mask(causal, sliding_window), scaling, softcap or 0.0, dropout)
    batch, length = q.shape[:2]
    if documents is not None and not documents.shape[2] == length == k.shape[1]:
        raise ValueError(
            f"attention_mask.shape[2]={documents.shape[2]}: must be {length} queries and {k.shape[1]} keys, since it "
            "holds the documents of packed rows"
        )
    if attention_mask is not None:
        if packing is not None or cu_seq_lens_q is not None:
            given = "cu_seq_lens_q" if packing is None else "packing"
            raise ValueError(f"attention_mask and {given}: only one can say where the tokens are")
        keys = attention_mask.shape[1]
        if keys > k.shape[1] or (keys < k.shape[1] and not causal):
            raise ValueError(f"attention_mask.shape[1]={keys}: must be {k.shape[1]}, one for each key")
        if causal and keys < length:
            raise ValueError(TOO_SHORT.format(keys, length))
        k, v = k[:, :keys], v[:, :keys]
        positions = position_ids if causal and length == keys else None
        window = sliding_window if sliding_window is not None and sliding_window < keys else None
        asked = (length, causal, window)
        found = _once(
            (attention_mask, positions),
            asked,
            lambda: Unpadded.of(attention_mask, length, causal, positions, window),
        )
        q, k, v = (take_rows(x.flatten(0, 1), rows) for x, rows in ((q, found.q), (k, found.k), (v, found.k)))
        out = attention(q, k, v, spec, packing=found.packing, sinks=s_aux, backend=backend)
        return pad_input(out, found.q, batch, length), None
    if packing is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        packing = Packing(cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32))
    elif packing is None and length == k.shape[1] > 1:
        if position_ids is not None:
            packing = _once((position_ids,), batch, lambda: packing_of(position_ids, batch))
        if packing is None and documents is not None:
            packing = _once((documents,), None, lambda: packing_of_documents(documents[:, 0]))
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
    def of(
        cls, mask: Tensor, queries: int, causal: bool, positions: Tensor | None = None, window: int | None = None
    ) -> Unpadded:
        """Return the tokens of a mask (batch, keys). Synchronises with the device.

        Args:
            causal: the queries are the last tokens of the mask; else all queries are tokens, maybe of another model,
                unless there is a window.
            positions: (batch or 1, keys), where a document of packed rows may begin.
            window: how many keys a query sees, if fewer than the mask has. It counts the padding between two tokens,
                which unpadding takes away.

        Raises:
            ValueError: a window, and padding between two tokens of one document.
        """
        own_keys = causal or window is not None  # a window counts from a query to the keys of the same row
        used_q = mask[:, -queries:] if own_keys else mask.new_ones(len(mask), queries)
        rows_q, rows_k = (used.flatten().nonzero().flatten() for used in (used_q, mask))
        if positions is not None and positions.dim() == 2:
            positions = positions.expand(len(mask), -1).flatten()
        else:
            positions = None
        follows = _follows(rows_k, positions, mask.shape[1])
        if window is not None and bool((follows & (rows_k.diff() > 1)).any()):
            raise ValueError(
                f"sliding_window={window} and attention_mask: a row must not have padding between the tokens of a "
                "document; pad on one side, or use attn_implementation='sdpa'"
            )
        if positions is not None:
            starts = F.pad(~follows, (1, 0), value=True).nonzero().flatten()
            if len(starts) > int(mask.any(-1).sum()):
                boundaries = F.pad(starts, (0, 1), value=len(rows_k)).to(torch.int32)
                return cls(rows_q, rows_k, Packing(boundaries, boundaries))
        begin_q, begin_k = (boundaries_of(used.sum(-1, dtype=torch.int32)) for used in (used_q, mask))
        return cls(rows_q, rows_k, Packing(begin_q, begin_k))


def _follows(rows: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """Return which of the listed tokens, but the first, continue the document of the token before.

    Without positions each row is a document. Within a document, positions go up by 1 with each token, or also count
    the padding between two tokens.
    """
    same_row = rows[1:] // length == rows[:-1] // length
    if positions is None:
        return same_row
    distance, step = rows.diff(), positions[rows].diff()
    return same_row & ((step == 1) | (step == distance))


def packing_of(position_ids: Tensor, batch: int) -> Packing | None:
    """Return the documents of packed rows, which begin where positions do not go up by 1; None if rows are not packed.

    Synchronises with the device.
    """
    if position_ids.dim() != 2:  # of several axes, as in models of images
        return None
    positions = position_ids.expand(batch, -1)
    return _packing_from(positions[:, 1:] != positions[:, :-1] + 1)


def packing_of_documents(documents: Tensor) -> Packing | None:
    """Return the packing of rows whose tokens have the numbers of their documents, (batch, seqlen), as `packing_of`."""
    return _packing_from(documents[:, 1:] != documents[:, :-1])


def _packing_from(begins: Tensor) -> Packing | None:
    """Return the packing of rows, (batch, seqlen - 1): which tokens but the rows' first begin a document."""
    is_first = F.pad(begins, (1, 0), value=True)
    starts = is_first.flatten().nonzero().flatten().tolist()
    if len(starts) == len(begins):
        return None
    boundaries = torch.tensor([*starts, is_first.numel()], dtype=torch.int32)
    lengths = tuple(boundaries.diff().tolist())
    boundaries = boundaries.to(begins.device)
    return Packing(boundaries, boundaries, lengths=lengths)


def _mask(causal: bool, sliding_window: int | None) -> Any:
    if sliding_window is None:
        return Causal() if causal else Full()
    return Window(sliding_window - 1, 0 if causal else sliding_window - 1)


def _configured_window(module: nn.Module) -> int | None:
    """Return the window in a layer's configuration, None if it has none or computes it."""
    config = getattr(module, "config", None)
    # not getattr: a configuration may refuse attributes that differ between its layers
    return None if config is None else vars(config).get("sliding_window")


def _in_one_dtype(module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Cast fp32 tensors to the weights' dtype: adapters keep the norms of 16-bit models in fp32.

    Where the weights are quantised, to integers or fp8, it is the narrowest dtype of the tensors.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) or not any(x.dtype == torch.float32 for x in tensors):
        return list(tensors)
    weights = (layer.weight.dtype for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    narrowest = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    dtype = next((dtype for dtype in weights if dtype.is_floating_point and dtype.itemsize > 1), narrowest)
    return [x.to(dtype) for x in tensors]


class _Known(NamedTuple):
    """What was found from a tensor, and from it together with other tensors."""

    version: int  #: of the tensor; it grows with each change
    results: dict[Any, Any]
    with_others: WeakTensorKeyDictionary


_known = WeakTensorKeyDictionary()


@torch.compiler.disable  # it looks at values
def _once(tensors: Sequence[Tensor | None], key: Any, find: Any) -> Any:
    """Return ``find()`` for tensors that all layers get, cached by ``key`` until one of them changes.

    For tensors of ``torch.inference_mode``, whose changes are unknown, nothing is cached.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.is_inference() for tensor in given):
        return find()
    level, results = _known, {}
    for tensor in given:
        found = level.get(tensor)
        if found is None or found.version != tensor._version:
            level[tensor] = found = _Known(tensor._version, {}, WeakTensorKeyDictionary())
        results, level = found.results, found.with_others
    if key not in results:
        results[key] = find()
    return results[key]
