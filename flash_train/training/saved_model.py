"""Whether a checkpoint holds the model that is loading it."""

from collections.abc import Mapping
from typing import Any

from flash_train.model import ModelConfig

# These may differ between a checkpoint and the model that loads it: they change how it trains, not what it computes.
TRAINING_FIELDS = frozenset({"name", "attention_dropout", "residual_dropout"})


def check_same_model(hyper_parameters: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Refuse the checkpoint of another model in one message; PyTorch would list every tensor.

    Args:
        hyper_parameters: the checkpoint's, as `CausalLMModule` saves them.
        own: the loading model's configuration as plain values; None for a model without a `ModelConfig`.

    Raises:
        ValueError: the checkpoint does not describe its model, or the models differ in more than TRAINING_FIELDS.
    """
    if not {"model", "optimizer"} & hyper_parameters.keys():
        raise ValueError("this checkpoint does not describe its model: it was not written by CausalLMModule")
    own, saved = own or {}, hyper_parameters.get("model") or {}
    if not isinstance(saved, Mapping):  # `load_from_checkpoint(model=...)` replaces the entry by the model
        saved = own
    elif saved and own:  # settings that are newer than the checkpoint get their defaults
        saved = ModelConfig.from_dict(dict(saved)).to_dict()
    differing = [name for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name)]
    if differing := [name for name in differing if name not in TRAINING_FIELDS]:
        fields = ", ".join(f"{name} ({saved.get(name)} saved, {own.get(name)} here)" for name in differing)
        raise ValueError(f"the checkpoint is of another model: {fields}")
