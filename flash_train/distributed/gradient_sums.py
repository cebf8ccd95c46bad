"""Sums of sharded gradients over the ranks of one machine: bf16 on the way, fp32 in the sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

PIECE = 2**27  # bytes that a rank receives at a time
_REDUCE: dict[Any, Any] = {ReduceOp.SUM: torch.sum, ReduceOp.AVG: torch.mean}  # both add in fp32


class GradientSums:
    """Replaces FSDP2's reduce-scatter by an all-to-all: each rank gets every rank's gradient of its own shard.

    The rank adds them in fp32 and rounds once, as a reduce-scatter in fp32 does, but sends half as many bytes and needs
    no fp32 copy. NCCL's bf16 reduce-scatter would round at every rank. Between machines NCCL's would still be faster,
    because it sends each sum only once.

    It also decides where a gradient's memory comes from. PyTorch's allocator has a pool for each CUDA stream. In the
    pool of the reduction's stream, this memory would lie idle while activations fill the device. So a gradient that
    lives to the end of the step is from the pool of the stream that computes.

    Args:
        module: its weights are gathered together; FSDP gathers some modules in it separately.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = list(_own_weights(module))
        self._computes: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input of a reduction, and at the next call its output.

        FSDP calls this in the stream that computes, and then in the reduction's.
        """
        stream, self._computes = self._computes, None
        if device.type != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        if stream is None:
            self._computes = torch.cuda.current_stream(device)
        elif not self.adds():
            # The reduction's stream waits for all work that the computing stream has queued so far. After it,
            # nothing uses the earlier contents of this memory.
            with torch.cuda.stream(stream):
                return torch.empty(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, device=device)

    def adds(self) -> bool:
        """Whether FSDP adds the output to earlier gradients, and then frees it in the reduction's stream."""
        weights = [getattr(module, name) for module, name in self._weights]
        return any(not isinstance(weight, DTensor) or weight.grad is not None for weight in weights)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum or the mean over the ranks to ``output_tensor``, (n,); the input is (ranks * n,)."""
        ranks = group.size()
        parts = input_tensor.view(ranks, -1)
        length = min(parts.shape[1], max(1, PIECE // (ranks * parts.element_size())))
        received = torch.empty((ranks, length), dtype=parts.dtype, device=parts.device)
        for sent, out in zip(parts.split(length, 1), output_tensor.split(length), strict=True):
            piece = received[:, : len(out)]
            dist.all_to_all(list(piece), list(sent), group=group)
            _REDUCE[op](piece, 0, out=out)


def _own_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules and names of the weights that FSDP gathers with this module."""
    for name, _ in module.named_parameters(recurse=False):  # no biases that are None
        yield module, name
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_weights(child)
