"""Weights in the layout of `transformers`' Llama: a folder with config.json and one or more .safetensors."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from flash_train.files import replacing
from flash_train.model.config import ModelConfig, RopeScaling
from flash_train.model.rope import ntk_theta
from flash_train.model.weight_files import read_json, read_weights

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
LLAMA_LENGTH = 2048  # the default for a config.json without max_position_embeddings
SHARDS = "model-*-of-*.safetensors"

# Maps our names to Llama's. Both layouts multiply alike and rotate half-split, so no weight is transposed or permuted.
_TO_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_FROM_LLAMA = {theirs: ours for ours, theirs in _TO_LLAMA.items()}
_OURS = re.compile(r"(?:blocks\.(\d+)\.)?([a-z_.]+)\.weight")
_THEIRS = re.compile(r"(?:model\.layers\.(\d+)\.)?([a-z_.]+)\.weight")


def pretrained_config(path: str | Path, *, rope_scaling: bool = True) -> ModelConfig:
    """Return the configuration of a saved model. Raises as `load_pretrained` does."""
    return config_from_llama(pretrained_values(path), str(path), rope_scaling=rope_scaling)


def pretrained_values(path: str | Path) -> dict[str, Any]:
    """Return the config.json of a saved model. Raises FileNotFoundError and ValueError as `load_pretrained` does."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"init_from={path}: no such folder; give one with config.json and *.safetensors")
    return read_json(folder / CONFIG)


def pretrained_length(path: str | Path) -> int | None:
    """Return the row length, in tokens, that a saved model and its rotary scaling are made for; None if unknown."""
    values = pretrained_values(path)
    length, rope = values.get("max_position_embeddings"), rope_parameters(values)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if _rope_type(rope) == "yarn" and original and factor:  # often added to a config.json that keeps its old length
        return max(length or 0, int(original * factor))
    return length


def pretrained_rule(path: str | Path) -> str:
    """Return the `rope_type` of a saved model; "default" for plain rotary positions."""
    return _rope_type(rope_parameters(pretrained_values(path)))


def load_pretrained(path: str | Path, *, rope_scaling: bool = True) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Load the configuration and weights (on the CPU, in the dtype of the file) for `Transformer.load_state_dict`.

    `path` is a folder as `transformers` saves it; shards are joined. With `rope_scaling=False` the model's rotary
    scaling is not read: the caller sets another. Raises FileNotFoundError for a missing file and ValueError, in one
    line, for a model that is not a plain Llama.
    """
    config, folder = pretrained_config(path, rope_scaling=rope_scaling), Path(path).expanduser()
    state: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        for name, tensor in read_weights(file).items():
            if not name.endswith("rotary_emb.inv_freq"):  # rope.py computes the frequencies
                state[_to_ours(name, file)] = tensor
    if config.tied_embeddings and (head := state.pop("head.weight", None)) is not None:
        embedding = state.get("embedding.weight")
        if embedding is not None and not (head.shape == embedding.shape and torch.equal(head, embedding)):
            raise ValueError(
                f"init_from={path}: config.json says tie_word_embeddings=true, but lm_head.weight is not the "
                "embedding; set it to false in config.json to read both"
            )
    expected = _expected_shapes(config)
    if wrong := sorted(expected.keys() ^ state.keys()):
        fault = "lacks" if wrong[0] in expected else "has an unexpected"
        raise ValueError(f"init_from={path}: the model {fault} {llama_name(wrong[0])} ({len(wrong)} such tensors)")
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise ValueError(
                f"init_from={path}: {llama_name(name)} has shape {tuple(state[name].shape)}, "
                f"but config.json says {tuple(shape)}"
            )
    return config, state


def save_pretrained(
    model: nn.Module | dict[str, Tensor],
    config: ModelConfig,
    path: str | Path,
    *,
    max_seq_len: int | None = None,
    token_ids: dict[str, int | None] | None = None,
    values: dict[str, Any] | None = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write config.json and model.safetensors, which `transformers.LlamaForCausalLM.from_pretrained` loads.

    `model` is a Transformer or its state_dict, on any device, written in its own dtype. `max_seq_len` goes into
    config.json as max_position_embeddings (default: the reach of the rotary scaling, else 2048); `token_ids` may hold
    bos_token_id, eos_token_id, pad_token_id. If `values` are given, config.json holds exactly these (see
    `PretrainedSource.export_config`). With `max_shard_bytes` the weights are split into several files and an index.
    Each file is written under another name and moved into place, config.json last. Raises ValueError for a model that
    Llama cannot express. Returns the folder.
    """
    if config.qk_norm:
        raise ValueError("model.qk_norm=true cannot be exported: the Llama layout has no norm on queries and keys")
    if config.width % config.n_heads:
        raise ValueError(
            f"model.width={config.width}: must be a multiple of model.n_heads={config.n_heads} in the Llama layout"
        )
    state = model.state_dict() if isinstance(model, nn.Module) else model
    expected = _expected_shapes(config)
    if wrong := sorted(expected.keys() ^ state.keys()):
        raise ValueError(f"the weights do not belong to this configuration: {wrong[0]} is missing or unknown")
    if wrong := [name for name, shape in expected.items() if state[name].shape != shape]:
        raise ValueError(
            f"the weights do not belong to this configuration: {wrong[0]} has shape {tuple(state[wrong[0]].shape)}, "
            f"and must have {tuple(expected[wrong[0]])}"
        )
    tensors = {llama_name(name): t.detach().to("cpu").contiguous() for name, t in state.items()}
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    files = [WEIGHTS] if len(shards) == 1 else _shard_names(len(shards))
    for file, shard in zip(files, shards, strict=True):
        with replacing(folder / file) as temporary:
            try:
                save_file(shard, temporary, metadata={"format": "pt"})
            except SafetensorError as error:  # its name for what the system refuses, such as writing to a full disk
                raise OSError(f"{folder / file} not written: {error}") from error
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(INDEX)
    for stale in {folder / WEIGHTS, folder / INDEX, *folder.glob(SHARDS)} - {folder / file for file in files}:
        stale.unlink(missing_ok=True)  # weights of an earlier save, which a reader might prefer
    if values is None:
        values = config_to_llama(config, dtype_name(tensors), max_seq_len) | (token_ids or {})
    _write_json(folder / CONFIG, values)
    return folder


