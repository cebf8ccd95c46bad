"""Checkpoint → a folder that `transformers` loads: config.json, model.safetensors and tokenizer.json, as of a Llama."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flash_train.cli.errors import blame, one_line_errors
from flash_train.cli.paths import CHECKPOINTS
from flash_train.data import ByteTokenizer
from flash_train.data.tokenizer import file_fingerprint
from flash_train.model import ModelConfig, save_pretrained
from flash_train.profiling import write_text
from flash_train.training import newest_checkpoint
from flash_train.training.callbacks.checkpoint import read_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PREFIX = "model."  # of the weights' names in a checkpoint
TOKENIZER = "tokenizer.json"
SPECIAL_NAMES = ("tokenizer_config.json", "special_tokens_map.json")  # where transformers says which token is bos, eos


def main(arguments: Sequence[str] | None = None) -> None:
    """`python scripts/export.py runs/… folder`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory for its newest")
    parser.add_argument("folder", type=Path, help="where to write; made if it doesn't exist")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are in the checkpoint")
    args = parser.parse_args(arguments)
    with one_line_errors(), blame("checkpoint"):
        print(export(args.checkpoint, args.folder, DTYPES.get(args.dtype)))


def export(path: Path, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model of a checkpoint in the Llama layout, and the tokenizer's file; returns the folder.

    Raises FileNotFoundError where there is no checkpoint, ValueError for a file that is none, or for a model that the
    layout can't hold.
    """
    if path.is_dir():
        path = newest_checkpoint(path / CHECKPOINTS)
    checkpoint = read_checkpoint(path)
    weights = {name.removeprefix(PREFIX): weight.to(dtype) for name, weight in checkpoint["state_dict"].items()}
    data = checkpoint.get("PackedDataModule", {})
    folder = save_pretrained(
        weights,
        ModelConfig.from_dict(checkpoint["hyper_parameters"]["model"]),
        folder,
        max_seq_len=data.get("seq_len"),
        token_ids=token_ids(data),
    )
    copy_tokenizer(data, folder)
    return folder


def token_ids(data: Mapping[str, Any]) -> dict[str, int | None]:
    """bos_token_id, eos_token_id, pad_token_id of what `PackedDataModule` saved; of those that it didn't, nothing."""
    ids = dict(data.get("token_ids", {}))
    if ids and ids["pad"] == ids["eos"]:
        ids["pad"] = None  # there is none: transformers would leave out the gradient of eos's embedding
    return {f"{name}_token_id": token for name, token in ids.items()}


def copy_tokenizer(data: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer.json that the run read beside the model, or say in one line why not. Bytes have none."""
    fingerprint, file = data.get("tokenizer"), Path(data.get("tokenizer_file") or "")
    if fingerprint in (None, ByteTokenizer.fingerprint):
        return
    if not file.name:
        reason = "the checkpoint names no file of its tokenizer"
    elif not file.is_file():
        reason = f"{file} is no longer there"
    elif not fingerprint.startswith(file_fingerprint(content := file.read_bytes())):
        reason = f"{file} has changed since the run"
    else:
        write_text(folder / TOKENIZER, content.decode())
        for beside in map(file.with_name, SPECIAL_NAMES if file.name == TOKENIZER else ()):
            if beside.is_file():
                write_text(folder / beside.name, beside.read_text(encoding="utf-8"))
        return
    print(f"{folder}: {TOKENIZER} was not written, as {reason}; copy it there by hand", file=sys.stderr)
