"""This project's attention in models of `transformers`: one line before the model is loaded.

    from flash_train.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=register())

Padded batches are unpadded for attention. Packed rows are found by their `position_ids`, or given by `cu_seq_lens_q`
and `cu_seq_lens_k`. The boundaries of the documents are found once for all layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, ModuleType
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

# Functions of `transformers.masking_utils` whose masks this attention computes, or finds by itself
KNOWN_PARTS = {
    "and_masks", "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "sliding_window_bidirectional_mask_function",
    "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip
OTHER_MASK = "this model's mask has {}, which only attn_implementation='sdpa' or 'eager' can do"
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


def padding_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    use_vmap: bool = False,
    cache_position: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return which keys are tokens, bool (batch, keys), or None if all are: a mask function of `transformers`.

    A cache of fixed size has more keys than have been seen; the mask is then only as long as these. The first releases
    of transformers 5 give the queries' positions as `cache_position`, later ones as `q_offset` and `q_length`.

    Raises:
        NotImplementedError: the model has attention of its own, or a mask that this attention does not know.
        ValueError: the mask has too few rows or columns.
    """
    if use_vmap:
        raise NotImplementedError(OTHER_MASK.format("a mask of its own"))
    is_causal = check_mask(mask_function, kv_offset + kv_length, config) if mask_function is not None else True
    check_uses_interface(config)
    if attention_mask is not None and len(attention_mask) != batch_size:
        raise ValueError(f"attention_mask.shape[0]={len(attention_mask)}: must be {batch_size}, as in the batch")
    if not is_causal:  # the keys may be another model's
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
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
    if mask.shape[1] < min(seen, kv_length):
        raise ValueError(f"attention_mask.shape[1]={mask.shape[1]}: must be {min(seen, kv_length)}, one for each token")
    return None if mask.shape[1] == kv_length and bool(mask.all()) else mask


@torch.compiler.disable  # it looks into functions
def check_mask(mask_function: Callable, keys: int, config: Any) -> bool:
    """Return whether a mask of `transformers` is causal. Windows come with each layer, documents with `position_ids`.

    Raises:
        NotImplementedError: the mask has another part, such as chunks or blocks of images, or a window that the model
            does not give to its layers' attention.
    """
    parts = dict(_parts(mask_function))
    window, module = parts.get("sliding_window_overlay", {}).get("sliding_window"), _modeling_module(config)
    if window is not None and window < keys and module and not _gives_window(module):
        raise NotImplementedError(OTHER_MASK.format(f"a window of {window} tokens"))
    if (chunks := parts.pop("chunked_overlay", None)) is not None and chunks["chunk_size"] < keys:
        raise NotImplementedError(OTHER_MASK.format(f"chunks of {chunks['chunk_size']} tokens"))
    if unknown := sorted(parts.keys() - KNOWN_PARTS):
        raise NotImplementedError(OTHER_MASK.format(", ".join(unknown)))
    return "causal_mask_function" in parts


def _parts(function: Callable) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names of the functions that a mask combines, each with the variables that it holds."""
    cells = function.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    yield function.__qualname__.split(".")[0], held
    for value in held.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, FunctionType):
                yield from _parts(part)


def _modeling_module(config: Any) -> ModuleType | None:
    """Return the module of a configuration's model in `transformers`, or None."""
    name = type(config).__module__
    return sys.modules.get(name.replace("configuration_", "modeling_")) if "configuration_" in name else None


@cache
def _gives_window(module: ModuleType) -> bool:
    """Whether a model's layers give their sliding window to the attention function."""
    return "sliding_window=" in inspect.getsource(module)


@torch.compiler.disable
def check_uses_interface(config: Any) -> None:
    """Refuse models whose attention does not come from the registered functions: they would run without a mask."""
    module = _modeling_module(config)
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    if not any(getattr(kind, "_supports_attention_backend", False) for kind in vars(module).values()):
        name = type(config).__name__.removesuffix("Config")
        raise NotImplementedError(f"{name} has attention of its own: it needs attn_implementation='eager'")


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
        NotImplementedError: the model changes the scores in a way that this attention does not support.
    """
    if options.get("output_attentions"):
        raise ValueError("output_attentions=True: must be False, or the model needs attn_implementation='eager'")
    if other := [name for name in OTHER_SCORES if options.get(name) is not None]:
        raise NotImplementedError(
            f"this model's attention has {', '.join(other)}, which only attn_implementation='sdpa' or 'eager' can do"
        )
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
        if packing is not None or cu_seq_lens_q is not None:
            given = "cu_seq_lens_q" if packing is None else "packing"
            raise ValueError(f"attention_mask and {given}: only one can say where the tokens are")
        keys = attention_mask.shape[1]
        if keys > k.shape[1] or (keys < k.shape[1] and not causal):
            raise ValueError(f"attention_mask.shape[1]={keys}: must be {k.shape[1]}, one for each key")
        k, v = k[:, :keys], v[:, :keys]
        positions = position_ids if causal and length == keys else None
        asked = (length, causal, None if positions is None else (id(positions), _version_of(positions)))
        found = _once(attention_mask, asked, lambda: Unpadded.of(attention_mask, length, causal, positions))
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
    def of(cls, mask: Tensor, queries: int, causal: bool, positions: Tensor | None) -> Unpadded:
        """Return the tokens of a mask (batch, keys). Synchronises with the device.

        Args:
            causal: the queries are the last tokens of the mask; else all queries are tokens, maybe of another model.
            positions: (batch or 1, keys), where a document of packed rows may begin.
        """
        used_q = mask[:, -queries:] if causal else mask.new_ones(len(mask), queries)
        rows_q, rows_k = (used.flatten().nonzero().flatten() for used in (used_q, mask))
        if positions is not None and positions.dim() == 2:
            starts = _document_starts(rows_k, positions.expand(len(mask), -1).flatten(), mask.shape[1])
            if len(starts) > int(mask.any(-1).sum()):
                boundaries = F.pad(starts, (0, 1), value=len(rows_k)).to(torch.int32)
                return cls(rows_q, rows_k, Packing(boundaries, boundaries))
        begin_q, begin_k = (boundaries_of(used.sum(-1, dtype=torch.int32)) for used in (used_q, mask))
        return cls(rows_q, rows_k, Packing(begin_q, begin_k))


def _document_starts(rows: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return which of the listed tokens begin a row or a document of it.

    Within a document, positions go up by 1 with each token, or also count the padding between two tokens.
    """
    distance, step = rows.diff(), positions[rows].diff()
    follows = (rows[1:] // length == rows[:-1] // length) & ((step == 1) | (step == distance))
    return F.pad(~follows, (1, 0), value=True).nonzero().flatten()


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


def _version_of(tensor: Tensor) -> int | None:
    """Return a number that grows when the tensor is changed; None for tensors of `torch.inference_mode`."""
    return None if tensor.is_inference() else tensor._version


@torch.compiler.disable  # it looks at values
def _once(tensor: Tensor, key: Any, find: Any) -> Any:
    """Return ``find()`` for a tensor that all layers get, cached by ``key`` until the tensor changes.

    For tensors of ``torch.inference_mode``, whose changes are unknown, nothing is cached.
    """
    if tensor.is_inference():
        return find()
    version, results = _found.get(tensor, (None, None))
    if version != tensor._version:
        version, results = tensor._version, {}
        _found[tensor] = version, results
    if key not in results:
        results[key] = find()
    return results[key]
