"""Rotary positions: frequencies of each scaling rule, and the cosines and sines of a batch.

The rotation pairs element i with element i + head_dim/2 (the "half-split" convention of `transformers`' Llama).
Everything is fp32 and computed when needed: a buffer would be rounded when the model is cast.
"""

import math

import torch
from torch import Tensor

from flash_train.model.config import ModelConfig, RopeScaling, yarn_attention_factor


def ntk_theta(theta: float, factor: float, head_dim: int) -> float:
    """Return the base (theta) of NTK-aware scaling by `factor`."""
    return theta * factor ** (head_dim / (head_dim - 2))


def rope_frequencies(config: ModelConfig, device: torch.device | str | None = None) -> tuple[Tensor, float]:
    """Return inverse frequencies, fp32 (head_dim / 2,), radians per position; and the factor on cosines and sines."""
    scaling, dim = config.rope_scaling, config.head_dim
    if scaling is None:
        return _inverse(config.rope_theta, dim, device), 1.0
    match scaling.kind:
        case "linear":
            return _inverse(config.rope_theta, dim, device) / scaling.factor, 1.0
        case "ntk":
            return _inverse(ntk_theta(config.rope_theta, scaling.factor, dim), dim, device), 1.0
        case "yarn":
            return _yarn(config.rope_theta, dim, scaling, device)
        case "llama3":
            return _llama3(_inverse(config.rope_theta, dim, device), scaling), 1.0


def rope_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of integer `positions` (...): two fp32 tensors (..., head_dim / 2)."""
    frequencies, scale = rope_frequencies(config, positions.device)
    angles = positions[..., None].float() * frequencies
    return angles.cos() * scale, angles.sin() * scale


def _inverse(theta: float, dim: int, device: torch.device | str | None) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _yarn(theta: float, dim: int, scaling: RopeScaling, device: torch.device | str | None) -> tuple[Tensor, float]:
    """Interpolate slow pairs, keep fast ones, and blend linearly between; also return the factor on cosines and sines.

    A pair is slow with fewer than `beta_slow` turns over the original length, fast with more than `beta_fast`.
    """
    length = _original_length(scaling)

    def dimension(turns: float) -> float:
        """Return the dimension, not rounded, whose pair makes this many turns over the original length."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), dim - 1)
    span = high - low or 0.001  # the paper's code, and transformers', keep the ramp finite this way
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / span).clamp(0, 1)
    inverse = _inverse(theta, dim, device)
    frequencies = inverse / scaling.factor * (1 - keep) + inverse * keep
    scale = scaling.attention_factor
    return frequencies, yarn_attention_factor(scaling.factor) if scale is None else scale


def _original_length(scaling: RopeScaling) -> int:
    """Return the length in tokens that the model was trained at, of a rule that needs it."""
    length = scaling.original_max_position_embeddings
    assert length is not None  # `RopeScaling` has checked it
    return length


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep high frequencies, and blend between them."""
    turns = _original_length(scaling) * inverse / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inverse / scaling.factor + keep * inverse
