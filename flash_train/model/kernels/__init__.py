"""The model's fused kernels. They are imported once a tensor is on CUDA."""
