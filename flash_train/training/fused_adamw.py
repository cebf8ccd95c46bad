"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) as one kernel over all weights of a CUDA device.

The step is memory-bound, and this kernel moves the minimum: it reads weights, gradients and both averages once, and
writes weights and averages once, 16 bytes at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from flash_train.distributed.sharding import local

BLOCK = 2048  # elements per program; for 16-bit weights, each thread moves 16 bytes of each tensor
AVERAGES = ("exp_avg", "exp_avg_sq")  # the names in PyTorch's optimizer state
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["count"])
def adamw_kernel(
    addresses, count, sizes, block_tensor, block_start, grad_scale, decay, step_size, beta1, beta2, unbias2, eps,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one weight.

    addresses: int64 (4 · count,), of the weights, then the gradients, their averages, the averages of their squares.
    sizes: int64 (count,), elements of each weight.
    block_tensor, block_start: int32 (programs,), the weight that a program updates and the index of its block in it.
    grad_scale: fp32 scalar that divides every gradient, or None.
    decay = lr · weight_decay, step_size = lr / (1 − beta1^step), unbias2 = 1 / √(1 − beta2^step).
    """
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    start = tl.load(block_start + block).to(tl.int64) * BLOCK
    left = tl.load(sizes + tensor) - start
    factor = 1.0
    if grad_scale is not None:
        factor = 1.0 / tl.load(grad_scale)
    weight = _pointer(addresses + tensor, start, DTYPE, ALIGNED)
    gradient = _pointer(addresses + count + tensor, start, DTYPE, ALIGNED)
    average = _pointer(addresses + 2 * count + tensor, start, DTYPE, ALIGNED)
    square = _pointer(addresses + 3 * count + tensor, start, DTYPE, ALIGNED)
    if left >= BLOCK:  # a whole block needs no mask, so its loads can be vectorised
        _update(
            weight, gradient, average, square, BLOCK, factor, decay, step_size, beta1, beta2, unbias2, eps, False, BLOCK
        )
    else:
        _update(
            weight, gradient, average, square, left, factor, decay, step_size, beta1, beta2, unbias2, eps, True, BLOCK
        )


@triton.jit
def _pointer(address, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _update(
    weight, gradient, average, square, left, factor, decay, step_size, beta1, beta2, unbias2, eps, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    mask = at < left if MASKED else None
    w = tl.load(weight + at, mask=mask).to(tl.float32)
    g = tl.load(gradient + at, mask=mask).to(tl.float32) * factor
    m = tl.load(average + at, mask=mask).to(tl.float32)
    v = tl.load(square + at, mask=mask).to(tl.float32)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w -= decay * w + step_size * m / (tl.sqrt(v) * unbias2 + eps)  # 1 - decay would round away a small decay
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=mask)
    tl.store(average + at, m.to(weight.dtype.element_ty), mask=mask)
    tl.store(square + at, v.to(weight.dtype.element_ty), mask=mask)


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose step is one kernel; computes in fp32. State and checkpoints are the same as PyTorch's.

    Weights must be contiguous, fp32, bf16 or fp16, and all on one CUDA device; their averages have the same dtype.
    Of sharded weights (`DTensor`) each rank updates its own part.
    `grad_scale`, a scalar tensor or None, divides the gradients of the next step; the step resets it to None.

    Raises:
        ValueError: from `step`, if weights were moved or cast after the first step; from `load_state_dict`, if the
            state is from an optimizer with `amsgrad` or `maximize`.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        # With fused=True in the state, PyTorch's optimizer is fused when it loads a checkpoint from this one.
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._reset_launches()

    def _reset_launches(self) -> None:
        self._step_supports_amp_scaling = False  # see `build_adamw`
        self.grad_scale: Tensor | None = None
        self._tables: dict[tuple[int, int, torch.dtype, torch.device], _BlockTable] = {}

    @staticmethod
    def can_step(parameters: list[nn.Parameter]) -> bool:
        """Whether the kernel supports these weights, given that they are on one GPU."""
        return all(parameter.dtype in DTYPES and local(parameter).is_contiguous() for parameter in parameters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_launches()  # a copy has only the state that a checkpoint has

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if unsupported := [name for name in ("amsgrad", "maximize") if any(group.get(name) for group in groups)]:
            raise ValueError(
                f"the state is from an AdamW with {' and '.join(unsupported)}, which FusedAdamW does not support"
            )
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()  # PyTorch's fused step counts on the device; here the host computes
            for name in AVERAGES:
                state[name] = state[name].contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for index, (step, weights) in enumerate(self._by_step_and_dtype(group["params"])):
                self._launch((number, index), group, step, weights)
        self.grad_scale = None
        return loss

    def _by_step_and_dtype(self, parameters: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """Group the weights that have a gradient by step count and dtype: (steps including this one, weights)."""
        weights = [parameter for parameter in parameters if parameter.grad is not None]
        if not weights:
            return []
        steps = [self._state_for(weight)["step"] for weight in weights]
        torch._foreach_add_(steps, 1)
        groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for step, weight in zip(torch.stack(steps).tolist(), weights, strict=True):
            groups.setdefault((int(step), weight.dtype), []).append(weight)
        return [(step, group) for (step, _), group in groups.items()]

    def _state_for(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            if weight.grad is not None and weight.grad.is_sparse:
                raise RuntimeError("AdamW does not support sparse gradients: use torch.optim.SparseAdam for embeddings")
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in AVERAGES:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state

    def _launch(self, place: tuple[int, int], group: dict[str, Any], step: int, weights: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        gradients = [local(weight.grad).contiguous() for weight in weights if weight.grad is not None]
        averages = [[local(self.state[weight][name]) for weight in weights] for name in AVERAGES]
        weights = [local(weight) for weight in weights]
        tensor_lists = [weights, gradients, *averages]
        sizes = [weight.numel() for weight in weights]
        if not sum(sizes):  # this rank has no part of these weights
            return
        dtype, device = weights[0].dtype, weights[0].device
        blocks = self._tables.get((*place, dtype, device))
        if blocks is None or blocks.sizes != sizes:
            blocks = self._tables[*place, dtype, device] = _BlockTable.of(sizes, device)
        addresses = [tensor.data_ptr() for tensors in tensor_lists for tensor in tensors]
        if addresses != blocks.address_values:  # mostly equal: the allocator reuses the memory of the last gradients
            _check_tensors([tensor for tensors in tensor_lists for tensor in tensors], dtype, device)
            blocks.set_addresses(addresses)
        scale = None if self.grad_scale is None else self.grad_scale.to(device, torch.float32, non_blocking=True)
        with torch.cuda.device_of(weights[0]):
            adamw_kernel[(len(blocks.tensor),)](
                blocks.addresses, len(weights), blocks.device_sizes, blocks.tensor, blocks.start, scale,
                lr * group["weight_decay"], lr / (1 - beta1**step), beta1, beta2, (1 - beta2**step) ** -0.5,
                group["eps"], DTYPE=DTYPES[dtype], ALIGNED=blocks.aligned,
                BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip


def _check_tensors(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse tensors without the dtype, device and layout that the kernel assumes: it gets only addresses."""
    for tensor in tensors:
        if dtype not in DTYPES or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"FusedAdamW was built for other weights: {dtype} on {device}, and a tensor is {tensor.dtype} on "
                f"{tensor.device}; build the optimizer after the model is moved and cast"
            )


@dataclass
class _BlockTable:
    """The table that maps each program to a weight and a block in it, and the addresses of the tensors."""

    sizes: list[int]
    device_sizes: Tensor
    tensor: Tensor
    start: Tensor
    addresses: Tensor | None = None
    address_values: list[int] | None = None
    aligned: bool = False

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> "_BlockTable":
        counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
        tensor = torch.arange(len(sizes)).repeat_interleave(counts)
        start = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        return cls(sizes, torch.tensor(sizes).to(device), tensor.int().to(device), start.int().to(device))

    def set_addresses(self, addresses: list[int]) -> None:
        there = self.device_sizes.device
        pinned = torch.tensor(addresses, pin_memory=there.type == "cuda")
        self.addresses, self.address_values = pinned.to(there, non_blocking=True), addresses
        self.aligned = all(address % 16 == 0 for address in addresses)
