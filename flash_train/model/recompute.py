"""Activation recomputation: which tensors a block keeps for its backward (`memory=none | selective | checkpoint`)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flash_train.checks import check_name

#: what a block keeps for its backward: everything, its input and the output of attention, or its input
MEMORY_MODES = ("none", "selective", "checkpoint")

# Operators whose results `selective` keeps: attention outputs and their log-sum-exp. They are given by name, since
# PyTorch registers the last operator on first use. `standard` attention and PyTorch's unfused attention consist of
# several operators, so they run again as a whole.
KEPT_OPERATORS = frozenset(
    {
        "flash_train::attention_forward",
        "flash_train::shared_attention_forward",
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


def first_kept(n_layers: int, memory: str, keep: float) -> int:
    """Return the first of the blocks that keep everything for their backward; the blocks after it do, too.

    These are the last `round(keep * n_layers)` blocks: their backward comes first, so their tensors are freed before
    any block is recomputed.

    Args:
        memory: the mode of the other blocks; with none, all blocks keep everything.
        keep: 0 to 1.
    """
    return 0 if memory == "none" else n_layers - round(keep * n_layers)


def run_block(block: Callable[..., Any], *args: Any, memory: str, random: bool, **kwargs: Any) -> Any:
    """Call block(*args, **kwargs) and keep what `memory` says for the backward.

    `random`: the block draws random numbers.
    """
    if memory == "none" or not torch.is_grad_enabled():
        return block(*args, **kwargs)
    options: dict[str, Any] = {"context_fn": _selective_contexts} if memory == "selective" else {}
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=random, **options, **kwargs)


def _keep_attention(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
