"""Activation recomputation: which tensors a block keeps for its backward (`memory=none | selective | checkpoint`)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flash_train.checks import check_name

MEMORY_MODES = ("none", "selective", "checkpoint")

# Operators whose results `selective` keeps: attention outputs and their log-sum-exp. They are given by name, since
# PyTorch registers the last operator on first use. `standard` attention and PyTorch's unfused attention consist of
# several operators, so they run again as a whole.
KEPT_OPERATORS = frozenset(
    {
        "flash_train::attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
    }
)


def check_memory_mode(memory: str) -> None:
    """Raise ValueError for an unknown mode."""
    check_name("memory", memory, MEMORY_MODES)


def run_block(block: Callable[..., Any], *args: Any, memory: str, random: bool) -> Any:
    """Call block(*args) and keep what `memory` says for the backward. `random`: the block draws random numbers."""
    if memory == "none" or not torch.is_grad_enabled():
        return block(*args)
    options: dict[str, Any] = {"context_fn": _selective_contexts} if memory == "selective" else {}
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=random, **options)


def _keep_attention(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
