"""Shards a module's weights over a mesh with FSDP2, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.overrides import TorchFunctionMode

from flash_train.distributed.gradient_sums import GradientSums
from flash_train.distributed.mesh import SHARD

# Methods that Lightning calls instead of `forward`; each must gather the weights that no block holds.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    device: torch.device,
    *,
    exchanges_gradients: bool = False,
) -> None:
    """Shard each block of a module over the mesh, then the remaining weights together.

    The blocks are the elements of the outermost ``nn.ModuleList`` and ``nn.Sequential`` containers. All ranks get the
    first rank's weights; those on the meta device stay there. No rank holds more than one whole block on ``device``.

    Args:
        module: its parameters become ``DTensor``.
        mesh: (shard,), or (replicate, shard).
        policy: dtypes of the gathered weights and of the reduction of gradients.
        device: where the shards live.
        exchanges_gradients: sum gradients with `GradientSums`; the policy must reduce in the gradients' dtype.
    """
    for block in blocks_of(module):
        _move(block, device)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    _move(module, device)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if exchanges_gradients and isinstance(part, FSDPModule):
            part.set_custom_reduce_scatter(GradientSums(part))  # type: ignore[arg-type]
    for name in STEPS:
        register_fsdp_forward_method(module, name)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with weights in the outermost containers of a module."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from blocks_of(child)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the tensors that are not yet sharded to the device, with the values of the first rank."""

    def moved(x: Tensor) -> Tensor:
        if isinstance(x, DTensor) or x.is_meta:
            return x
        x = x.to(device)
        dist.broadcast(x.detach(), 0)
        return x

    module._apply(moved)


def materialize(module: nn.Module, device: torch.device, *, loads_state: bool = False) -> None:
    """Allocate and fill the tensors of a module that are on the meta device; the others keep their values.

    ``module.initialize_weights()`` fills them if there is such a method, else the ``reset_parameters()`` of each
    submodule that has some of them, in itself or further down.

    Args:
        device: where to allocate.
        loads_state: a checkpoint is loaded afterwards, so that what is in ``module.state_dict()`` needs no values.

    Raises:
        ValueError: nothing fills a tensor.
    """
    empty = {name for name, x in (*module.named_parameters(), *module.named_buffers()) if x.is_meta}
    if not empty:
        return
    initialize: Any = getattr(module, "initialize_weights", None)
    fills: list[tuple[nn.Module | None, Any]] = []
    unfilled = set(empty)
    if initialize is not None:
        fills, unfilled = [(None, initialize)], set()
    else:
        for prefix, part in module.named_modules():
            own = {name for name in empty if not prefix or name.startswith(f"{prefix}.")}
            fill = getattr(part, "reset_parameters", None)
            if own and fill is not None:
                fills.append((part, fill))
                unfilled -= own
    if loads_state:
        unfilled -= module.state_dict().keys()
    if unfilled:
        raise ValueError(
            f"{', '.join(sorted(unfilled)[:5])}: on the meta device, and nothing fills it; "
            f"give {type(module).__name__} a method initialize_weights(), or the submodule reset_parameters()"
        )
    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    with WholeDraws():
        for filled, fill in fills:
            with nullcontext() if filled is None else _whole_weights(filled):
                fill()


@contextmanager
def _whole_weights(part: nn.Module) -> Iterator[None]:
    """Give a module whole tensors in the place of its own sharded weights, and then the weights their new values.

    A part of a sharded weight, as the row ``weight[padding_idx]``, is a copy: nothing that is written to it stays.
    """
    own: dict[str, Any] = {
        name: weight for name, weight in part.named_parameters(recurse=False) if isinstance(weight, DTensor)
    }
    for name, weight in own.items():
        part.register_parameter(name, nn.Parameter(weight.detach().full_tensor(), weight.requires_grad))
    yield
    for name, weight in own.items():
        whole = part.get_parameter(name).detach()
        part.register_parameter(name, weight)
        weight.detach().copy_(shard_like(whole, weight))


