"""Checkpoint → a folder that `transformers` loads: config.json, model.safetensors and tokenizer.json, as of a Llama."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_train.cli.errors import ArgumentParser, UsageError, blame, one_line_errors
from flash_train.cli.paths import CHECKPOINTS, require_usable

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # as PyTorch calls them
CONFIG, WEIGHTS = "config.json", ".safetensors"  # by which a folder is known to hold a model
PREFIX = "model."  # of the weights' names in a checkpoint
TOKENIZER = "tokenizer.json"
SPECIAL_NAMES = ("tokenizer_config.json", "special_tokens_map.json")  # where transformers says which token is bos, eos


def main(arguments: Sequence[str] | None = None) -> None:
    """`python scripts/export.py runs/… folder`."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory for its newest")
    parser.add_argument("folder", type=Path, help="where to write; made if it doesn't exist")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are in the checkpoint")
    parser.add_argument("--force", action="store_true", help="replace the model that the folder holds")
    with one_line_errors():
        args = parser.parse_args(arguments)
        source, folder = args.checkpoint.expanduser(), args.folder.expanduser()
        if not source.exists():
            raise UsageError(
                f"checkpoint={source}: no such file or folder; allowed: a checkpoint, or a run's directory"
            )
        check_target(folder, args.force)
        with blame(f"checkpoint={source}"):
            print(export(read(source), folder, DTYPES.get(args.dtype)))


def check_target(folder: Path, force: bool) -> None:
    """Refuse a folder that can't be written in, or, unless `force`, whose model would be replaced."""
    require_usable("folder", folder)
    if not force and any(path.name == CONFIG or path.suffix == WEIGHTS for path in folder.glob("*")):
        raise UsageError(f"folder={folder}: holds a model; allowed: another folder, or --force to replace it")


def read(path: Path) -> dict[str, Any]:
    """A checkpoint, or the newest of a run's directory.

    Raises FileNotFoundError where there is none, ValueError for a file that is something else.
    """
    from flash_train.training.callbacks.checkpoint import newest_checkpoint, read_checkpoint

    return read_checkpoint(newest_checkpoint(path / CHECKPOINTS) if path.is_dir() else path)


def export(checkpoint: Mapping[str, Any], folder: Path, dtype: str | None = None) -> Path:
    """Write the model of a checkpoint in the Llama layout, and the tokenizer's file; returns the folder.

    Raises ValueError for a model that the layout can't hold, UsageError where writing fails.
    """
    import torch

    from flash_train.model import ModelConfig, save_pretrained

    kind = getattr(torch, dtype) if dtype else None
    weights = {name.removeprefix(PREFIX): weight.to(kind) for name, weight in checkpoint["state_dict"].items()}
    data = checkpoint.get("PackedDataModule", {})
    model = ModelConfig.from_dict(checkpoint["hyper_parameters"]["model"])
    try:
        save_pretrained(weights, model, folder, max_seq_len=data.get("seq_len"), token_ids=token_ids(data))
        copy_tokenizer(data, folder)
    except OSError as error:
        raise UsageError(f"folder={folder}: {error}") from error
    return folder


def token_ids(data: Mapping[str, Any]) -> dict[str, int | None]:
    """bos_token_id, eos_token_id, pad_token_id of what `PackedDataModule` saved; of those that it didn't, nothing."""
    ids = dict(data.get("token_ids", {}))
    if ids and ids["pad"] == ids["eos"]:
        ids["pad"] = None  # there is none: transformers would leave out the gradient of eos's embedding
    return {f"{name}_token_id": token for name, token in ids.items()}


def copy_tokenizer(data: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer.json that the run read beside the model, or say in one line why not. Bytes have none."""
    from flash_train.data.tokenizer import ByteTokenizer, file_fingerprint
    from flash_train.profiling import write_text

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
