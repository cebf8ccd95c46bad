"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) as one kernel over all weights of a CUDA device.

A step is bound by memory, and this one moves what it must: weights, gradients and both averages are read once, and all
but the gradients written once, 16 bytes at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK = 2048  # elements of a program; in 16 bits, 16 bytes of each of the four for a thread
AVERAGES = ("exp_avg", "exp_avg_sq")  # PyTorch's names
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["count"])
def adamw_kernel(
    addresses, count, sizes, block_tensor, block_start, grad_scale, decay, step_size, beta1, beta2, unbias2, eps,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one weight.

    addresses int64 (4 · count,): of weights, gradients, averages of gradients, averages of their squares.
    sizes int64 (count,) in elements; block_tensor, block_start int32 (programs,): whose block, and which of its blocks.
    grad_scale fp32, one number that divides every gradient, or None.
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
    if left >= BLOCK:  # without a mask, loads are as wide as they can be
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
    """`torch.optim.AdamW`, stepped by one kernel; computes in fp32. Its state and its checkpoints are PyTorch's.

    Weights are contiguous, fp32, bf16 or fp16, and all on one CUDA device; their averages are like them. `grad_scale`,
    a scalar tensor or None, divides the gradients of the next step, which then forgets it.

    Raises:
        ValueError: by a step, where weights were moved or cast since their averages were made; by loading the state of
            an optimizer that was asked for `amsgrad` or `maximize`.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        # Called fused, so that a checkpoint that PyTorch's own fused optimizer loads keeps that.
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._begin()

    def _begin(self) -> None:
        self._step_supports_amp_scaling = False  # see `build_adamw`
        self.grad_scale: Tensor | None = None
        self._tables: dict[tuple[int, int, torch.dtype, torch.device], _Blocks] = {}

    @staticmethod
    def can_step(parameters: list[nn.Parameter]) -> bool:
        """Whether the kernel has a form for weights that are on one GPU."""
        return all(parameter.dtype in DTYPES and parameter.is_contiguous() for parameter in parameters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()  # a copy has nothing but what a checkpoint has

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if asked := [name for name in ("amsgrad", "maximize") if any(g.get(name) for g in state_dict["param_groups"])]:
            raise ValueError(f"the state is of an AdamW with {' and '.join(asked)}, which FusedAdamW has not")
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()  # PyTorch's own counts on the device; here the host must know
            for name in AVERAGES:
                state[name] = state[name].contiguous()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for order, (step, weights) in enumerate(self._alike(group["params"])):
                self._launch((number, order), group, step, weights)
        self.grad_scale = None
        return loss

    def _alike(self, parameters: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """The weights that have a gradient, those together that have taken as many steps and are of one dtype; with the
        number of steps, this one included."""
        weights = [parameter for parameter in parameters if parameter.grad is not None]
        if not weights:
            return []
        steps = [self._state_of(weight)["step"] for weight in weights]
        torch._foreach_add_(steps, 1)
        found: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for step, weight in zip(torch.stack(steps).tolist(), weights, strict=True):
            found.setdefault((int(step), weight.dtype), []).append(weight)
        return [(step, alike) for (step, _), alike in found.items()]

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            if weight.grad is not None and weight.grad.is_sparse:
                raise RuntimeError("AdamW takes no sparse gradients: use torch.optim.SparseAdam for such embeddings")
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in AVERAGES:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state

    def _launch(self, place: tuple[int, int], group: dict[str, Any], step: int, weights: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        gradients = [weight.grad.contiguous() for weight in weights if weight.grad is not None]
        averages = [[self.state[weight][name] for weight in weights] for name in AVERAGES]
        kinds = [weights, gradients, *averages]
        sizes = [weight.numel() for weight in weights]
        dtype, device = weights[0].dtype, weights[0].device
        blocks = self._tables.get((*place, dtype, device))
        if blocks is None or blocks.sizes != sizes:
            blocks = self._tables[*place, dtype, device] = _Blocks.of(sizes, device)
        addresses = [tensor.data_ptr() for tensors in kinds for tensor in tensors]
        if addresses != blocks.known:  # the allocator mostly puts gradients where the last step's were
            _require_alike([tensor for tensors in kinds for tensor in tensors], dtype, device)
            blocks.point_to(addresses)
        scale = None if self.grad_scale is None else self.grad_scale.to(device, torch.float32, non_blocking=True)
        with torch.cuda.device_of(weights[0]):
            adamw_kernel[(len(blocks.tensor),)](
                blocks.addresses, len(weights), blocks.sizes_there, blocks.tensor, blocks.start, scale,
                lr * group["weight_decay"], lr / (1 - beta1**step), beta1, beta2, (1 - beta2**step) ** -0.5,
                group["eps"], DTYPE=DTYPES[dtype], ALIGNED=blocks.aligned,
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def _require_alike(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """The kernel gets addresses alone: what lies there must be what it takes it for."""
    for tensor in tensors:
        if dtype not in DTYPES or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"FusedAdamW was built for other weights than these: {dtype} on {device} beside {tensor.dtype} on "
                f"{tensor.device}; build the optimizer after the model is moved and cast"
            )


@dataclass
class _Blocks:
    """Which program takes which block of which weight, and where the weights lie."""

    sizes: list[int]
    sizes_there: Tensor
    tensor: Tensor
    start: Tensor
    addresses: Tensor | None = None
    known: list[int] | None = None
    aligned: bool = False

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> "_Blocks":
        counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
        tensor = torch.arange(len(sizes)).repeat_interleave(counts)
        start = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
        return cls(sizes, torch.tensor(sizes).to(device), tensor.int().to(device), start.int().to(device))

    def point_to(self, addresses: list[int]) -> None:
        there = self.sizes_there.device
        pinned = torch.tensor(addresses, pin_memory=there.type == "cuda")
        self.addresses, self.known = pinned.to(there, non_blocking=True), addresses
        self.aligned = all(address % 16 == 0 for address in addresses)
