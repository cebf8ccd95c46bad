"""Checkpoint → a folder that `transformers` loads: config.json and model.safetensors in the Llama layout."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_train.cli.build import read_checkpoint
from flash_train.cli.errors import blame, one_line_errors
from flash_train.cli.paths import CHECKPOINTS
from flash_train.data import ByteTokenizer
from flash_train.model import ModelConfig, save_pretrained
from flash_train.training import newest_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PREFIX = "model."  # of the weights' names in a checkpoint


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
    """Write the model of a checkpoint in the Llama layout; returns the folder.

    Raises FileNotFoundError where there is no checkpoint, ValueError for a file that is none, or for a model that the
    layout can't hold.
    """
    if path.is_dir():
        path = newest_checkpoint(path / CHECKPOINTS)
    checkpoint = read_checkpoint(path)
    weights = {name.removeprefix(PREFIX): weight.to(dtype) for name, weight in checkpoint["state_dict"].items()}
    data = checkpoint.get("PackedDataModule", {})
    ids = ByteTokenizer if data.get("tokenizer") == ByteTokenizer.fingerprint else None
    return save_pretrained(
        weights,
        ModelConfig.from_dict(checkpoint["hyper_parameters"]["model"]),
        folder,
        max_seq_len=data.get("seq_len"),
        token_ids=ids and {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad},
    )
