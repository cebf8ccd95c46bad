"""Whether a model of `transformers` computes each document of a packed row as by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flash_train.attention import Packing
from flash_train.output import say

# Kinds of layers in `layer_types` of configurations; the others, such as "linear_attention" or "conv", have a state
ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
ATTENTION_ONLY = "CausalLM takes models with attention only, since a state passes to the next document of a row"
LENGTH = 4  # of each document of the check


def check_attention_only(model: Any) -> None:
    """Refuse a model whose configuration names layers with a state, which passes from one document to the next.

    Without `layer_types` the model's class says so, as `generate` asks it.

    Raises:
        ValueError: the model has such layers.
    """
    name = type(model).__name__
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if other := sorted(set(kinds or ()) - ATTENTION_LAYERS):
        raise ValueError(f"{name} has layers {', '.join(map(repr, other))}: {ATTENTION_ONLY}")
    if not kinds and getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} has layers with a state: {ATTENTION_ONLY}")


def check_documents_apart(model: Any) -> None:
    """Refuse a model that computes a document otherwise if another one comes first in its row.

    Args:
        model: a causal language model with this project's attention, without PEFT's wrapper.

    Raises:
        ValueError: the hidden states differ by more than rounding.
        NotImplementedError: the model's mask or scores are others than this attention computes.
    """
    if (reason := _why_not_run(model)) is not None:
        say(f"{type(model).__name__}: not checked that packed documents are kept apart, since {reason}")
        return
    embedding = model.get_input_embeddings().weight
    device, words = embedding.device, len(embedding)
    first, second = (torch.arange(LENGTH, device=device) * 7 + start for start in (1, 4))
    tokens = torch.stack([torch.cat([first, second]), torch.cat([second, first])]) % words
    boundaries = torch.arange(0, 4 * LENGTH + 1, LENGTH, dtype=torch.int32, device=device)
    packing = Packing(boundaries, boundaries, lengths=(LENGTH,) * 4)
    positions = torch.arange(LENGTH, device=device).repeat(2, 2)
    with _unchanged(model, device):
        hidden = model.base_model(
            input_ids=tokens, position_ids=positions, packing=packing, use_cache=False
        ).last_hidden_state.float()
    swapped = hidden[1].roll(LENGTH, 0)
    rounding = 1e-4 if embedding.dtype.itemsize > 2 else 2e-2
    if bool((hidden[0] - swapped).abs().max() > rounding * hidden.abs().max()):
        raise ValueError(
            f"{type(model).__name__} computes a packed document otherwise than by itself: CausalLM takes models whose "
            "documents in a row do not change each other"
        )


def _why_not_run(model: nn.Module) -> str | None:
    """Return why a model cannot run as it is, or None."""
    weights = list(model.parameters())
    if any(weight.is_meta or not weight.numel() for weight in weights):
        return "its weights have no values yet"
    if any(type(weight) is not nn.Parameter or not weight.is_floating_point() for weight in weights):
        return "its weights are sharded or quantised"
    if len({(weight.dtype, weight.device) for weight in weights}) > 1 or weights[0].dtype.itemsize < 2:
        return "its weights have several dtypes or devices"
    return None


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute without gradients and dropout, and leave the random numbers and the modules' modes as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for module, training in modes:
            module.training = training


def default_positions(tokens: Tensor, packing: Packing | None) -> Tensor | None:
    """Return each token's position in its document, int64 (batch, seqlen), or None without packing: by its row."""
    if packing is None:
        return None
    index = torch.arange(tokens.numel(), device=tokens.device)
    begins = packing.cu_seqlens_q.long()
    return (index - begins[torch.searchsorted(begins[1:], index, right=True)]).view(tokens.shape)
