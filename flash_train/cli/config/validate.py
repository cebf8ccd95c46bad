"""Checks that types can't express: one table of ranges and choices, and a few rules about two keys together."""

import glob
import math
import os
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from flash_train.checks import AUTO_OR_BOOL, Allowed, above, at_least, one_of, within
from flash_train.cli.config.errors import UnavailableError, UsageError, did_you_mean
from flash_train.cli.config.in_backward import check_step_in_backward
from flash_train.cli.config.overrides import PATH_KEYS, require_home
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.paths import conf_dir
from flash_train.cli.config.schema import DATA_SCHEMAS, LoggerSchema, TrainSchema, WandbSchema
from flash_train.precision import PRECISIONS

LARGEST = 2**31 - 1  #: the largest count; a larger one overflows in PyTorch or takes more memory than any machine has


#: The registry of backends imports PyTorch, which takes seconds. So this lists the files in conf/attention instead, and
#: a test compares the two.
BACKENDS = tuple(sorted(file.stem for file in (conf_dir() / "attention").glob("*.yaml")))

SHARE = Allowed(
    lambda value: value == "auto" or (isinstance(value, int | float) and value is not True and 0 <= value <= 1),
    "auto or in [0, 1]",
)

#: what `AttentionSpec` allows: it rounds to steps of 1/256
ATTENTION_DROPOUT = Allowed(
    lambda value: value == 0 or 1 / 512 < value <= 511 / 512,
    "0 or in (1/512, 511/512], as attention dropout comes in steps of 1/256",
)

FOLDER = Allowed(lambda value: value != "", "the name of a folder; . is the present one")

# The library has these choices too, but importing it takes seconds, and a mistake should be reported at once.
RULES = {
    "run_dir": FOLDER,
    "data.cache_dir": FOLDER,
    "seq_len": at_least(2),
    "max_steps": at_least(1),
    "stop_after": at_least(1),
    "batch_size": at_least(1),
    "accumulate": at_least(1),
    "global_batch": at_least(1),
    "seed": within(0, 2**32 - 1),
    "precision": one_of(*PRECISIONS),
    "precision_fp8.recipe": one_of("tensorwise", "rowwise"),
    "log_every": at_least(1),
    "val_every": at_least(1),
    "attention.backend": one_of(*BACKENDS),
    "attention.dropout": ATTENTION_DROPOUT,
    "model.n_layers": within(1, 1000),  # Python loops over the layers before the memory is checked
    "model.width": at_least(1),
    "model.n_heads": at_least(1),
    "model.n_kv_heads": at_least(1),
    "model.head_dim": at_least(2),
    "model.mlp_width": at_least(1),
    "model.vocab_size": at_least(1),
    "model.rope_theta": above(0),
    "model.rope_scaling.kind": one_of("linear", "ntk", "yarn", "llama3", "none"),
    "model.norm_eps": above(0),
    "model.residual_dropout": within(0, 1, "[)"),
    "data.packing": one_of("best_fit", "concat"),
    "data.errors": one_of("strict", "replace", "skip"),
    "data.val_fraction": within(0, 1, "()"),
    "data.val_batches": at_least(1),
    "data.val_tokens": at_least(2),
    "data.num_workers": within(0, 1024),
    "optimizer.lr": above(0),
    "optimizer.min_lr_ratio": within(0, 1),
    "optimizer.eps": above(0),
    "optimizer.weight_decay": at_least(0),
    "optimizer.warmup_steps": at_least(0),
    "optimizer.gradient_clip": at_least(0),
    "optimizer.master": one_of("exact", "stochastic", "none"),
    "optimizer.moments": one_of("fp32", "bf16", "8bit"),
    "trainer.accelerator": one_of("auto", "cpu", "cuda", "mps"),
    "trainer.devices": within(1, 1024),  # processes on this machine
    "trainer.num_nodes": at_least(1),
    "trainer.strategy": one_of("auto", "ddp"),
    "trainer.checkpoint_every": at_least(1),
    "trainer.cuda_graph": AUTO_OR_BOOL,
    "parallel.mode": one_of("auto", "none", "ddp", "fsdp", "context"),
    "parallel.replicate": at_least(1),
    "parallel.shard": at_least(1),
    "parallel.context": at_least(1),
    "parallel.method": one_of("auto", "gather", "ulysses"),
    "parallel.timeout": above(0),
    "trainer.keep_checkpoints": at_least(1),
    "callbacks.sample.tokens": at_least(0),
    "callbacks.sample.seconds": above(0),
    "callbacks.kernel_times.every": at_least(1),
    "callbacks.memory_snapshot.every": at_least(1),
    "memory.mode": one_of("none", "selective", "checkpoint"),
    "memory.keep": SHARE,
    "memory.offload": SHARE,
    "logger.name": one_of("wandb", "none"),
    "logger.mode": one_of("auto", "online", "offline"),
}


