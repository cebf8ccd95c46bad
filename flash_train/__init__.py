"""Long-context training for PyTorch Lightning on Triton FlashAttention kernels."""

__version__ = "0.1.0"
