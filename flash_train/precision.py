"""The precisions that training can have: one table of dtypes, bytes, and Lightning's names.

Standard library only; torch is imported when a dtype is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a precision. They are the names of torch's dtypes.

    Attributes:
        lightning: its name in `lightning.pytorch.Trainer(precision=…)`.
        weights: dtype of weights, gradients and optimizer state.
        compute: dtype of activations and matrix products, which decides the card's peak rate.
        fp8: whether the blocks' linear layers multiply in fp8 (see `flash_train.model.fp8`).
    """

    lightning: str
    weights: str
    compute: str
    fp8: bool = False

    @property
    def has_bf16_weights(self) -> bool:
        return self.weights == "bfloat16"

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights."""
        return _BYTES[self.weights]

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of the activations."""
        return _BYTES[self.compute]

    @property
    def weight_dtype(self) -> torch.dtype:
        return _dtype(self.weights)

    @property
    def compute_dtype(self) -> torch.dtype:
        return _dtype(self.compute)


PRECISIONS = {
    "fp32": Precision("32-true", "float32", "float32"),
    "bf16-mixed": Precision("bf16-mixed", "float32", "bfloat16"),
    "bf16-true": Precision("bf16-true", "bfloat16", "bfloat16"),
    "fp16-mixed": Precision("16-mixed", "float32", "float16"),
    "fp8": Precision("bf16-true", "bfloat16", "bfloat16", fp8=True),
}


def name_of(lightning: str) -> str:
    """Return our name of Lightning's precision, or Lightning's where we have none."""
    return next((name for name, p in PRECISIONS.items() if p.lightning == lightning), lightning)


def lightning_compute_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that a Trainer computes in, from Lightning's name of the precision; None for an unknown name."""
    if name == "16-true":  # not in PRECISIONS: gradients in fp16 need a loss scale, and Lightning has none for it
        return _dtype("float16")
    return next((p.compute_dtype for p in PRECISIONS.values() if p.lightning == name), None)


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)
