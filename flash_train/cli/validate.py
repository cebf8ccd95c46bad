"""Ranges and choices that types can't express: one table, and the few rules that tie two keys together."""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flash_train.cli.errors import UnavailableError, UsageError, did_you_mean
from flash_train.cli.schema import TrainSchema


@dataclass(frozen=True)
class Rule:
    """`allows` says whether a value is in range; `words` completes "allowed: "."""

    allows: Callable[[Any], bool]
    words: str
    choices: tuple[str, ...] = ()


def at_least(low: float) -> Rule:
    return Rule(lambda value: value >= low, f"{low} or more")


def above(low: float) -> Rule:
    return Rule(lambda value: value > low, f"more than {low}")


def within(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value <= high, f"from {low} to {high}")


def below(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value < high, f"from {low} up to {high} (excluded)")


def one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, ", ".join(choices), choices)


# Choices stand here once more, for a mistake is told at once and to import what has them takes seconds.
RULES = {
    "seq_len": at_least(2),
    "max_steps": at_least(1),
    "stop_after": at_least(1),
    "batch_size": at_least(1),
    "accumulate": at_least(1),
    "seed": within(0, 2**32 - 1),
    "precision": one_of("fp32", "bf16-mixed", "bf16-true", "fp16-mixed"),
    "log_every": at_least(1),
    "val_every": at_least(1),
    "attention.backend": one_of("auto", "flash", "triton", "hopper", "sdpa", "standard", "chunked"),
    "attention.dropout": below(0, 1),
    "model.n_layers": at_least(1),
    "model.width": at_least(1),
    "model.n_heads": at_least(1),
    "model.n_kv_heads": at_least(1),
    "model.head_dim": at_least(2),
    "model.mlp_width": at_least(1),
    "model.vocab_size": at_least(1),
    "model.rope_theta": above(0),
    "model.rope_scaling.kind": one_of("linear", "ntk", "yarn", "llama3", "none"),
    "model.norm_eps": above(0),
    "model.residual_dropout": below(0, 1),
    "data.packing": one_of("best_fit", "concat"),
    "data.errors": one_of("strict", "replace", "skip"),
    "data.val_fraction": Rule(lambda value: 0 < value < 1, "between 0 and 1, both excluded"),
    "data.val_batches": at_least(1),
    "data.val_tokens": at_least(2),
    "data.num_workers": at_least(0),
    "optimizer.lr": above(0),
    "optimizer.min_lr_ratio": within(0, 1),
    "optimizer.eps": above(0),
    "optimizer.weight_decay": at_least(0),
    "optimizer.warmup_steps": at_least(0),
    "optimizer.gradient_clip": at_least(0),
    "trainer.accelerator": one_of("auto", "cpu", "cuda", "mps"),
    "trainer.devices": at_least(1),
    "trainer.num_nodes": at_least(1),
    "trainer.strategy": one_of("auto", "ddp"),
    "trainer.checkpoint_every": at_least(1),
    "trainer.keep_checkpoints": at_least(1),
    "callbacks.sample.tokens": at_least(0),
    "callbacks.sample.seconds": above(0),
    "callbacks.memory_snapshot.every": at_least(1),
    "memory.mode": one_of("none", "selective", "checkpoint"),
    "logger.name": one_of("wandb", "none"),
    "logger.mode": one_of("auto", "online", "offline"),
}


def validate(config: DictConfig) -> None:
    """Check every value of a composed configuration; `null` is for the schema to allow.

    Raises:
        UsageError: one line with the key, what was given and what is allowed.
    """
    for key in map(str, config):
        if key not in TrainSchema.__dataclass_fields__:
            raise UsageError(f"{key}: no such key{did_you_mean(key, TrainSchema.__dataclass_fields__)}")
    for key, rule in RULES.items():
        value = OmegaConf.select(config, key)
        if value is not None and not rule.allows(value):
            raise UsageError(f"{key}={value}: allowed: {rule.words}{did_you_mean(str(value), rule.choices)}")
    _together(config)


def require_files(config: DictConfig) -> None:
    """Look for the files and folders that a run reads: those who read them would say the same, seconds later.

    Raises:
        UsageError: one line with the key that names what is not there.
    """
    paths = OmegaConf.select(config, "data.path") or []
    for path in [paths] if isinstance(paths, str) else paths:
        # What ** matches is for the corpus to find: `glob` may follow links in circles.
        parts = takewhile(lambda part: part != "**", Path(path).expanduser().parts)
        place = str(Path(*parts)) if path else ""
        if not os.path.exists(place) and next(glob.iglob(place), None) is None:
            raise UsageError(f"data.path={path}: no such file or folder, and no glob that matches any")
    path = OmegaConf.select(config, "data.tokenizer")
    if path not in (None, "bytes") and not os.path.isfile(os.path.expanduser(path)):
        raise UsageError(f"data.tokenizer={path}: no such file; allowed: a tokenizer.json of `tokenizers`, or bytes")
    path = config.init_from
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        raise UsageError(f"init_from={path}: no such folder; allowed: one with config.json and *.safetensors")


def _together(config: DictConfig) -> None:
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise UsageError(f"optimizer.betas={config.optimizer.betas}: allowed: two numbers from 0 up to 1 (excluded)")
    if config.data.corpus == "text" and not config.data.path:
        raise UsageError("data.path: data=text needs one: data.path=FOLDER (or a file, a glob, a list of these)")
    if config.data.corpus == "hub" and not config.data.name:
        raise UsageError("data.name: data=hub needs one: data.name=OWNER/DATASET, or a local folder")
    if config.model.name == "pretrained" and config.init_from is None:
        raise UsageError("model=pretrained: needs init_from=FOLDER, the model whose shape it takes")
    if config.validate_only and config.resume is None and config.init_from is None:
        raise UsageError("validate_only=true: needs resume=CHECKPOINT or init_from=FOLDER, the model to validate")
    if config.trainer.accelerator == "cpu" and config.precision == "fp16-mixed":
        raise UnavailableError("precision=fp16-mixed: needs a GPU; allowed on a CPU: fp32, bf16-mixed, bf16-true")
