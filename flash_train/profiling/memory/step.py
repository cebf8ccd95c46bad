"""What decides the memory of a training step."""

from dataclasses import dataclass

from flash_train.attention.backends import backend_names
from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.model import ModelConfig
from flash_train.model.recompute import MEMORY_MODES

#: bytes of (weights, activations) in each precision
WIDTHS = {"fp32": (4, 4), "bf16-mixed": (4, 2), "fp16-mixed": (4, 2), "bf16-true": (2, 2)}


def training_backends() -> tuple[str, ...]:
    """The attention backends that training may run on."""
    return tuple(name for name in backend_names() if name not in ("auto", "reference"))


BACKENDS = training_backends()


@dataclass(frozen=True)
class Step:
    """What decides the memory of a training step.

    Args:
        model: its shape, with attention and residual dropout.
        seq_len, batch_size: of a micro-batch; `accumulate` of them make an optimizer step.
        precision: fp32, bf16-mixed, fp16-mixed or bf16-true.
        memory: none, selective or checkpoint.
        attention: the backend that runs, one of `BACKENDS`.
        fused: CUDA's operations, else PyTorch's own, as on a CPU.
        family: the family of kernels whose backward runs on the device where this project's attention is asked for.
        workspace: bytes that matrix products keep on the device (`torch.backends` calls it the cuBLAS workspace).
        lengths: of the documents, where they are known; None: at most one document a row.
        whole_rows: every row is one document, as `data.packing=concat` makes them.

    Raises:
        ValueError: a precision, memory mode or attention that is not known.
    """

    model: ModelConfig
    seq_len: int
    batch_size: int = 1
    accumulate: int = 1
    precision: str = "bf16-mixed"
    memory: str = "none"
    attention: str = "flash"
    fused: bool = True
    family: str = PORTABLE.name
    workspace: int = 0
    lengths: tuple[int, ...] | None = None
    whole_rows: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("precision", WIDTHS),
            ("memory", MEMORY_MODES),
            ("attention", training_backends()),
            ("family", FAMILIES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)} is not known: it must be one of {', '.join(allowed)}")

    @property
    def accumulates_dq(self) -> bool:
        """Whether the backward of this project's kernels accumulates dQ in memory, in fp32."""
        runs = self.attention in ("flash", self.family)
        return runs and FAMILIES[self.family].accumulates_dq(self.model.head_dim, WIDTHS[self.precision][1])

    @property
    def by_formula(self) -> bool:
        """Whether PyTorch's attention holds the whole matrices: its kernel for CPUs has no dropout."""
        return self.attention == "sdpa" and not self.fused and self.model.attention_dropout > 0

    @property
    def tokens(self) -> int:
        return self.seq_len * self.batch_size

    @property
    def documents(self) -> tuple[int, ...]:
        return self.lengths or (self.seq_len,) * self.batch_size
