"""The pretrained model that training began from, without its weights: its config.json and the files next to it.

A checkpoint keeps both as plain values, so that an export changes only what training changed.
"""

import copy
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flash_train.model.config import ModelConfig, RopeScaling
from flash_train.model.pretrained import (
    CONFIG,
    LLAMA_LENGTH,
    config_from_llama,
    pretrained_values,
    rope_parameters,
    rope_to_llama,
)

#: weights and archives in any format: an export writes its own weights
WEIGHT_SUFFIXES = frozenset(
    (
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz", ".npy"),
        *(".ot", ".pkl", ".tflite", ".zip", ".tar", ".gz"),
    )
)
TEMPLATES = "additional_chat_templates"  # the one sub-folder that transformers writes


@dataclass(frozen=True)
class PretrainedSource:
    """A model's folder as it was when training began.

    `config` holds the values of its config.json; `files` holds the digest of every other file except weights, by name.
    """

    folder: str
    config: dict[str, Any]
    files: dict[str, str]

    @classmethod
    def read(cls, path: str | Path) -> "PretrainedSource":
        """Read the model in a folder. Raises FileNotFoundError and ValueError as `load_pretrained` does."""
        folder = Path(path).expanduser()
        found = [*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*")]
        names = sorted(str(file.relative_to(folder)) for file in found if file.is_file() and _is_side_file(file))
        digests = {name: file_digest(folder / name) for name in names}
        return cls(str(folder.resolve()), pretrained_values(path), digests)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for a checkpoint."""
        return asdict(self)

    def export_config(self, model: ModelConfig, *, dtype: str, seq_len: int | None) -> dict[str, Any]:
        """Return the config.json to write after training `model` on rows of `seq_len` tokens. Other values stay.

        `dtype` is the weights' dtype, as PyTorch calls it. `max_position_embeddings` is the larger of the length
        that the model was made for and `seq_len`.
        """
        values = copy.deepcopy(self.config)
        own = config_from_llama(values, self.folder, rope_scaling=False)
        made_for = values.get("max_position_embeddings") or LLAMA_LENGTH
        length = max(made_for, seq_len or 0)
        if self._keeps_positions(model, own.rope_theta):
            if length != made_for:
                _write_implied_lengths(values)
        else:
            _replace_rule(values, model)
        if length != made_for:
            values["max_position_embeddings"] = length
        if own.norm_eps != model.norm_eps:
            values["rms_norm_eps"] = model.norm_eps
        if model.attention_dropout:  # 0 by default, whatever the model was trained with before
            values["attention_dropout"] = model.attention_dropout
        for key in {"dtype", "torch_dtype"} & values.keys():
            values[key] = dtype
        return values

    def _keeps_positions(self, model: ModelConfig, theta: float) -> bool:
        """Whether `model` has the rotary positions of the source, whose `rope_theta` is `theta`."""
        try:
            scaling = RopeScaling.from_hf(rope_parameters(self.config))
        except ValueError:  # an unknown rule: the run replaced it
            return False
        return (theta, scaling) == (model.rope_theta, model.rope_scaling)


def file_digest(path: Path) -> str:
    """Return the digest of a file's content. An export uses it to recognise the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _is_side_file(file: Path) -> bool:
    is_weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
    return not is_weights and file.name != CONFIG and not file.name.startswith(".")


def _write_implied_lengths(values: dict[str, Any]) -> None:
    """Write out the values that a rule derives from max_position_embeddings, before it changes."""
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"  # the one that `rope_parameters` reads
    if values.get(key):
        values[key] |= {name: value for name, value in rope_parameters(values).items() if values[key].get(name) is None}


def _replace_rule(values: dict[str, Any], model: ModelConfig) -> None:
    """Write the rotary positions of `model` under the keys that the file has, of transformers 5 or 4."""
    theta, scaling = rope_to_llama(model)
    values.pop("original_max_position_embeddings", None)  # transformers would prefer it to the rule's own
    if "rope_parameters" in values:
        for key in ("rope_theta", "rope_scaling"):
            values.pop(key, None)
        values["rope_parameters"] = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": theta}
    else:
        values |= {"rope_theta": theta, "rope_scaling": scaling}