class WholeDraws(TorchFunctionMode):
    """Makes random fills of sharded tensors draw the whole tensor; each rank keeps its part.

    So all ranks draw the values that one device draws, and their generators stay equal.
    """

    FILLS: frozenset[Any] = frozenset(
        (
            *(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.random_),
            *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),  # PyTorch reports these instead
        )
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in self.FILLS:
            return func(*args, **kwargs)
        target: Any
        target, *others = args or (kwargs.pop("tensor"),)
        if not isinstance(target, DTensor):
            return func(target, *others, **kwargs)
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.to_local().device)
        with torch.no_grad():
            return target.copy_(shard_like(func(whole, *others, **kwargs), target))


def load_state(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Load whole or sharded tensors into a module that may be sharded; each rank reads its own part of whole ones."""
    own = module.state_dict()
    module.load_state_dict({name: like(value, own.get(name)) for name, value in state.items()}, strict=strict)


def like(value: Any, own: Any) -> Any:
    """Shard a whole tensor as a sharded one of the same shape is; return other values as they are."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    return shard_like(value, own) if value.shape == own.shape else value


def shard_like(whole: Tensor, target: DTensor) -> DTensor:
    """Return this rank's part of a whole tensor, sharded as ``target`` is and in its dtype."""
    whole = whole.to(target.dtype)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def state_zeros(parameter: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return memory for an entry of a parameter's optimizer state, sharded as the parameter is.

    Args:
        shape: of the whole entry; only the last dimension may have another size than the parameter's. The ranks that
            share this dimension have equal parts of it then.
        device: None: the parameter's.
    """
    own = local(parameter)
    size = own.shape if isinstance(parameter, DTensor) else shape
    if isinstance(parameter, DTensor) and len(shape) > 1 and shape[-1] != parameter.shape[-1]:
        size = torch.Size((*size[:-1], shape[-1] // parts_of(parameter, parameter.dim() - 1)))
    return place_as(parameter, torch.zeros(size, dtype=dtype, device=device or own.device))


def state_like(value: Any, parameter: Tensor, device: torch.device | None) -> Any:
    """Shard a whole tensor of a parameter's optimizer state as the parameter is; return other values as they are.

    Args:
        value: such a tensor has a row for each row of the parameter. Only its last dimension may have another size.
        device: where this rank's part is to be, maybe as a view of ``value``; None: the parameter's, and the part has
            memory of its own.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    if value.dim() == 0 or value.shape[0] != parameter.shape[0]:
        return value
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            size, rank = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
            each = -(-value.shape[placement.dim] // size)
            value = value[(slice(None),) * placement.dim + (slice(rank * each, (rank + 1) * each),)]
    if device is None:  # a view would keep the whole tensor, and the file that it may be mapped from
        value = value.to(local(parameter).device, copy=True, memory_format=torch.contiguous_format)
    return place_as(parameter, value if device is None else value.to(device))


def place_as(parameter: Tensor, own: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded as a parameter is; only the last dimension may have another size.

    The ranks that share a last dimension of another size have equal parts of it. The part stays where it is, also in
    the host's memory if the parameter is on a GPU.
    """
    if not isinstance(parameter, DTensor):
        return own
    shape = parameter.shape
    if parameter.dim() > 1 and own.shape[-1] != parameter.to_local().shape[-1]:
        shape = torch.Size((*shape[:-1], own.shape[-1] * parts_of(parameter, parameter.dim() - 1)))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), own.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(own, spec, requires_grad=False)  # `from_local` would move it to the parameter's device


def parts_of(x: Tensor, dim: int) -> int:
    """Return into how many parts the ranks divide a dimension of a tensor; 1 if it is not sharded."""
    if not isinstance(x, DTensor):
        return 1
    sharded = (x.device_mesh.size(i) for i, place in enumerate(x.placements) if getattr(place, "dim", None) == dim)
    return math.prod(sharded)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def shard_group(tensors: Sequence[Tensor]) -> ProcessGroup | None:
    """Return the ranks that together hold the whole of sharded tensors; None if no tensor is sharded.

    Raises:
        ValueError: some tensors are sharded and some are not, or over other ranks.
    """
    meshes = {x.device_mesh if isinstance(x, DTensor) else None for x in tensors}
    if len(meshes) > 1:
        raise ValueError("the weights must all be sharded over the same ranks, or none of them")
    mesh = meshes.pop()
    return None if mesh is None else mesh.get_group(SHARD)


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)
