"""Export a checkpoint to a folder that `transformers` loads: config.json, model.safetensors and tokenizer.json."""

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_train.cli.config.errors import ArgumentParser, UsageError, blame, one_line_errors
from flash_train.cli.config.paths import require_usable
from flash_train.cli.launch.slurm import last_checkpoint
from flash_train.output import LOGGER

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # PyTorch's names
CONFIG = "config.json"
PREFIX = "model."  # begins the names of the weights in a checkpoint


def main(arguments: Sequence[str] | None = None) -> None:
    """`python scripts/export.py runs/… folder`."""
    parser = ArgumentParser(description=__doc__, page="docs/models.md#export")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory, for its newest checkpoint")
    parser.add_argument("folder", type=folder_named, help="where to write; created if it doesn't exist")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; default: the checkpoint's")
    parser.add_argument("--force", action="store_true", help="replace the model that the folder holds")
    with one_line_errors():
        args = parser.parse_args(arguments)
        source, folder = Path(os.path.expanduser(args.checkpoint)), Path(os.path.expanduser(args.folder))
        if not source.exists():
            raise UsageError(
                f"checkpoint={source}: no such file or folder; allowed: a checkpoint, or a run's directory"
            )
        check_target(folder, args.force)
        with blame(f"checkpoint={source}"):
            print(export(read(source), folder, DTYPES.get(args.dtype)))


def folder_named(text: str) -> Path:
    """Argparse's type of a folder; an empty name would be the current one."""
    if not text:
        raise ArgumentTypeError("is empty; allowed: the name of a folder, or . for this one")
    return Path(text)


def check_target(folder: Path, force: bool) -> None:
    """Raise if the folder is not writable, or holds files of a model and `force` is False."""
    from flash_train.cli.run.export_files import EARLIER

    require_usable("folder", folder)
    found = next((file for pattern in (CONFIG, *EARLIER) for file in sorted(folder.glob(pattern))), None)
    if found and not force:
        name = found.relative_to(folder)
        raise UsageError(f"folder={folder}: holds a model ({name}); allowed: another folder, or --force to replace it")


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, or of the newest one in a run's directory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is no checkpoint.
    """
    from flash_train.distributed.checkpoint import is_sharded_checkpoint
    from flash_train.training.callbacks.checkpoint import read_checkpoint

    return read_checkpoint(last_checkpoint(path) if path.is_dir() and not is_sharded_checkpoint(path) else path)


def export(checkpoint: Mapping[str, Any], folder: Path, dtype: str | None = None) -> Path:
    """Write the model of a checkpoint in the Llama layout, and return the folder.

    The folder also gets the tokenizer's files. If training began from another model, it gets that model's other files.

    Raises:
        ValueError: the layout can't represent the model.
        UsageError: writing fails.
    """
    import torch

    from flash_train.cli.run.export_files import EARLIER, Files
    from flash_train.data.special_tokens import MODEL_CONFIG
    from flash_train.files import whole_folder
    from flash_train.model import ModelConfig, save_pretrained
    from flash_train.model.pretrained import dtype_name
    from flash_train.optim import exact_weights

    model = ModelConfig.from_dict(checkpoint["hyper_parameters"]["model"])
    optimizers = checkpoint.get("optimizer_states")
    weights = dict(checkpoint["state_dict"])
    if dtype not in (None, "bfloat16") and optimizers:
        weights = exact_weights(weights, optimizers[0], PREFIX)
    kind = getattr(torch, dtype) if dtype else None
    weights = {name.removeprefix(PREFIX): weight.to(kind) for name, weight in weights.items()}
    files = Files.of(checkpoint)
    if any(path.resolve() == folder.resolve() for path in files.read_from):
        raise UsageError(f"folder={folder}: the run read its tokenizer or model there; allowed: another folder")
    try:
        with whole_folder(folder, earlier=EARLIER, last=MODEL_CONFIG) as staged:
            save_pretrained(weights, model, staged, values=files.config(model, dtype_name(weights)))
            files.write(staged)
    except OSError as error:
        raise UsageError(f"folder={folder}: {error}") from error
    if files.left_out:
        LOGGER.warning("%s: %s; copy it there by hand", folder, files.left_out)
    return folder


if __name__ == "__main__":
    main()
