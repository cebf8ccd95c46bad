"""The settings that decide the memory of a training step on one device."""

from dataclasses import dataclass
from typing import get_args

from flash_train.attention.backends import backend_names
from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.attention.parallel import Method
from flash_train.checks import check_name
from flash_train.distributed.dims import ParallelDims
from flash_train.model import ModelConfig
from flash_train.model.offload import blocks_on_host
from flash_train.model.recompute import MEMORY_MODES, first_kept
from flash_train.precision import PRECISIONS


def training_backends() -> tuple[str, ...]:
    """Return the attention backends that training may run on."""
    return tuple(name for name in backend_names() if name not in ("auto", "reference"))


@dataclass(frozen=True)
class Step:
    """The settings that decide the memory of a training step, on one device or on each of several.

    Args:
        model: the model's shape, including attention and residual dropout.
        seq_len, batch_size: shape of a micro-batch; the devices of a context group share it.
        accumulate: micro-batches per optimizer step.
        precision: a name of `flash_train.precision.PRECISIONS`.
        memory: none, selective or checkpoint.
        keep, offload: the share of blocks that keep everything whatever `memory` says, and the share whose inputs are
            in the host's memory (see `Transformer`).
        attention: the backend that runs, one of `training_backends()`.
        fused: use the kernels for CUDA; otherwise PyTorch's own operations, as on a CPU.
        family: the kernel family whose backward runs on the device, if this project's kernels run.
        workspace: bytes that matrix products keep on the device (`torch.backends` calls it the cuBLAS workspace).
        captured: a CUDA graph replays the micro-batches (see `StepGraph`). It reads copies of them, and its products
            have a workspace of their own.
        lengths: the documents' lengths, if known; with None, each row is one document.
        master, moments: how bf16 weights and the optimizer's moments are stored (see `flash_train.optim.AdamW`).
        offload_optimizer: the optimizer's state is in the host's memory.
        in_backward: each weight is updated within the backward (see `flash_train.optim.step_in_backward`).
        row_entries: documents that the boundaries of a row have room for, if known: see `PackedIndex.capacity`.
        whole_rows: every row is one document, as with `data.packing=concat`.
        dims: how several devices divide weights and rows; `shard` is 1 for whole weights.
        local_ranks: how many of the devices are in one machine; None: all.
        method: how the devices that share a row divide attention.

    Raises:
        ValueError: an unknown precision, memory mode or attention.
    """

    model: ModelConfig
    seq_len: int
    batch_size: int = 1
    accumulate: int = 1
    precision: str = "bf16-mixed"
    memory: str = "none"
    keep: float = 0.0
    offload: float = 0.0
    attention: str = "flash"
    fused: bool = True
    family: str = PORTABLE.name
    workspace: int = 0
    captured: bool = False
    lengths: tuple[int, ...] | None = None
    master: str = "exact"
    moments: str | None = None
    offload_optimizer: bool = False
    in_backward: bool = False
    row_entries: int | None = None
    whole_rows: bool = False
    dims: ParallelDims = ParallelDims()
    local_ranks: int | None = None
    method: Method = "gather"

    def __post_init__(self) -> None:
        for name, choices in (
            ("precision", PRECISIONS),
            ("memory", MEMORY_MODES),
            ("attention", training_backends()),
            ("family", FAMILIES),
            ("method", get_args(Method)),
        ):
            check_name(name, getattr(self, name), choices)

    @property
    def accumulates_dq(self) -> bool:
        """Whether the backward of this project's kernels accumulates dQ in memory, in fp32."""
        if self.attention not in ("flash", self.family):
            return False
        itemsize = PRECISIONS[self.precision].activation_bytes
        return FAMILIES[self.family].accumulates_dq(self.model.head_dim, itemsize)

    @property
    def holds_score_matrices(self) -> bool:
        """Whether PyTorch's attention computes whole score matrices: it does so for dropout on a CPU."""
        return self.attention == "sdpa" and not self.fused and self.model.attention_dropout > 0

    @property
    def row_tokens(self) -> int:
        """Tokens of a micro-batch, which the devices of a context group share."""
        return self.seq_len * self.batch_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one device."""
        return self.row_tokens // self.dims.context

    @property
    def exchanges_gradients(self) -> bool:
        """Whether sharded gradients are summed in their own dtype, without a copy in fp32."""
        precision = PRECISIONS[self.precision].lightning
        return self.dims.exchanges_gradients(precision, self.local_ranks or self.dims.ranks)

    @property
    def first_kept(self) -> int:
        """The first block that keeps everything for its backward; all later blocks do, too."""
        return first_kept(self.model.n_layers, self.memory, self.keep)

    @property
    def inputs_on_host(self) -> int:
        """How many blocks, the first ones, have their inputs in the host's memory."""
        return blocks_on_host(self.model.n_layers, self.first_kept, self.offload)

    @property
    def documents(self) -> tuple[int, ...]:
        return self.lengths or (self.seq_len,) * self.batch_size

    @property
    def entries(self) -> int:
        """Entries of an attention call that one device makes for its rows, empty ones included."""
        return len(self.documents) if self.row_entries is None else self.batch_size * self.row_entries
