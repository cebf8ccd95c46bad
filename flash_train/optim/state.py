"""The optimizer's state of a weight: its entries, and how they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flash_train.distributed.sharding import local, place_as
from flash_train.host_memory import to_host
from flash_train.optim import formats

AVERAGES = ("exp_avg", "exp_avg_sq")  # the names in PyTorch's optimizer state
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
SCALES = {name: f"{name}_scale" for name in AVERAGES}
LOWER = "weight_lower"
# Elements whose state a step brings from the host to the GPU at a time, a multiple of the kernel's block. There are two
# such sets on the GPU.
STAGED = 2**25


class Format(NamedTuple):
    """How a weight and its state are stored.

    Attributes:
        weight, moment: dtypes; uint8 stands for codes.
        master: exact, stochastic or none.
        on_host: whether the state is in the host's memory while the weight is on a GPU.
    """

    weight: torch.dtype
    moment: torch.dtype
    master: str
    on_host: bool = False


State = dict[str, Tensor]


def new_state(weight: Tensor, storage: Format) -> State:
    """Return the state before the first step."""
    own = local(weight)
    device = torch.device("cpu") if storage.on_host else own.device
    state: State = {}
    for name in AVERAGES:
        if storage.moment == torch.uint8:
            zero, blocks = 127 if SIGNED[name] else 0, own.shape[-1] // formats.CODE_BLOCK
            state[name] = torch.full(own.shape, zero, dtype=torch.uint8, device=device)
            state[SCALES[name]] = torch.zeros((*own.shape[:-1], blocks), dtype=torch.float32, device=device)
        else:
            state[name] = torch.zeros(own.shape, dtype=storage.moment, device=device)
    if storage.master == "exact":
        state[LOWER] = torch.zeros(own.shape, dtype=torch.int16, device=device)
    return {"step": torch.zeros((), dtype=torch.float32), **_placed(weight, state, storage)}


def adopted_state(weight: Tensor, saved: dict[str, Any], storage: Format) -> State:
    """Convert a saved state of any format to the format ``storage``, on the device where that keeps it.

    It keeps no part of a larger tensor in ``saved``, and no file that ``saved`` is mapped from.

    Raises:
        ValueError: the state is of a weight with another shape.
    """
    own = local(weight)
    if (shape := local(saved["exp_avg"]).shape) != own.shape:
        raise ValueError(
            f"AdamW: the state is of a weight of shape {tuple(shape)}, and the weight has {tuple(own.shape)}: must be "
            "equal; the state belongs to other weights, or to the same ones in another order"
        )
    state: State = {}
    device = torch.device("cpu") if storage.on_host else own.device
    for name in AVERAGES:
        value, scale = local(saved[name]).to(device), saved.get(SCALES[name])
        if scale is not None:
            scale = local(scale).to(device)
            if storage.moment == torch.uint8:
                state |= {name: value, SCALES[name]: scale}
                continue
            value = formats.decode(value, scale, signed=SIGNED[name])
        if storage.moment == torch.uint8:
            state[name], state[SCALES[name]] = formats.encode(value.float(), signed=SIGNED[name])
        else:
            state[name] = value.to(storage.moment)
    if storage.master == "exact":
        lower = local(saved[LOWER]) if LOWER in saved else torch.zeros(own.shape, dtype=torch.int16)
        state[LOWER] = lower.to(device, torch.int16)
    if not storage.on_host:  # the copy to the host's memory is contiguous
        state = {name: _owned(value) for name, value in state.items()}
    step = torch.as_tensor(saved["step"], dtype=torch.float32).cpu()
    return {"step": step.clone(), **_placed(weight, state, storage)}


def without_codes(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with 8-bit moments as fp32 numbers, for `torch.optim.AdamW.load_state_dict`.

    The further bits of exact bf16 weights are left out, since PyTorch's AdamW has no use for them.
    """

    def plain(saved: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in saved.items() if name not in (*SCALES.values(), LOWER)}
        for name, scale in SCALES.items():
            if scale in saved:
                numbers = formats.decode(local(saved[name]), local(saved[scale]), signed=SIGNED[name])
                found[name] = place_as(saved[name], numbers)
        return found

    return {**state_dict, "state": {number: plain(saved) for number, saved in state_dict["state"].items()}}


def exact_weights(weights: Mapping[str, Tensor], state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return weights by name; bf16 ones with an exact master become the fp32 numbers that they were rounded from.

    Args:
        state_dict: an optimizer's. Only weights whose names it has (``param_names``) are found in it.
        prefix: begins the names in ``weights``, but not those in ``state_dict``.
    """
    found = dict(weights)
    for group in state_dict["param_groups"]:
        for name, number in zip(group.get("param_names", ()), group["params"], strict=False):
            lower, weight = state_dict["state"].get(number, {}).get(LOWER), found.get(prefix + name)
            if lower is not None and weight is not None and weight.dtype == torch.bfloat16:
                found[prefix + name] = formats.join_master(weight.contiguous(), lower)
    return found


def part_of(weight: Tensor) -> int:
    """Return which part of a sharded weight this rank has; 0 for a whole one."""
    part = 0
    if isinstance(weight, DTensor):
        for dim, placement in enumerate(weight.placements):
            if placement.is_shard():
                part = part * weight.device_mesh.size(dim) + weight.device_mesh.get_local_rank(dim)
    return part


def _owned(x: Tensor) -> Tensor:
    """Return a contiguous tensor that keeps no other memory: neither a larger tensor nor a file on the disk."""
    is_part = x.untyped_storage().nbytes() != x.nbytes
    return x.clone(memory_format=torch.contiguous_format) if is_part or x.is_cpu else x.contiguous()


def _placed(weight: Tensor, own: State, storage: Format) -> State:
    """Return this rank's parts as tensors that are sharded as the weight is."""
    if storage.on_host:
        own = {name: to_host(value) for name, value in own.items()}
    return {name: place_as(weight, value) for name, value in own.items()}
