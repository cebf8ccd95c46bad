"""The process groups of a run: who shares weights, and who shares rows."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flash_train.distributed.dims import ParallelDims

REPLICATE, SHARD = "replicate", "shard"  # dimensions of `weights_mesh`
DATA, CONTEXT = "data", "context"  # dimensions of `rows_mesh`


def weights_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """Return the mesh (replicate, shard), or (shard,) if there is one replica; all ranks call it."""
    if dims.replicate == 1:
        return init_device_mesh(device_type, (dims.shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (dims.replicate, dims.shard), mesh_dim_names=(REPLICATE, SHARD))


def rows_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """Return the mesh (data, context); all ranks call it."""
    return init_device_mesh(device_type, (dims.data_ranks, dims.context), mesh_dim_names=(DATA, CONTEXT))
