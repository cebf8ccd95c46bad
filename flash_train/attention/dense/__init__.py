"""Attention in plain PyTorch: what the kernels are checked against and compared with."""
