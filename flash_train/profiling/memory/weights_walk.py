"""The memory of weights, gradients and optimizer state: whole on each device, or sharded with FSDP2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flash_train.distributed.gradient_sums import PIECE
from flash_train.model import ModelConfig
from flash_train.optim.adamw import SMALLEST_ON_HOST
from flash_train.optim.formats import CODE_BLOCK
from flash_train.optim.state import STAGED
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.ledger import Ledger
from flash_train.profiling.memory.step import Step

OPTIMIZER_BLOCK = 2048  # elements of a weight that a program of the optimizer's kernel updates
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / CODE_BLOCK}
Shape = tuple[int, ...]


def block_shapes(m: ModelConfig) -> list[Shape]:
    """Return the shapes of a block's weights."""
    queries, keys = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    attention = [(queries, m.width), (keys, m.width), (keys, m.width), (m.width, queries)]
    mlp = [(m.mlp_width, m.width), (m.mlp_width, m.width), (m.width, m.mlp_width)]
    return [*attention, *mlp, (m.width,), (m.width,), *[(m.head_dim,)] * (2 * m.qk_norm)]


def root_shapes(m: ModelConfig) -> list[Shape]:
    """Return the shapes of the weights that are in no block: embedding, last norm, head."""
    table = (m.vocab_size, m.width)
    return [table, (m.width,), *([] if m.tied_embeddings else [table])]


def state_bytes(step: Step, shape: Shape) -> float:
    """Return the bytes of the optimizer's state for each element of a weight."""
    weight_bytes = PRECISIONS[step.precision].weight_bytes
    in_codes = len(shape) > 1 and shape[-1] % CODE_BLOCK == 0
    moments = None if step.moments == "8bit" and not in_codes else step.moments
    lower = 2 if weight_bytes == 2 and step.master == "exact" else 0
    return 2 * (weight_bytes if moments is None else MOMENT_BYTES[moments]) + lower


def copies_of_one(step: Step, elements: int) -> float:
    """Return the bytes that a weight's offloaded optimizer state takes on the device while the weight is updated."""
    if not step.offload_optimizer or elements < SMALLEST_ON_HOST:
        return 0
    return min(elements, 2 * STAGED) * state_bytes(step, (1, step.model.width))


