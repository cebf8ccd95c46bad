"""A kernel of the Hugging Face hub whose functions are this project's, for libraries that load attention from the hub.

    from flash_train.integrations.hub_kernel import write_kernel

    write_kernel("kernel")  # kernels.get_local_kernel(Path("kernel")), or upload it

The folder imports the installed package: it holds no kernels. `transformers` needs no folder; see
`flash_train.integrations.transformers`.
"""

from __future__ import annotations

from pathlib import Path

from flash_train.checks import check, integer_at_least
from flash_train.files import write_json, write_text

NAME = "flash-train"
BACKENDS = ("cpu", "cuda")  # of the package `kernels`: a variant of the build for each

MODULE = '''"""The attention of the installed package flash-train."""

from flash_train.attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''


def write_kernel(folder: str | Path, *, version: int = 1) -> Path:
    """Write the folder of a kernel as `kernels` 0.17 loads it, and return its path.

    Args:
        folder: may exist; files of the same names are written again.
        version: of the kernel on the hub. `transformers` asks for version 1 unless a user names a revision.

    Raises:
        ValueError: a version below 1.

    Source: the layout of the package `kernels`, `build/torch-<backend>/__init__.py` and `metadata.json`.
    """
    check("version", version, integer_at_least(1))
    folder = Path(folder)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        metadata = {
            "id": f"flash_train_{backend}_{version}",
            "name": NAME,
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        write_text(variant / "__init__.py", MODULE)
        write_json(variant / "metadata.json", metadata)
    return folder
