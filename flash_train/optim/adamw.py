"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) whose bf16 weights lose no update."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flash_train.checks import check_name
from flash_train.distributed.sharding import local, parts_of
from flash_train.optim.formats import CODE_BLOCK
from flash_train.optim.operations import update_by_operations
from flash_train.optim.state import Format, adopted_state, new_state, part_of
from flash_train.optim.update import Update

#: how bf16 weights are updated: see `AdamW`
MASTERS = ("exact", "stochastic", "none")
#: how moments are stored
MOMENTS = ("fp32", "bf16", "8bit")
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
SMALLEST_ON_HOST = 2**20  # elements; the state of smaller weights stays on the GPU
UNSUPPORTED = ("amsgrad", "maximize")  # settings of PyTorch's AdamW
SHARED = ("master", "moments", "offload", "seed")  # settings that all groups share


class AdamW(torch.optim.AdamW):
    """AdamW for weights in bf16, fp32 or fp16, in one kernel on an NVIDIA GPU; it computes in fp32.

    A bf16 weight that is rounded to nearest after each step loses the updates that are smaller than half of its last
    bit, which are most updates of fine-tuning. `master` says how to avoid this. It concerns bf16 weights only.

    - ``exact``: 16 more bits of each weight are kept, so that it is updated as in fp32. The weight itself is the fp32
      number rounded to the nearest bf16.
    - ``stochastic``: the weight is rounded up or down at random, with the probability that makes its mean exact.
    - ``none``: the weight is rounded to nearest.

    Random numbers depend only on the seed, the step, the weight's number and the place in it. So a resumed run draws
    the same ones.

    The state has PyTorch's names, and a state of another format, also of PyTorch's AdamW, is converted when it is
    loaded. PyTorch's AdamW loads a state of this one too, after `without_codes` if its moments have 8 bits.
    ``exp_avg_scale`` and ``exp_avg_sq_scale`` are the scales of 8-bit moments, and ``weight_lower`` the further bits.

    Weights must be contiguous; of sharded weights (`DTensor`) each rank updates its own part. Gradients of PyTorch's
    tensor parallelism that each rank has a summand of (`Partial`) are summed first.
    `grad_scale`, a scalar tensor or None, divides the gradients of the next step; the step resets it to None.

    Args:
        params: weights, or groups of weights, which may have their own lr, betas, eps and weight_decay.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        master: exact, stochastic or none.
        moments: fp32, bf16 (rounded stochastically) or 8bit (in blocks of 256 numbers, see `formats`); None: the dtype
            of the weights. Weights whose last dimension, or each rank's part of it, is no multiple of 256 cannot have
            8-bit moments; theirs are stored as with None.
        offload: keep the state of large weights in pinned host memory. A step copies it to the GPU piece by piece, and
            back. The state of weights below `SMALLEST_ON_HOST` elements stays on the GPU.
        seed: of the random numbers, 64 bits.

    Raises:
        ValueError: an unknown master or moments, weights in another dtype, or a group with a setting that groups do not
            have; from `step`, if weights were moved or cast after the first step; from `load_state_dict`, if the state
            is of weights with other shapes, or from an optimizer with ``amsgrad`` or ``maximize``.
        RuntimeError: from `step`, while a CUDA graph is captured.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        master: str = "exact",
        moments: str | None = None,
        offload: bool = False,
        seed: int = 0,
    ) -> None:
        check_name("master", master, MASTERS)
        if moments is not None:
            check_name("moments", moments, MOMENTS)
        # With fused=True in the state, PyTorch's optimizer is fused when it loads a checkpoint from this one.
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults |= {"master": master, "moments": moments, "offload": offload, "seed": seed}
        self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if unsupported := [name for name in UNSUPPORTED if group[name]]:
            raise ValueError(f"AdamW: a group of weights has {' and '.join(unsupported)}: must be without")
        for name in SHARED:
            if name in group and group[name] != self.defaults.get(name):
                raise ValueError(
                    f"AdamW: a group of weights has {name}={group[name]!r}: must be an argument, for all groups"
                )
            group.pop(name, None)
        for weight in group["params"]:
            if weight.dtype not in (torch.bfloat16, torch.float32, torch.float16):
                raise ValueError(f"AdamW: weights must be in bf16, fp32 or fp16, and one is {weight.dtype}")
            if not local(weight).is_contiguous():
                raise ValueError(
                    f"AdamW: weights must be contiguous, and one of shape {tuple(weight.shape)} has strides "
                    f"{weight.stride()}; make it so with weight.data = weight.data.contiguous()"
                )

    def _begin(self) -> None:
        # A fused step that supports AMP scaling divides by the loss scale itself, after clipping. With False,
        # GradScaler unscales before clipping, as for any other optimizer, and Lightning does not refuse to clip.
        self._step_supports_amp_scaling = False
        self.grad_scale: Tensor | None = None
        self._launches: dict[bool, Callable[[Update], None]] = {}  # by whether the weights are on a GPU

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()  # a copy has only the state that a checkpoint has

    # -- state

    def format_of(self, weight: Tensor) -> Format:
        """Return how a weight and its state are stored."""
        dtype, moments = weight.dtype, self.defaults["moments"]
        moment = MOMENT_DTYPES.get(moments, dtype)
        if moments == "8bit" and not _has_whole_blocks(weight):
            moment = dtype
        master = self.defaults["master"] if dtype == torch.bfloat16 else "none"
        return Format(dtype, moment, master, self.defaults["offload"] and local(weight).numel() >= SMALLEST_ON_HOST)

    def state_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a weight's state; zeros before its first step."""
        if not self.state[weight]:
            if weight.grad is not None and weight.grad.is_sparse:
                raise RuntimeError("AdamW does not support sparse gradients: use torch.optim.SparseAdam for embeddings")
            self.state[weight] = new_state(weight, self.format_of(weight))
        return self.state[weight]

    def state_dict(self) -> dict[str, Any]:
        if self.defaults["offload"] and torch.cuda.is_initialized():
            weights = (weight for group in self.param_groups for weight in group["params"])
            for device in {weight.device for weight in weights if weight.is_cuda}:
                torch.cuda.synchronize(device)  # the last step may still copy to the host's memory
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if unsupported := [name for name in UNSUPPORTED if any(group.get(name) for group in groups)]:
            raise ValueError(f"the state is from an AdamW with {' and '.join(unsupported)}: must be without")
        super().load_state_dict({**state_dict, "state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            if number in state_dict["state"]:
                self.state[weight] = adopted_state(weight, state_dict["state"][number], self.format_of(weight))

    # -- step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group_number, group in enumerate(self.param_groups):
            numbers = {weight: first + i for i, weight in enumerate(group["params"])}
            first += len(numbers)
            self._step_some(("group", group_number), group, numbers)
        self.grad_scale = None
        return loss

    @torch.no_grad()
    def step_one(self, weight: Tensor, number: int, group: dict[str, Any]) -> None:
        """Take the step of one weight, as a part of a step of all: `grad_scale` stays.

        Args:
            number: of the weight, counted over all groups.
            group: the group of `param_groups` that has it.
        """
        self._step_some(("weight", number), group, {weight: number})

    def _step_some(self, key: tuple[str, int], group: dict[str, Any], numbers: dict[Tensor, int]) -> None:
        """Update a group's weights that have a gradient; `numbers` counts weights over all groups."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "AdamW: a CUDA graph would repeat the number and the learning rate of one step; capture the forward "
                "and the backward alone"
            )
        for index, ((step, storage, _), weights) in enumerate(self._alike(numbers).items()):
            update = Update(
                key=(*key, index),
                storage=storage,
                weights=[local(weight) for weight in weights],
                gradients=[_gradient(weight) for weight in weights],
                states=[_parts(self.state[weight]) for weight in weights],
                numbers=[numbers[weight] for weight in weights],
                part=part_of(weights[0]),
                step=step,
                lr=float(group["lr"]),  # it may be a tensor
                **{name: group[name] for name in ("betas", "eps", "weight_decay")},
                seed=self.defaults["seed"],
                grad_scale=self.grad_scale,
            )
            self._update(update)

    def _alike(self, parameters: Iterable[Tensor]) -> dict[tuple[int, Format, torch.device], list[Tensor]]:
        """Group the weights that have a gradient by their steps, including this one, their formats and devices."""
        weights = [parameter for parameter in parameters if parameter.grad is not None]
        groups: dict[tuple[int, Format, torch.device], list[Tensor]] = {}
        if weights:
            steps = [self.state_of(weight)["step"] for weight in weights]
            torch._foreach_add_(steps, 1)
            for step, weight in zip(torch.stack(steps).tolist(), weights, strict=True):
                groups.setdefault((int(step), self.format_of(weight), weight.device), []).append(weight)
        return groups

    def _update(self, update: Update) -> None:
        is_cuda = update.weights[0].is_cuda
        if is_cuda not in self._launches:
            self._launches[is_cuda] = self._launcher(is_cuda)
        self._launches[is_cuda](update)

    def _launcher(self, is_cuda: bool) -> Callable[[Update], None]:
        """Return what updates weights: the kernel on a GPU, else PyTorch's operations."""
        if not is_cuda or not importlib.util.find_spec("triton"):
            return update_by_operations
        from flash_train.optim.launch import Launcher

        return Launcher()


def has_kernel(parameters: list[nn.Parameter]) -> bool:
    """Whether one kernel can update these weights."""
    devices = {parameter.device for parameter in parameters}
    on_one_gpu = len(devices) == 1 and all(device.type == "cuda" for device in devices)
    if not on_one_gpu or not importlib.util.find_spec("triton"):
        return False
    from flash_train.optim.kernel import TYPES

    return all(parameter.dtype in TYPES and local(parameter).is_contiguous() for parameter in parameters)


def _has_whole_blocks(weight: Tensor) -> bool:
    """Whether each rank's part of a weight's rows is a whole number of blocks."""
    return weight.dim() > 1 and weight.shape[-1] % (CODE_BLOCK * parts_of(weight, weight.dim() - 1)) == 0


def _gradient(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight's gradient, contiguous.

    With tensor parallelism a rank may have only a summand of the gradient; the ranks then add them up.
    """
    gradient = weight.grad
    assert gradient is not None  # `AdamW._alike` takes only weights that have one
    if isinstance(weight, DTensor) and isinstance(gradient, DTensor) and gradient.placements != weight.placements:
        gradient = gradient.redistribute(placements=weight.placements)
    return local(gradient).contiguous()


def _parts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's parts of a weight's state, without the number of steps."""
    return {name: local(value) for name, value in state.items() if name != "step"}
