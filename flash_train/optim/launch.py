"""Launches of AdamW's kernel: over all weights at once, or over pieces whose state comes from the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_train.host_memory import CopyStream, Event, compute_after, computed
from flash_train.optim import kernel
from flash_train.optim.formats import CODE_BLOCK
from flash_train.optim.state import AVERAGES, LOWER, SCALES, STAGED
from flash_train.optim.update import Update

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # of the compiler; see `_launch`
STATE_NAMES = (*AVERAGES, *SCALES.values(), LOWER)  # in the order of the kernel's addresses


class Piece(NamedTuple):
    """Elements of a weight, from a multiple of the kernel's block on."""

    weight: int
    first: int
    elements: int


class Launcher:
    """Launches the kernel, and keeps its tables from one step to the next."""

    def __init__(self) -> None:
        self._tables: dict[Any, BlockTable] = {}

    def __call__(self, update: Update) -> None:
        if not sum(weight.numel() for weight in update.weights):  # this rank has no part of these weights
            return
        if update.storage.on_host:
            self._launch_pieces(update)
        else:
            whole = [Piece(number, 0, weight.numel()) for number, weight in enumerate(update.weights)]
            states = [[_address(state.get(name)) for state in update.states] for name in STATE_NAMES]
            self._launch(update, (), whole, states)

    def _launch_pieces(self, update: Update) -> None:
        """Copy the state of a bucket to the GPU, update its weights, and copy it back, while other buckets are copied.

        The next copies to the GPU run during the kernel and during the copies back: PCIe carries both ways at once.
        """
        device = update.weights[0].device
        buckets = into_buckets([weight.numel() for weight in update.weights], STAGED)
        elements = max(sum(_whole_blocks(piece.elements) for piece in bucket) for bucket in buckets)
        stages = [Stage(update, device, elements) for _ in buckets[:2]]
        to_gpu, to_host = CopyStream(device), CopyStream(device)
        for number, pieces in enumerate(buckets):
            stage = stages[number % 2]
            to_gpu.wait(stage.is_free)
            with to_gpu.running():
                stage.load(update, pieces)
            compute_after(to_gpu.event(), device)
            states = [[stage.address(name, piece) for piece in stage.places(pieces)] for name in STATE_NAMES]
            self._launch(update, (number,), pieces, states)
            to_host.wait(computed(device))
            with to_host.running():
                stage.store(update, pieces)
            stage.is_free = to_host.event()
        compute_after(to_host.event(), device)  # then the buffers are free

    def _launch(
        self, update: Update, key: tuple[int, ...], pieces: Sequence[Piece], states: Sequence[Sequence[int]]
    ) -> None:
        weights = [update.weights[piece.weight] for piece in pieces]
        gradients = [update.gradients[piece.weight] for piece in pieces]
        numbers = [update.numbers[piece.weight] for piece in pieces]
        device = weights[0].device
        name = (*update.key, *key, update.storage, device)
        table, layout = self._tables.get(name), ([weight.numel() for weight in weights], numbers, list(pieces))
        if table is None or table.layout != layout:
            table = self._tables[name] = BlockTable.of(*layout, device)
        addresses = [tensor.data_ptr() for tensor in (*weights, *gradients)]
        addresses += [address for each in states for address in each]
        if addresses != table.address_values:  # mostly equal: the allocator reuses the memory of the last gradients
            update.check()
            table.set_addresses(addresses)
        scale = update.grad_scale
        scale = None if scale is None else scale.to(device, torch.float32, non_blocking=True)
        (beta1, beta2), step, storage = update.betas, update.step, update.storage
        with torch.cuda.device_of(weights[0]):
            # Without fused multiply-adds: the compiler fuses other products in each format of the weights, and an exact
            # master must get the bits that an fp32 weight gets.
            kernel.adamw_kernel[(len(table.tensor),)](
                table.addresses, len(weights), table.device_sizes, table.device_numbers, table.tensor, table.start,
                scale, update.lr * update.weight_decay, update.lr / (1 - beta1**step), beta1, beta2,
                (1 - beta2**step) ** -0.5, update.eps, step, update.seed & 0xFFFFFFFF, update.seed >> 32 & 0xFFFFFFFF,
                2 * update.part, WEIGHT=kernel.TYPES[storage.weight], MOMENT=kernel.TYPES[storage.moment],
                MASTER=storage.master, ALIGNED=table.aligned, PLANE=kernel.PLANE, **OPTIONS,
            )  # fmt: skip