class OptimizerState(NamedTuple):
    """Bytes of the optimizer's state on one device and in the host's memory, and of the copies while it steps."""

    device: int
    host: int
    copies: int

    @classmethod
    def of(cls, step: Step) -> OptimizerState:
        m, shard = step.model, step.dims.shard
        sizes, largest = {False: 0.0, True: 0.0}, 0.0
        for shape in (*block_shapes(m) * m.n_layers, *root_shapes(m)):
            each = state_bytes(step, shape)
            part = -(-shape[0] // shard) * math.prod(shape[1:])
            on_host = step.offload_optimizer and part >= SMALLEST_ON_HOST
            sizes[on_host] += each * part
            largest = max(largest, each * on_host)
        copies = min(2 * STAGED * largest, sizes[True])
        return cls(int(sizes[False]), int(sizes[True]), int(copies))


class Group(NamedTuple):
    """Weights that FSDP gathers together, in elements: all of them, padded to equal parts, and one device's part."""

    gathered: int
    part: int

    @classmethod
    def of(cls, shapes: Sequence[Shape], shard: int) -> Group:
        part = 0
        for first, *others in shapes:  # each weight is cut along its first dimension
            size = -(-first // shard)
            for other in others:
                size *= other
            part += size
        return cls(part * shard, part)


class WholeWeights:
    """Whole weights on each device. On several, DDP has buckets for all gradients, which live as long as the run.

    The methods of this class are called before and after the parts of a step.
    """

    def __init__(self, step: Step, ledger: Ledger) -> None:
        self.step, self.ledger = step, ledger
        self.weight_bytes = PRECISIONS[step.precision].weight_bytes

    def begin(self) -> None:
        self._hold_lasting(self.step.model.num_parameters)
        if self.step.dims.ranks > 1:
            self._hold_gradients("buckets of gradients", self.step.model.num_parameters)
        if self.step.accumulate > 1:  # outside of DDP's buckets until the last micro-batch
            self._hold_gradients("gradients", self.step.model.num_parameters)

    def _hold_lasting(self, count: int) -> None:
        hold = self.ledger.hold
        hold("weights", "weights", self.weight_bytes * count)
        hold("optimizer", "optimizer state", OptimizerState.of(self.step).device)
        if self.step.fused:  # two int32 per block: the index of its weight, and its own index within the weight
            hold("optimizer's blocks", "optimizer state", 2 * 4 * count // OPTIMIZER_BLOCK)

    def _hold_gradients(self, name: str, count: int) -> None:
        self.ledger.hold(name, "gradients", self.weight_bytes * count)

    def before_forward(self, layer: int) -> None:
        """Prepare a block for its forward."""

    def after_forward(self, layer: int) -> None:
        """Finish with a block after its forward."""

    def before_loss_backward(self) -> None:
        """Prepare the backward, after the loss."""

    def before_backward(self, layer: int) -> None:
        """Prepare a block for its backward."""

    def after_backward(self, layer: int) -> None:
        """Finish with a block's gradients."""

    def after_step_backward(self) -> None:
        """Finish with the gradients of embedding, last norm and head."""


class ShardedWeights(WholeWeights):
    """Weights sharded with FSDP2: each block is a group, and the root group has the rest.

    The order of events follows `torch/distributed/fsdp/_fully_shard`. A group is gathered into one buffer and then
    copied into its weights. The forward keeps this buffer until the next group is gathered, and the backward gathers a
    group during the group before it. The gradients of a group are copied into the input of the reduction, which
    lives until the next group's. The root group stays gathered from its forward to the end of the backward.
    """

    def __init__(self, step: Step, ledger: Ledger) -> None:
        super().__init__(step, ledger)
        shard, m = step.dims.shard, step.model
        self.block, self.root = Group.of(block_shapes(m), shard), Group.of(root_shapes(m), shard)
        self.gathered_bytes = PRECISIONS[step.precision].activation_bytes
        self.exchanges = step.exchanges_gradients
        self.reduced_bytes = self.weight_bytes if self.exchanges else 4
        self.all_reduces = step.dims.replicate > 1
        self.buffer: str | None = None  # the gathered group that the forward has copied out, or the backward will
        self.reduced: str | None = None  # the input of the newest reduce-scatter

    @property
    def part(self) -> int:
        """Elements of all weights that this device has."""
        return self.step.model.n_layers * self.block.part + self.root.part

    def begin(self) -> None:
        self._hold_lasting(self.part)
        if self.step.accumulate > 1:  # sums that are not yet reduced over the replicas are in the reduction's dtype
            size = self.reduced_bytes if self.all_reduces else self.weight_bytes
            self.ledger.hold("gradients", "gradients", size * self.part)
        self._gather("root", self.root)
        self._copy_out("root", self.root)

    def before_forward(self, layer: int) -> None:
        before = self.buffer
        self._gather(str(layer), self.block)
        self._release(before)
        self._copy_out(str(layer), self.block)

    def after_forward(self, layer: int) -> None:
        self.ledger.release(f"gathered weights of {layer}")

    def before_loss_backward(self) -> None:
        self._release(self.buffer)
        self._gather(str(self.step.model.n_layers - 1), self.block)

    def before_backward(self, layer: int) -> None:
        self._copy_out(str(layer), self.block)
        self._release(self.buffer)
        self.buffer = None
        if layer > 0:
            self._gather(str(layer - 1), self.block)

    def after_backward(self, layer: int) -> None:
        self._reduce(
            str(layer), self.block, [name for name in self.ledger.held if name.startswith(f"gradient {layer}.")]
        )

    def after_step_backward(self) -> None:
        names = [name for name in self.ledger.held if name in ("gradient head", "gradient embedding")]
        self._reduce("root", self.root, names)
        self._release(self.reduced, *(name for name in list(self.ledger.held) if name.startswith("sums of ")))

    def _gather(self, name: str, group: Group) -> None:
        """Gather a group into a buffer; the device's part is first cast to the dtype of the computation."""
        cast = f"cast part of {name}"
        needs_cast = self.gathered_bytes != self.weight_bytes
        self.ledger.hold(cast, "gathered weights", self.gathered_bytes * group.part if needs_cast else 0)
        self.buffer = f"gathered buffer of {name}"
        self.ledger.hold(self.buffer, "gathered weights", self.gathered_bytes * group.gathered)
        self.ledger.release(cast)

    def _copy_out(self, name: str, group: Group) -> None:
        self.ledger.hold(f"gathered weights of {name}", "gathered weights", self.gathered_bytes * group.gathered)

    def _reduce(self, name: str, group: Group, gradients: Sequence[str]) -> None:
        """Reduce a group's gradients over the devices, and convert them to the weights' dtype.

        ``GradientSums`` does both at once; it receives the other devices' gradients piece by piece.
        """
        hold, release = self.ledger.hold, self.ledger.release
        release(f"gathered weights of {name}")
        self._release(self.reduced)
        self.reduced = f"gradients of {name} to reduce"
        hold(self.reduced, "gradients to reduce", self.reduced_bytes * group.gathered)
        release(*gradients)
        converts, adds = self.weight_bytes != self.reduced_bytes, self.step.accumulate > 1
        own = f"gradients of {name}"
        sums = f"sums of {name}" if converts else own
        hold(sums, "gradients", self.reduced_bytes * group.part)
        if self.exchanges:
            received = min(self.reduced_bytes * group.gathered, PIECE)
            self.ledger.hold_briefly(f"received gradients of {name}", "gradients to reduce", received)
        if converts:
            hold(own, "gradients", self.weight_bytes * group.part)
        if adds or (converts and not self.all_reduces):  # an all-reduce keeps its tensor to the end of the backward
            release(sums)
        if converts and adds and not self.all_reduces:
            release(own)

    def _release(self, *names: str | None) -> None:
        self.ledger.release(*(name for name in names if name is not None))
