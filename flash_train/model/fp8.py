"""Linear layers with fp8 products, through torchao's float8 training (an optional dependency).

Weights, gradients and everything between the products keep their dtype. Each product converts its two operands to fp8
with scales of their own, in the forward and in both products of the backward. The products of the blocks are
converted, head and embedding are not. torchao's conversions are many small operations, so each layer is compiled.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from flash_train.checks import check_name
from flash_train.model.layers import Linear
from flash_train.model.transformer import Transformer

RECIPES = ("tensorwise", "rowwise")
CAPABILITY = (8, 9)  # the first compute capability with fp8 products
MULTIPLE = 16  # both widths of a weight are multiples of it
RECOMPILATIONS = 64  # a layer is compiled for each shape of weights and tiles, and PyTorch's limit is 8


def fp8_obstacle(device: torch.device) -> str | None:
    """Return what prevents fp8 products on a device, or None."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or later"
    if (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        return f"needs compute capability 8.9 or later, and this GPU has {capability[0]}.{capability[1]}"
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return "needs torchao: pip install 'torchao>=0.18'"
    return None


def to_fp8(model: Transformer, recipe: str = "tensorwise", *, emulate: bool = False) -> None:
    """Convert the linear layers of the blocks, in place; the names of the weights stay the same.

    In evaluation mode the layers compute in the weights' dtype. Convert before weights are sharded.

    Args:
        recipe: what shares a scale: `tensorwise` a whole operand, `rowwise` a row or column of it.
        emulate: round to fp8, and multiply in fp32, on any device; slow, for tests.

    Raises:
        ValueError: an unknown recipe, or a width that is no multiple of 16.
        ImportError: torchao is not installed.
    """
    check_name("recipe", recipe, RECIPES)
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear) and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            shape = f"{module.out_features} x {module.in_features}"
            raise ValueError(f"blocks.{name}.weight: {shape}; for fp8 both must be multiples of {MULTIPLE}")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(
        model.blocks, module_filter_fn=lambda module, _: isinstance(module, Linear), config=config
    )
    model.fp8 = recipe
    if emulate or any(block._compiled_call_impl is not None for block in model.blocks):
        return
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.compile(dynamic=False)