@dataclass
class BlockTable:
    """The table that maps each program to a weight and a block in it, and the addresses of the tensors."""

    layout: tuple[list[int], list[int], list[Piece]]
    device_sizes: Tensor
    device_numbers: Tensor
    tensor: Tensor
    start: Tensor
    addresses: Tensor | None = None
    address_values: list[int] | None = None
    aligned: bool = False

    @classmethod
    def of(cls, sizes: list[int], numbers: list[int], pieces: list[Piece], device: torch.device) -> BlockTable:
        counts = torch.tensor([triton.cdiv(piece.elements, kernel.BLOCK) for piece in pieces])
        first = torch.tensor([piece.first // kernel.BLOCK for piece in pieces])
        tensor = torch.arange(len(sizes)).repeat_interleave(counts)
        start = torch.arange(len(tensor)) - (counts.cumsum(0) - counts - first)[tensor]
        return cls(
            (sizes, numbers, pieces),
            torch.tensor(sizes).to(device),
            torch.tensor(numbers, dtype=torch.int32).to(device),
            tensor.int().to(device),
            start.int().to(device),
        )

    def set_addresses(self, addresses: list[int]) -> None:
        there = self.device_sizes.device
        pinned = torch.tensor(addresses, pin_memory=there.type == "cuda")
        self.addresses, self.address_values = pinned.to(there, non_blocking=True), addresses
        self.aligned = all(address % 16 == 0 for address in addresses)


def into_buckets(sizes: Sequence[int], most: int) -> list[list[Piece]]:
    """Divide weights into pieces, and the pieces into buckets of at most so many elements, a multiple of the block.

    Each piece but a weight's last is a multiple of the kernel's block.
    """
    buckets: list[list[Piece]] = [[]]
    left = most
    for number, size in enumerate(sizes):
        first = 0
        while first < size:
            if left == 0:
                buckets.append([])
                left = most
            count = min(size - first, left)
            buckets[-1].append(Piece(number, first, count))
            first, left = first + count, left - _whole_blocks(count)
    return buckets


def _whole_blocks(elements: int) -> int:
    """Round up to a multiple of the kernel's block."""
    return triton.cdiv(elements, kernel.BLOCK) * kernel.BLOCK


class Stage:
    """Memory on the GPU for the state of a bucket's elements, a multiple of the kernel's block.

    Attributes:
        is_free: an event after which nothing uses the memory. At first it marks the work queued before the allocation,
            later the copies to the host.
    """

    def __init__(self, update: Update, device: torch.device, elements: int) -> None:
        self.is_free: Event = computed(device)
        self._buffers = {
            name: torch.empty(elements // (CODE_BLOCK if name in SCALES.values() else 1), dtype=x.dtype, device=device)
            for name, x in update.states[0].items()
        }

    def places(self, pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
        """Return each piece with the place of its first element in the buffers."""
        found, place = [], 0
        for piece in pieces:
            found.append((piece, place))
            place += _whole_blocks(piece.elements)
        return found

    def load(self, update: Update, pieces: Sequence[Piece]) -> None:
        for here, there in self._pairs(update, pieces):
            here.copy_(there, non_blocking=True)

    def store(self, update: Update, pieces: Sequence[Piece]) -> None:
        for here, there in self._pairs(update, pieces):
            there.copy_(here, non_blocking=True)

    def _pairs(self, update: Update, pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]]:
        found = []
        for piece, place in self.places(pieces):
            for name, buffer in self._buffers.items():
                per = CODE_BLOCK if name in SCALES.values() else 1
                count = triton.cdiv(piece.elements, per)
                there = update.states[piece.weight][name].view(-1)[piece.first // per :][:count]
                found.append((buffer[place // per :][:count], there))
        return found

    def address(self, name: str, placed: tuple[Piece, int]) -> int:
        """Return the address that the weight's first element would have if the buffer held the whole weight.

        The kernel adds the offset of the piece within the weight.
        """
        buffer, (piece, place) = self._buffers.get(name), placed
        if buffer is None:
            return 0
        elements = (place - piece.first) // (CODE_BLOCK if name in SCALES.values() else 1)
        return buffer.data_ptr() + elements * buffer.element_size()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
