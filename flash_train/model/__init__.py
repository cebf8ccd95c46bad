"""The decoder-only Transformer: configuration, model, generation, and weights in the Llama layout."""

from flash_train.model.config import ModelConfig, RopeScaling
from flash_train.model.generate import generate
from flash_train.model.pretrained import (
    load_pretrained,
    pretrained_config,
    pretrained_length,
    pretrained_rule,
    pretrained_values,
    save_pretrained,
)
from flash_train.model.pretrained_source import PretrainedSource
from flash_train.model.recompute import MEMORY_MODES
from flash_train.model.transformer import Transformer

__all__ = [
    "MEMORY_MODES",
    "ModelConfig",
    "PretrainedSource",
    "RopeScaling",
    "Transformer",
    "generate",
    "load_pretrained",
    "pretrained_config",
    "pretrained_length",
    "pretrained_rule",
    "pretrained_values",
    "save_pretrained",
]
