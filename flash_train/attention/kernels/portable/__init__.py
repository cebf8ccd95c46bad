"""Kernels in Triton for every GPU that it compiles for."""
