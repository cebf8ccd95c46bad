"""Inputs of blocks in the host's memory, from a block's forward to its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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


class _OnHost:
    """A placeholder in the autograd graph for a block's input, which is on the host.

    Attributes:
        memory: a list with the memory that holds the input, or an empty one after a later forward has taken it.
        arriving: the copy on the GPU and the event after which it is complete, once it was fetched.
    """

    def __init__(self, block: int, memory: Tensor) -> None:
        self.block, self.memory = block, [memory]
        self.arriving: tuple[Tensor, Event] | None = None


class HostInputs:
    """Copies a block's input to the host during its forward, and back during the backward of the next block.

    The host memory is pinned. A forward takes the memory of inputs whose backward has run, or whose graph is gone, and
    allocates more only if there is none. At most two of the inputs are on the GPU at a time: the input of the running
    block, and one that is being copied.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._taken: list[weakref.ref[_OnHost]] = []  # inputs that a backward has asked for
        self._sent: dict[int, weakref.ref[_OnHost]] = {}  # the newest input of each block
        self._moving: list[tuple[Tensor, Event]] = []  # inputs on the GPU that are copied, and when that is complete
        self._streams: dict[torch.device, tuple[CopyStream, CopyStream]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostInputs:
        return HostInputs()  # a copy of the model has a graph of its own

    def __reduce__(self) -> tuple[type[HostInputs], tuple[()]]:
        return HostInputs, ()

    @contextmanager
    def keeping(self, block: int, x: Tensor) -> Iterator[None]:
        """Let autograd keep the input ``x`` of a block in the host's memory, for a forward that runs again."""
        address, shape, device = x.data_ptr(), x.shape, x.device  # the graph holds the functions, which must not hold x

        def pack(saved: Tensor) -> Any:
            if saved.data_ptr() != address or saved.shape != shape:
                return saved
            return self._send(block, saved)

        def unpack(saved: Any) -> Tensor:
            return self._take(saved, device) if isinstance(saved, _OnHost) else saved

        with saved_tensors_hooks(pack, unpack):
            yield

    def settle(self) -> None:
        """Free the inputs that are copied; what follows is computed after that.

        One is on its way to the host. After a backward that ended early, others may be on their way to the GPU.
        """
        for x, copied in self._moving:
            compute_after(copied, x.device)
        self._moving.clear()

    def fetch_before(self, block: int, output: Tensor) -> None:
        """Begin to copy a block's input back when the gradient of a later block's output is known."""
        device, sent = output.device, self._sent.get(block)

        def fetch(gradient: Tensor) -> None:
            if sent is not None and (place := sent()) is not None and place.memory:
                self._fetch(place, device)

        output.register_hook(fetch)

    def _send(self, block: int, x: Tensor) -> _OnHost:
        self.settle()
        memory = self._memory_for(x)
        stream, _ = self._streams_of(x.device)
        stream.wait(computed(x.device))
        with stream.running():
            memory.copy_(x.detach(), non_blocking=True)
        self._moving.append((x.detach(), stream.event()))
        place = _OnHost(block, memory)
        weakref.finalize(place, self._free.extend, place.memory).atexit = False
        self._sent[block] = weakref.ref(place)
        return place

    def _memory_for(self, x: Tensor) -> Tensor:
        """Return memory on the host that no backward needs any more, or new memory."""
        while self._taken:  # their graphs may still exist, as the loss of the step before does in many loops
            if (place := self._taken.pop()()) is not None:
                self._free += place.memory
                place.memory.clear()
        for i, memory in enumerate(self._free):
            if memory.shape == x.shape and memory.dtype == x.dtype:
                return self._free.pop(i)
        self._free.clear()  # of other shapes
        return empty_on_host(x.shape, x.dtype)

    def _fetch(self, place: _OnHost, device: torch.device) -> tuple[Tensor, Event]:
        if place.arriving is None:
            if not place.memory:
                raise RuntimeError(
                    f"memory.offload: a later forward has taken the host memory of the input of block {place.block}; "
                    "run a second backward (retain_graph=True) before the next forward"
                )
            (memory,) = place.memory
            x = torch.empty(memory.shape, dtype=memory.dtype, device=device)
            _, stream = self._streams_of(device)
            stream.wait(computed(device))  # the memory of x may still be in use
            with stream.running():
                x.copy_(memory, non_blocking=True)
            place.arriving = x, stream.event()
            self._moving.append(place.arriving)
        return place.arriving

    def _take(self, place: _OnHost, device: torch.device) -> Tensor:
        x, arrived = self._fetch(place, device)
        self._moving = [moving for moving in self._moving if moving is not place.arriving]
        place.arriving = None
        self._taken.append(weakref.ref(place))
        compute_after(arrived, device)
        return x

    def _streams_of(self, device: torch.device) -> tuple[CopyStream, CopyStream]:
        if device not in self._streams:
            self._streams[device] = CopyStream(device), CopyStream(device)
        return self._streams[device]
