"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) whose bf16 weights lose no update."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from flash_train.checks import check_name
from flash_train.distributed.sharding import local
from flash_train.optim import formats

MASTERS = ("exact", "stochastic", "none")
MOMENTS = ("fp32", "bf16", "8bit")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
AVERAGES = ("exp_avg", "exp_avg_sq")  # the names in PyTorch's optimizer state
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
LOWER = "weight_lower"
CHUNK = 2**16  # elements that PyTorch's operations update at a time, a multiple of `formats.DRAW_BLOCK`


class Format(NamedTuple):
    """What decides how a weight is updated."""

    weight: torch.dtype
    moment: torch.dtype
    master: str


class AdamW(torch.optim.AdamW):
    """AdamW for weights in bf16, fp32 or fp16, in one kernel on an NVIDIA GPU; it computes in fp32.

    A bf16 weight that is rounded to nearest after each step loses the updates that are smaller than half of its last
    bit, which are most updates of fine-tuning. `master` says what to do about it. It changes nothing for other weights.

    - ``exact``: 16 more bits of each weight are kept, so that it is updated as in fp32. The weight itself is the fp32
      number rounded to the nearest bf16.
    - ``stochastic``: the weight is rounded up or down at random, with the probability that makes its mean exact.
    - ``none``: the weight is rounded to nearest.

    Random numbers depend only on the seed, the step and the place in a weight, so a run that resumes has the same ones.

    The state has PyTorch's names, and its checkpoints load both ways: a state in another format is converted.
    ``exp_avg_scale`` and ``exp_avg_sq_scale`` are the scales of 8-bit moments, and ``weight_lower`` the further bits.

    Weights must be contiguous; of sharded weights (`DTensor`) each rank updates its own part.
    `grad_scale`, a scalar tensor or None, divides the gradients of the next step; the step resets it to None.

    Args:
        params: weights, or groups of weights.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        master: exact, stochastic or none.
        moments: fp32, bf16 (rounded stochastically) or 8bit (in blocks of 256 numbers, see `formats`); None: the dtype
            of the weights. Weights whose last dimension is no multiple of 256 cannot have 8-bit moments; theirs are
            stored as with None.
        seed: of the random numbers, 64 bits.

    Raises:
        ValueError: an unknown master or moments, or weights in another dtype; from `step`, if weights were moved or
            cast after the first step; from `load_state_dict`, if the state is from an optimizer with ``amsgrad`` or
            ``maximize``.
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
        seed: int = 0,
    ) -> None:
        check_name("master", master, MASTERS)
        if moments is not None:
            check_name("moments", moments, MOMENTS)
        # With fused=True in the state, PyTorch's optimizer is fused when it loads a checkpoint from this one.
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults |= {"master": master, "moments": moments, "seed": seed}
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            if weight.dtype not in (torch.bfloat16, torch.float32, torch.float16):
                raise ValueError(f"AdamW: weights must be in bf16, fp32 or fp16, and one is {weight.dtype}")
        self._begin()

    def _begin(self) -> None:
        # A fused step that supports AMP scaling divides by the loss scale itself, after clipping. With False,
        # GradScaler unscales before clipping, as for any other optimizer, and Lightning does not refuse to clip.
        self._step_supports_amp_scaling = False
        self.grad_scale: Tensor | None = None
        self._tables: dict[Any, Any] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()  # a copy has only the state that a checkpoint has

    # -- state

    def format_of(self, weight: Tensor) -> Format:
        """Return how a weight and its moments are stored."""
        dtype, master, moments = weight.dtype, self.defaults["master"], self.defaults["moments"]
        moment = DTYPES.get(moments, dtype)
        if moments == "8bit" and (weight.dim() < 2 or weight.shape[-1] % formats.CODE_BLOCK):
            moment = dtype
        return Format(dtype, moment, master if dtype == torch.bfloat16 else "none")

    def state_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a weight's state; zeros before its first step."""
        state = self.state[weight]
        if not state:
            if weight.grad is not None and weight.grad.is_sparse:
                raise RuntimeError("AdamW does not support sparse gradients: use torch.optim.SparseAdam for embeddings")
            found = self.format_of(weight)
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in AVERAGES:
                zero = torch.zeros_like(local(weight), dtype=torch.float32, memory_format=torch.contiguous_format)
                state |= self._stored(weight, name, zero, found)
            if found.master == "exact":
                state[LOWER] = _placed_like(weight, torch.zeros_like(local(weight), dtype=torch.int16))
        return state

    def _stored(self, weight: Tensor, name: str, value: Tensor, found: Format) -> dict[str, Tensor]:
        """Return the state's entries for a moment of this rank's part of a weight, given in any floating dtype."""
        if found.moment == torch.uint8:
            codes, scale = formats.encode(value.float(), signed=SIGNED[name])
            return {name: _placed_like(weight, codes), f"{name}_scale": _placed_like(weight, scale)}
        return {name: _placed_like(weight, value.to(found.moment).contiguous())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if unsupported := [name for name in ("amsgrad", "maximize") if any(group.get(name) for group in groups)]:
            raise ValueError(f"the state is from an AdamW with {' and '.join(unsupported)}: must be without")
        super().load_state_dict({**state_dict, "state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            if number in state_dict["state"]:
                self.state[weight] = self._adopted(weight, state_dict["state"][number])

    def _adopted(self, weight: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Return a saved state in this optimizer's formats and on the weight's device."""
        found, device = self.format_of(weight), local(weight).device
        state = {"step": torch.as_tensor(saved["step"], dtype=torch.float32).cpu()}
        for name in AVERAGES:
            value, scale = local(saved[name]).to(device), saved.get(f"{name}_scale")
            if scale is not None and found.moment == torch.uint8:
                state |= {name: _placed_like(weight, value.contiguous())}
                state |= {f"{name}_scale": _placed_like(weight, local(scale).to(device).contiguous())}
                continue
            if scale is not None:
                value = formats.decode(value, local(scale).to(device), signed=SIGNED[name])
            state |= self._stored(weight, name, value, found)
        if found.master == "exact":
            lower = local(saved[LOWER]).to(device) if LOWER in saved else torch.zeros_like(local(weight))
            state[LOWER] = _placed_like(weight, lower.to(torch.int16).contiguous())
        return state

    # -- step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group_number, group in enumerate(self.param_groups):
            numbers = {id(weight): first + i for i, weight in enumerate(group["params"])}
            first += len(numbers)
            for index, ((step, found), weights) in enumerate(self._alike(group["params"]).items()):
                update = self._launch if local(weights[0]).is_cuda else self._compute
                update((group_number, index), group, step, found, weights, [numbers[id(weight)] for weight in weights])
        self.grad_scale = None
        return loss

    def _alike(self, parameters: list[Tensor]) -> dict[tuple[int, Format], list[Tensor]]:
        """Group the weights that have a gradient by their steps, including this one, and their formats."""
        weights = [parameter for parameter in parameters if parameter.grad is not None]
        groups: dict[tuple[int, Format], list[Tensor]] = {}
        if weights:
            steps = [self.state_of(weight)["step"] for weight in weights]
            torch._foreach_add_(steps, 1)
            for step, weight in zip(torch.stack(steps).tolist(), weights, strict=True):
                groups.setdefault((int(step), self.format_of(weight)), []).append(weight)
        return groups

    def _compute(
        self,
        place: tuple[int, int],
        group: dict[str, Any],
        step: int,
        found: Format,
        weights: list[Tensor],
        numbers: list[int],
    ) -> None:
        """Update the weights with PyTorch's AdamW in fp32, a chunk at a time."""
        for weight, number in zip(weights, numbers, strict=True):
            _check_tensors([local(weight)], found.weight, local(weight).device)
            tensors = {name: local(value) for name, value in self.state[weight].items() if name != "step"}
            tensors |= {"weight": local(weight), "gradient": local(weight.grad).contiguous()}
            draws = Draws(self.defaults["seed"], step, number, 2 * _part(weight))
            for start in range(0, local(weight).numel(), CHUNK):
                chunk = {name: _chunk(tensor, start, "scale" in name) for name, tensor in tensors.items()}
                self._compute_chunk(chunk, group, step, found, draws.first(start))

    def _compute_chunk(
        self, chunk: dict[str, Tensor], group: dict[str, Any], step: int, found: Format, draws: Draws
    ) -> None:
        weight = chunk["weight"]
        master = formats.join_master(weight, chunk[LOWER]) if found.master == "exact" else weight.float()
        gradient = chunk["gradient"].float()
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale.to(gradient)
        averages = [_moment(chunk, name) for name in AVERAGES]
        adamw(
            [master], [gradient], [averages[0]], [averages[1]], [], [torch.tensor(step - 1.0)],
            fused=weight.device.type == "cpu", amsgrad=False, maximize=False, beta1=group["betas"][0],
            beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        if found.master == "exact":
            rounded, lower = formats.split_master(master)
            weight.copy_(rounded)
            chunk[LOWER].copy_(lower)
        elif found.master == "stochastic":
            weight.copy_(formats.round_stochastic(master, draws.bits(master, stream=1)))
        else:
            weight.copy_(master)
        words = draws.words(master, stream=0) if found.moment == torch.bfloat16 else None
        for shift, name, average in zip((0, 16), AVERAGES, averages, strict=True):
            if found.moment == torch.uint8:
                codes, scale = formats.encode(average, signed=SIGNED[name])
                chunk[name].copy_(codes)
                chunk[f"{name}_scale"].copy_(scale)
            elif words is not None:
                chunk[name].copy_(formats.round_stochastic(average, (words >> shift & 0xFFFF).to(torch.int32)))
            else:
                chunk[name].copy_(average)

    def _launch(
        self,
        place: tuple[int, int],
        group: dict[str, Any],
        step: int,
        found: Format,
        weights: list[Tensor],
        numbers: list[int],
    ) -> None:
        """Update the weights by one kernel."""
        from flash_train.optim import kernel

        own = [local(weight) for weight in weights]
        sizes = [weight.numel() for weight in own]
        if not sum(sizes):  # this rank has no part of these weights
            return
        gradients = [local(weight.grad).contiguous() for weight in weights]
        names = [*AVERAGES, *(f"{name}_scale" for name in AVERAGES), LOWER]
        states = [[local(self.state[weight][name]) if name in self.state[weight] else None for weight in weights]
                  for name in names]  # fmt: skip
        device = own[0].device
        key = (*place, found, device)
        table = self._tables.get(key)
        if table is None or (table.sizes, table.numbers) != (sizes, numbers):
            table = self._tables[key] = kernel.BlockTable.of(sizes, numbers, device)
        tensors = [*own, *gradients, *(tensor for state in states for tensor in state)]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if addresses != table.address_values:  # mostly equal: the allocator reuses the memory of the last gradients
            _check_tensors([*own, *gradients], found.weight, device)
            _check_tensors([*states[0], *states[1]], found.moment, device)
            table.set_addresses(addresses)
        scale = None if self.grad_scale is None else self.grad_scale.to(device, torch.float32, non_blocking=True)
        (beta1, beta2), lr, seed = group["betas"], group["lr"], self.defaults["seed"]
        with torch.cuda.device_of(own[0]):
            kernel.adamw_kernel[(len(table.tensor),)](
                table.addresses, len(weights), table.device_sizes, table.device_numbers, table.tensor, table.start,
                scale, lr * group["weight_decay"], lr / (1 - beta1**step), beta1, beta2, (1 - beta2**step) ** -0.5,
                group["eps"], step, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 2 * _part(weights[0]),
                WEIGHT=kernel.TYPES[found.weight], MOMENT=kernel.TYPES[found.moment], MASTER=found.master,
                ALIGNED=table.aligned, PLANE=kernel.PLANE, num_warps=2, enable_fp_fusion=True,
            )  # fmt: skip


class Draws(NamedTuple):
    """Random bits of a weight's step, from some block of the weight on."""

    seed: int
    step: int
    number: int
    first_stream: int
    block: int = 0

    def first(self, start: int) -> Draws:
        """Return the same from the element `start` on, a multiple of `formats.DRAW_BLOCK`."""
        return self._replace(block=start // formats.DRAW_BLOCK)

    def words(self, like: Tensor, *, stream: int) -> Tensor:
        """Return a random 32-bit word for each element of a vector, int64."""
        return formats.random_words(
            len(like), seed=self.seed, step=self.step, number=self.number, stream=self.first_stream + stream,
            block=self.block, device=like.device,
        )  # fmt: skip

    def bits(self, like: Tensor, *, stream: int) -> Tensor:
        """Return 16 random bits for each element of a vector, int32."""
        return (self.words(like, stream=stream) & 0xFFFF).to(torch.int32)


def _chunk(tensor: Tensor, start: int, is_scale: bool) -> Tensor:
    """Return the part of a contiguous tensor that belongs to the elements from `start` on, as a vector."""
    per = formats.CODE_BLOCK if is_scale else 1
    return tensor.view(-1)[start // per : (start + CHUNK) // per]


def has_kernel(parameters: list[nn.Parameter]) -> bool:
    """Whether one kernel can update these weights."""
    devices = {parameter.device for parameter in parameters}
    on_one_gpu = len(devices) == 1 and all(device.type == "cuda" for device in devices)
    if not on_one_gpu or not importlib.util.find_spec("triton"):
        return False
    from flash_train.optim.kernel import TYPES

    return all(parameter.dtype in TYPES and local(parameter).is_contiguous() for parameter in parameters)


def _moment(state: dict[str, Tensor], name: str) -> Tensor:
    """Return a moment in fp32; a new tensor, unless it is stored in fp32."""
    if f"{name}_scale" in state:
        return formats.decode(state[name], state[f"{name}_scale"], signed=SIGNED[name])
    return state[name].float()


def _placed_like(weight: Tensor, own: Tensor) -> Tensor:
    """Return this rank's part as a tensor that is sharded as a weight is; the last dimension may differ."""
    if not isinstance(weight, DTensor):
        return own
    shape = torch.Size((*weight.shape[:-1], own.shape[-1])) if weight.dim() > 1 else weight.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride)


def _part(weight: Tensor) -> int:
    """Return which part of a sharded weight this rank has; 0 for a whole one."""
    part = 0
    if isinstance(weight, DTensor):
        for dim, placement in enumerate(weight.placements):
            if placement.is_shard():
                part = part * weight.device_mesh.size(dim) + weight.device_mesh.get_local_rank(dim)
    return part


def _check_tensors(tensors: list[Tensor | None], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse tensors without the dtype, device and layout that the kernel assumes: it gets only addresses."""
    for tensor in tensors:
        if tensor is None or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            found = "missing" if tensor is None else f"{tensor.dtype} on {tensor.device}"
            raise ValueError(
                f"AdamW was built for other weights: {dtype} on {device}, and a tensor is {found}; build the optimizer "
                "after the model is moved and cast"
            )
