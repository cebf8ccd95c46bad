"""Attention in plain PyTorch: the reference for tests and the baselines for benchmarks."""
