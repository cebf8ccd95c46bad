"""Inputs of blocks in the host's memory, from a block's forward to its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flash_train.host_memory import CopyStream, Event, compute_after, computed, empty_on_host


def blocks_on_host(n_layers: int, recomputed: int, share: float) -> int:
    """Return how many blocks have their input in the host's memory: the first ones, whose backward comes last.

    Args:
        recomputed: blocks that run again in the backward, and so keep little else than their input.
        share: of all blocks, 0 to 1. The last block's input stays on the GPU, since its backward comes at once.
    """
    return min(round(share * n_layers), recomputed, n_layers - 1)


@dataclass(frozen=True)
class _OnHost:
    """A placeholder in the autograd graph for a block's input, which is on the host."""

    block: int


class HostInputs:
    """Copies a block's input to the host during its forward, and back during the backward of the next block.

    The host memory is pinned, allocated once, and used again in each step. At most two of the inputs are on the GPU at
    a time: the input of the running block, and one that is being copied.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}  # by block
        self._leaving: tuple[Tensor, Event] | None = None  # an input that is copied to the host
        self._sent: set[int] = set()  # blocks whose input the backward has not asked for
        self._arriving: dict[int, tuple[Tensor, Event]] = {}
        self._streams: dict[torch.device, tuple[CopyStream, CopyStream]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostInputs:
        return HostInputs()  # a copy of the model has a graph of its own

    @contextmanager
    def keeping(self, block: int, x: Tensor) -> Iterator[None]:
        """Let autograd keep the input ``x`` of a block in the host's memory, for a forward that runs again."""
        address, shape, device = x.data_ptr(), x.shape, x.device  # the graph holds the functions, which must not hold x

        def pack(saved: Tensor) -> Any:
            if saved.data_ptr() != address or saved.shape != shape:
                return saved
            self._send(block, saved)
            return _OnHost(block)

        def unpack(saved: Any) -> Tensor:
            return self._take(saved.block, device) if isinstance(saved, _OnHost) else saved

        with saved_tensors_hooks(pack, unpack):
            yield

    def settle(self) -> None:
        """Free the input that is on its way to the host; what follows is computed after it has arrived."""
        if self._leaving is not None:
            compute_after(self._leaving[1])
            self._leaving = None

    def fetch_before(self, block: int, output: Tensor) -> None:
        """Begin to copy a block's input back when the gradient of a later block's output is known."""
        device = output.device
        output.register_hook(lambda gradient: self._fetch(block, device) if block in self._sent else None)

    def _send(self, block: int, x: Tensor) -> None:
        self.settle()
        memory = self._memory.get(block)
        if memory is None or memory.shape != x.shape or memory.dtype != x.dtype:
            memory = self._memory[block] = empty_on_host(x.shape, x.dtype)
        stream, _ = self._streams_of(x.device)
        stream.wait(computed(x.device))
        with stream.running():
            memory.copy_(x.detach(), non_blocking=True)
        self._leaving = x.detach(), stream.event()
        self._sent.add(block)

    def _fetch(self, block: int, device: torch.device) -> None:
        if block in self._arriving:
            return
        memory = self._memory[block]
        x = torch.empty(memory.shape, dtype=memory.dtype, device=device)
        _, stream = self._streams_of(device)
        stream.wait(computed(device))  # the memory of x may still be in use
        with stream.running():
            x.copy_(memory, non_blocking=True)
        self._arriving[block] = x, stream.event()

    def _take(self, block: int, device: torch.device) -> Tensor:
        self._fetch(block, device)
        x, arrived = self._arriving.pop(block)
        self._sent.discard(block)
        compute_after(arrived)
        return x

    def _streams_of(self, device: torch.device) -> tuple[CopyStream, CopyStream]:
        if device not in self._streams:
            self._streams[device] = CopyStream(device), CopyStream(device)
        return self._streams[device]
