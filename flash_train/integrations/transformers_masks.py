"""What a mask of `transformers` says: which keys are tokens, and which document a token is in; others are refused."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

# Functions of `transformers.masking_utils` whose masks this attention computes, or finds by itself
KNOWN_PARTS = {
    "and_masks", "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "sliding_window_bidirectional_mask_function",
    "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip
OTHER_MASK = "this model's mask has {}, which only attn_implementation='sdpa' or 'eager' can do"
OTHER_LAYERS = "this model's mask is {}causal, and its layers do not say so; use attn_implementation='sdpa' or 'eager'"
TOO_SHORT = "attention_mask.shape[1]={}: must be {}, one for each token, or more with a cache"


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

    For packed rows without a mask it returns each token's document, int64 (batch, 1, keys): not all models give their
    `position_ids` to the attention function.

    A cache of fixed size has more keys than have been seen; the mask is then only as long as these. An `attention_mask`
    may also have columns for tokens that come later. The first releases of transformers 5 give the queries' positions
    as `cache_position`, later ones as `q_offset` and `q_length`.

    Raises:
        NotImplementedError: the model has attention of its own, or a mask that this attention does not know.
        ValueError: the mask has another number of rows, or too few columns.
    """
    if use_vmap:
        raise NotImplementedError(OTHER_MASK.format("a mask of its own"))
    is_causal, documents = True, None
    if mask_function is not None:
        is_causal, documents = check_mask(mask_function, kv_offset + kv_length, config)
    check_uses_interface(config)
    if attention_mask is not None and len(attention_mask) != batch_size:
        raise ValueError(f"attention_mask.shape[0]={len(attention_mask)}: must be {batch_size}, as in the batch")
    if documents is not None:
        if attention_mask is not None:
            raise NotImplementedError(OTHER_MASK.format("documents and padding"))
        return documents[:, None]
    if not is_causal:  # the keys may be another model's
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
    if q_length is None:
        assert cache_position is not None
        q_length, q_offset = len(cache_position), cache_position[0]
    if q_length > kv_length:  # without a cache, the mask says how many keys there are
        raise ValueError(TOO_SHORT.format(kv_length, q_length))
    seen = int(q_offset) + q_length - kv_offset  # reads a tensor if the cache has a fixed size
    if attention_mask is None:
        if seen >= kv_length:
            return None
        device = q_offset.device if isinstance(q_offset, Tensor) else None
        return torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    mask = attention_mask[:, kv_offset : kv_offset + min(seen, kv_length)].bool()
    if mask.shape[1] < min(seen, kv_length):
        raise ValueError(TOO_SHORT.format(mask.shape[1], min(seen, kv_length)))
    return None if mask.shape[1] == kv_length and bool(mask.all()) else mask


@torch.compiler.disable  # it looks into functions
def check_mask(mask_function: Callable, keys: int, config: Any) -> tuple[bool, Tensor | None]:
    """Return whether a mask of `transformers` is causal, and each token's document or None. Windows come with layers.

    Documents are int64 (batch, keys): the number of each token's document in its row.

    Raises:
        NotImplementedError: the mask has another part, such as chunks or blocks of images, or a window that the model
            does not give to its layers' attention; or the mask is causal and no layer says so, or the reverse; or
            layers attend to other keys than the mask has.
    """
    parts = dict(_parts(mask_function))
    is_causal = "causal_mask_function" in parts
    window, module = parts.get("sliding_window_overlay", {}).get("sliding_window"), _modeling_module(config)
    if window and window < keys and module and not _gives_window(module):
        raise NotImplementedError(OTHER_MASK.format(f"a window of {window} tokens"))
    in_each_call = not getattr(config, "is_causal", True)  # then transformers tells the layers that they are not causal
    if module and hasattr(module, "ALL_ATTENTION_FUNCTIONS") and not in_each_call:
        possible = _is_causal_of_layers(module)
        if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # the layers of Gemma's text models
            possible = possible - {True}
        if is_causal not in possible:
            raise NotImplementedError(OTHER_LAYERS.format("" if is_causal else "not "))
    if any("compressed" in kind for kind in getattr(config, "layer_types", None) or ()):
        raise NotImplementedError(OTHER_MASK.format("compressed keys"))
    if (chunks := parts.pop("chunked_overlay", None)) is not None and chunks["chunk_size"] < keys:
        raise NotImplementedError(OTHER_MASK.format(f"chunks of {chunks['chunk_size']} tokens"))
    if unknown := sorted(parts.keys() - KNOWN_PARTS):
        raise NotImplementedError(OTHER_MASK.format(", ".join(unknown)))
    packed = parts.get("packed_sequence_mask_function")
    return is_causal, None if packed is None else packed["packed_sequence_mask"]


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


@cache
def _is_causal_of_layers(module: ModuleType) -> set[bool]:
    """Return which values of `is_causal` a model's layers may have, by the model's source.

    Attention functions take layers without such a value for causal. Some models are written only for masks with four
    dimensions, which hold the order of the tokens, so the value of their layers may differ from the mask.
    """
    assigned = r"is_causal(?:: bool(?: \| None)?)? = ([\w.]+)"
    passed = r"is_causal=([\w.]+)"
    found = {one or other for one, other in re.findall(f"{assigned}|{passed}", inspect.getsource(module))}
    values = found - {"is_causal", "self.is_causal"}  # these hand on a value
    if not found or values == {"True"}:
        return {True}
    return {False} if values <= {"False"} else {True, False}


@torch.compiler.disable
def check_uses_interface(config: Any) -> None:
    """Refuse models whose attention does not come from the registered functions: they would run without a mask."""
    module = _modeling_module(config)
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    if not any(getattr(kind, "_supports_attention_backend", False) for kind in vars(module).values()):
        name = type(config).__name__.removesuffix("Config")
        raise NotImplementedError(f"{name} has attention of its own: it needs attn_implementation='eager'")
