"""Long-context training for PyTorch Lightning on Triton FlashAttention kernels.

Import from the packages: `flash_train.attention`, `.model`, `.data`, `.training`. This module imports none of them, so
that each loads only what it needs.
"""

__version__ = "0.3.0.dev0"

__all__ = ["__version__"]
