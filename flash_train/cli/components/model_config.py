"""The model's shape, the device and the attention backend of a configuration.

They are known before anything is built. This module does not import Lightning: that takes longer than anything else
before the first step, and the kernels are compiled meanwhile.
"""

import math
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from flash_train.attention import resolve_backend
from flash_train.cli.components.rotary import keeps_rule, merged_rule
from flash_train.cli.config.errors import UnavailableError, UsageError, blame
from flash_train.cli.config.parallel import parallel_plan
from flash_train.model import ModelConfig, pretrained_config
from flash_train.precision import PRECISIONS

VOCAB_MULTIPLE = 64  # matrix products over the vocabulary are fastest with aligned rows
# The fields that the shapes of the weights depend on.
SHAPE = (
    *("vocab_size", "n_layers", "width", "n_heads", "n_kv_heads"),
    *("head_dim", "mlp_width", "qk_norm", "tied_embeddings"),
)


def plain(node: DictConfig) -> dict[str, Any]:
    """A part of the configuration as a plain dictionary."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def device_of(accelerator: str) -> torch.device:
    """The device that `trainer.accelerator` stands for; raises `UnavailableError` if PyTorch finds none."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if accelerator == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[accelerator]:
        usable = ", ".join(["auto", *(kind for kind, there in available.items() if there)])
        raise UnavailableError(
            f"trainer.accelerator={accelerator}: PyTorch finds no such device here; allowed: {usable}"
        )
    return torch.device(accelerator)


def load_shape(config: DictConfig) -> ModelConfig:
    """The shape of the model in `init_from`."""
    with blame(f"init_from={config.init_from}"):
        return pretrained_config(config.init_from, rope_scaling=keeps_rule(config))


def build_model_config(config: DictConfig, tokens: int, pretrained: ModelConfig | None) -> ModelConfig:
    """The model's shape: the values of `model`, over the shape of the model in `init_from` if there is one.

    Args:
        tokens: how many ids the tokenizer has.
        pretrained: the shape of the model in `init_from`.
    """
    given = {key: value for key, value in plain(config.model).items() if value is not None}
    scaling = {key: value for key, value in given.pop("rope_scaling").items() if value is not None}
    rounded = math.ceil(tokens / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    base: dict[str, Any] = pretrained.to_dict() if pretrained else {"vocab_size": rounded}
    values = {**base, **given, "attention_dropout": config.attention.dropout}
    if scaling:
        values["rope_scaling"] = merged_rule(base.get("rope_scaling"), scaling)
    with blame("model"):
        built = ModelConfig.from_dict(values)
    if pretrained:
        require_same_shape(built, pretrained)
    if built.vocab_size < tokens:
        if pretrained:
            raise UsageError(
                f"data.tokenizer: has {tokens} ids, and the model in init_from has embeddings for "
                f"{built.vocab_size}; allowed: data.tokenizer=FILE, the tokenizer that it was trained with"
            )
        raise UsageError(f"model.vocab_size={built.vocab_size}: must be {tokens} or more, the tokenizer's ids")
    return built


def require_same_shape(built: ModelConfig, pretrained: ModelConfig) -> None:
    """Raise if the weights in `init_from` have another shape; the message names all fields that differ."""
    differing = [name for name in SHAPE if getattr(built, name) != getattr(pretrained, name)]
    if not differing:
        return
    name = differing[0]
    raise UsageError(
        f"model.{name}={getattr(built, name)}: the model in init_from has {getattr(pretrained, name)}; allowed: "
        f"model=pretrained, and no {', '.join(f'model.{name}' for name in differing)}"
    )


def model_and_backend(config: DictConfig, tokens: int, device: torch.device) -> tuple[ModelConfig, str]:
    """The model's shape and its attention backend, without reading weights; `tokens` is how many ids there are."""
    pretrained = None if config.init_from is None else load_shape(config)
    model = build_model_config(config, tokens, pretrained)
    return model, choose_attention(config, device, model.head_dim)[0]


def choose_attention(config: DictConfig, device: torch.device, head_dim: int) -> tuple[str, str]:
    """The attention backend that runs, and the reason."""
    dtype = PRECISIONS[config.precision].compute_dtype
    shares_mask = config.attention.dropout > 0 and parallel_plan(config).dims.context > 1
    with blame(f"attention={config.attention.backend}", UnavailableError):
        name, reason = resolve_backend(
            config.attention.backend, device=device, dtype=dtype, head_dim=head_dim, exact=shares_mask
        )
    # the reference holds the scores of all heads
    return ("chunked", reason) if name == "reference" and config.attention.backend == "auto" else (name, reason)
