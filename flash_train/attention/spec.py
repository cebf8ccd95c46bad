"""The specification of attention, which every backend reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import cast

import torch

from flash_train.attention.masks import Full, Mask
from flash_train.checks import brief


@dataclass(frozen=True)
class AttentionSpec:
    """The computation of one attention call: ``out = dropout(softmax(softcap(scale * q @ k.T) + mask)) @ v``.

    Attributes:
        mask: which keys a query attends to: ``Full()``, ``Causal()``, ``Window(left, right)``, any other term, such as
            ``BlockSparse``, ``Document``, ``Tree`` or ``MaskFunction``, or several terms joined with ``&``.
        scale: factor on the scores, positive; ``None`` means ``1 / sqrt(head_dim)``.
        softcap: if positive, scores become ``softcap * tanh(scores / softcap)`` before the mask; 0 turns it off.
        dropout: probability in [0, 1) of dropping an attention weight. It is rounded to ``1 - k / 256`` with
            ``k = round(256 * (1 - dropout))``. Kept weights are scaled by ``256 / k``, so that the output is unbiased.

    Raises:
        TypeError: a mask that is not a ``Mask``, or a setting that is not a number.
        ValueError: a scale that is not positive, a negative softcap, or a dropout that is outside [0, 1) or rounds to
            0 or 1.
    """

    mask: Mask = cast(Mask, None)  # becomes Full(): torch.compile cannot trace an object as a default
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.mask is None:
            object.__setattr__(self, "mask", Full())
        if not isinstance(self.mask, Mask):
            raise TypeError(
                f"mask={brief(self.mask)}: must be a mask such as Full() or Causal(); a rule of your own is "
                "BlockSparse(pattern), Document(q_ids) or MaskFunction(kernel, twin)"
            )
        for name in ("scale", "softcap", "dropout"):
            value = getattr(self, name)
            if type(value) in (float, int) or (value is None and name == "scale"):
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                if value.requires_grad:
                    raise TypeError(
                        f"{name}={value!r}: must be a number, or a tensor without gradient; to learn a scale, multiply "
                        "q by it"
                    )
                value = value.item()
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name}={brief(value)}: must be a number")
            object.__setattr__(self, name, float(value))
        # a compiler can trace these comparisons with symbolic numbers
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"scale={self.scale}: must be a positive number, or None for 1/sqrt(head_dim)")
        if not 0 <= self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: must be a positive number, or 0 for none")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: must be in [0, 1)")
        if self.dropout > 0.0 and not 1 <= self.keep_threshold <= 255:
            raise ValueError(
                f"dropout={self.dropout}: attention dropout comes in steps of 1/256 and this rounds to "
                f"{1 - self.keep_threshold / 256:g}; use 0 or a value in (1/512, 511/512]"
            )

    @property
    def keep_threshold(self) -> int:
        """``k`` of the dropout probability ``1 - k / 256``: a weight is kept if its random byte is below ``k``."""
        return 256 if self.dropout == 0.0 else math.floor(256 * (1.0 - self.dropout) + 0.5)

    def scale_for(self, head_dim: int) -> float:
        """Return the factor on the scores for this head_dim."""
        return head_dim**-0.5 if self.scale is None else self.scale