def validate(config: DictConfig) -> None:
    """Check every value of a composed configuration; the schema decides where `null` is allowed.

    Raises:
        UsageError: one line with the key, the given value and the allowed ones.
    """
    _check_keys(config)
    for key, rule in RULES.items():
        value = OmegaConf.select(config, key)
        if value is not None and not rule.contains(value):
            raise UsageError(f"{key}={value}: must be {rule.words}{did_you_mean(str(value), rule.choices)}")
    for key, value in _numbers(OmegaConf.to_container(config)):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{key}={value}: must be a finite number")
        if isinstance(value, int) and abs(value) > LARGEST and key != "seed":
            raise UsageError(f"{key}={value}: must be at most {LARGEST}")
    _together(config)


def _check_keys(node: DictConfig, prefix: str = "") -> None:
    """Raise for a key that + or ++ has added to the schema's."""
    schema = OmegaConf.get_type(node)
    known = getattr(schema if prefix else TrainSchema, "__dataclass_fields__", node)
    for key, value in ((str(key), value) for key, value in node.items()):
        if key not in known:
            raise UsageError(f"{prefix}{key}: no such key{did_you_mean(key, map(str, known))}")
        if isinstance(value, DictConfig):
            _check_keys(value, f"{prefix}{key}.")


def _numbers(tree: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number of a configuration, with its key."""
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from _numbers(child, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for child in tree:
            yield from _numbers(child, key)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield key, tree


def require_files(config: DictConfig) -> None:
    """Check that the files and folders that a run reads exist, so that a mistake is reported seconds earlier.

    Raises:
        UsageError: one line with the key whose file is missing.
    """
    paths = OmegaConf.select(config, "data.path") or []
    for key in PATH_KEYS:
        given = OmegaConf.select(config, key)
        for path in [given] if isinstance(given, str) else given or []:
            require_home(key, path)
    for path in [paths] if isinstance(paths, str) else paths:
        # Stop at **: `glob` could follow circular links. The corpus searches the rest.
        parts = takewhile(lambda part: part != "**", Path(path).expanduser().parts)
        place = str(Path(*parts)) if path else ""
        if not os.path.exists(place) and next(glob.iglob(place), None) is None:
            raise UsageError(f"data.path={path}: no such file or folder, and no glob that matches any")
    path = OmegaConf.select(config, "data.tokenizer")
    if path not in (None, "bytes") and not os.path.isfile(os.path.expanduser(path)):
        what = "is a folder" if os.path.isdir(os.path.expanduser(path)) else "no such file"
        raise UsageError(f"data.tokenizer={path}: {what}; allowed: a tokenizer.json of `tokenizers`, or bytes")
    path = config.init_from
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        raise UsageError(f"init_from={path}: no such folder; allowed: one with config.json and *.safetensors")


def _of_choice(node: DictConfig, group: str, field: str, schemas: Mapping[str, type]) -> None:
    """Raise if a field names another choice of its group: the keys of that choice would be missing."""
    name, schema = node[field], OmegaConf.get_type(node)
    if name not in schemas:
        raise UsageError(f"{group}.{field}={name}: must be one of {', '.join(schemas)}{did_you_mean(name, schemas)}")
    if schemas[name] is not schema and schema in schemas.values():
        raise UsageError(f"{group}.{field}={name}: its keys belong to another choice; allowed: {group}={name}")


def _together(config: DictConfig) -> None:
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise UsageError(f"optimizer.betas={config.optimizer.betas}: must be two numbers in [0, 1), such as [0.9,0.95]")
    _of_choice(config.data, "data", "corpus", {schema.corpus: schema for schema in DATA_SCHEMAS})
    _of_choice(config.logger, "logger", "name", {"none": LoggerSchema, "wandb": WandbSchema})
    path = OmegaConf.select(config, "data.path")
    paths = list(path) if isinstance(path, ListConfig) else [path]
    if path is not None and (not paths or not all(isinstance(one, str) and one for one in paths)):
        raise UsageError(f"data.path={path}: must be a file, a folder, a glob, or a list of these in brackets")
    if config.data.corpus == "text" and not config.data.path:
        raise UsageError("data.path: data=text needs one: data.path=FOLDER (or a file, a glob, a list of these)")
    if config.data.corpus == "hub" and not config.data.name:
        raise UsageError("data.name: data=hub needs one: data.name=OWNER/DATASET, or a local folder")
    if config.model.name == "pretrained" and config.init_from is None:
        raise UsageError("model=pretrained: needs init_from=FOLDER, the model whose shape it takes")
    if config.validate_only and config.resume is None and config.init_from is None:
        raise UsageError("validate_only=true: needs resume=CHECKPOINT or init_from=FOLDER, the model to validate")
    parallel_plan(config)
    check_step_in_backward(config)
    if config.parallel.check and config.trainer.devices * config.trainer.num_nodes == 1:
        raise UsageError("parallel.check=true: there is one device, and nothing to compare; allowed: false")
    if config.trainer.accelerator == "cpu" and config.precision in ("fp16-mixed", "fp8"):
        raise UnavailableError(
            f"precision={config.precision}: needs a GPU; must be one of fp32, bf16-mixed, bf16-true on a CPU"
        )