def config_from_llama(values: dict[str, Any], path: str, *, rope_scaling: bool = True) -> ModelConfig:
    """Return the model that the config.json in `path` describes. Raises ValueError unless it is a plain Llama."""
    if values.get("model_type") != "llama":
        raise ValueError(
            f"init_from={path}: model_type is {values.get('model_type')!r}; only the Llama layout ('llama') is read"
        )
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if values.get(key, plain) != plain:
            raise ValueError(f"init_from={path}: {key}={values[key]!r} is not supported; only {plain!r} is")
    length = values.get("max_position_embeddings")
    if not isinstance(length, int | None):
        raise ValueError(f"init_from={path}: max_position_embeddings={length!r}: must be an integer")
    if values.get("quantization_config"):
        raise ValueError(f"init_from={path}: the weights are quantized; give a model in bf16, fp16 or fp32")
    try:
        rope = rope_parameters(values)
        n_heads, width = values["num_attention_heads"], values["hidden_size"]
        return ModelConfig(
            name=Path(path).name or "llama",
            vocab_size=values["vocab_size"],
            n_layers=values["num_hidden_layers"],
            width=width,
            n_heads=n_heads,
            n_kv_heads=values.get("num_key_value_heads") or n_heads,
            head_dim=values.get("head_dim") or width // n_heads,
            mlp_width=values["intermediate_size"],
            rope_theta=rope.get("rope_theta", values.get("rope_theta", 10000.0)),
            rope_scaling=RopeScaling.from_hf(rope) if rope_scaling else None,
            norm_eps=values.get("rms_norm_eps", 1e-6),
            tied_embeddings=values.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ValueError(f"init_from={path}: config.json lacks {error.args[0]}") from None
    except TypeError as error:
        raise ValueError(f"init_from={path}: config.json has a value of the wrong type: {error}") from error
    except ValueError as error:
        raise ValueError(f"init_from={path}: config.json: {error}") from error


def rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a config.json, with the defaults that `transformers` fills in."""
    # Where both are given, `transformers` takes rope_scaling, which a model card may tell its users to add.
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise TypeError(f"rope_scaling is {given!r}, and must be an object")
    rope = dict(given)
    if _rope_type(rope) in ("yarn", "llama3"):
        length = values.get("max_position_embeddings") or LLAMA_LENGTH
        original = rope.get("original_max_position_embeddings") or length
        rope["original_max_position_embeddings"] = values.get("original_max_position_embeddings") or original
        if _rope_type(rope) == "yarn" and rope.get("factor") is None:
            rope["factor"] = length / rope["original_max_position_embeddings"]
    return rope


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_to_llama(config: ModelConfig) -> tuple[float, dict[str, Any] | None]:
    """Return `rope_theta` and `rope_scaling` as `transformers` writes them; None for plain rotary positions."""
    scaling, theta = config.rope_scaling, config.rope_theta
    if scaling is not None and scaling.kind == "ntk":  # exactly plain rotary with a larger base
        return ntk_theta(theta, scaling.factor, config.head_dim), None
    return theta, scaling.to_hf() if scaling else None


def config_to_llama(config: ModelConfig, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
    """Return the values of config.json that `save_pretrained` writes, without the ids of special tokens."""
    scaling = config.rope_scaling
    theta, rope_scaling = rope_to_llama(config)
    if max_seq_len is None:
        reach = scaling.original_max_position_embeddings if scaling else None
        max_seq_len = int(reach * scaling.factor) if scaling and reach else LLAMA_LENGTH
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_seq_len,
        "initializer_range": 0.02,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def _expected_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    from flash_train.model.transformer import Transformer

    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Transformer(config).state_dict().items()}


def llama_name(name: str) -> str:
    """Return the name that a Llama of `transformers` has for one of `Transformer`'s weights."""
    match = _OURS.fullmatch(name)
    assert match is not None  # the weights of `Transformer` have no other names
    layer, part = match.groups()
    return f"model.layers.{layer}.{_TO_LLAMA[part]}.weight" if layer else f"{_TO_LLAMA[part]}.weight"


def _to_ours(name: str, file: Path) -> str:
    match = _THEIRS.fullmatch(name)
    if match is None or match[2] not in _FROM_LLAMA:
        raise ValueError(f"init_from={file.parent}: {file.name} holds {name}, which a plain Llama does not have")
    return f"blocks.{match[1]}.{_FROM_LLAMA[match[2]]}.weight" if match[1] else f"{_FROM_LLAMA[match[2]]}.weight"


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():  # the order in which transformers looks
        files = [folder / WEIGHTS]
    else:
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
            raise ValueError(f"init_from={folder}: {INDEX} has no weight_map, which names the files of the weights")
        files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"init_from={folder}: {file.name} is missing (only .safetensors weights are read)")
    return files


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype of most elements, as config.json names it."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        elements[tensor.dtype] += tensor.numel()
    return str(max(elements, key=elements.__getitem__)).removeprefix("torch.")


def _shards(tensors: dict[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_json(file: Path, values: dict[str, Any]) -> None:
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
