"""Sums of gradients on several ranks, in pieces, compared with sums in fp64.

python -m tests.support.distributed.summed_gradients RANKS
"""

import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from flash_train.distributed import gradient_sums
from flash_train.distributed.gradient_sums import GradientSums
from flash_train.distributed.leave import leave_groups
from flash_train.distributed.sharding import shard_module


def check(rank: int, ranks: int, folder: str) -> None:
    """Compare sums and means of several sizes; a piece has 10 numbers of each rank, or fewer."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    gradient_sums.PIECE = 10 * ranks * 2
    sums = GradientSums(nn.Linear(2, 2))
    for size in (1, 10, 25):
        inputs = torch.randn(ranks, ranks * size, generator=torch.Generator().manual_seed(size)).bfloat16()
        exact = inputs.double().sum(0).view(ranks, size)[rank]
        for op, right in ((dist.ReduceOp.SUM, exact), (dist.ReduceOp.AVG, exact / ranks)):
            given, out = (
                sums.allocate((n * size,), dtype=torch.bfloat16, device=torch.device("cpu")) for n in (ranks, 1)
            )
            given.copy_(inputs[rank])
            out.fill_(float("nan"))
            sums(output_tensor=out, input_tensor=given, group=dist.group.WORLD, op=op)
            # One rounding; a CPU rounds a mean of three twice
            torch.testing.assert_close(out, right.bfloat16(), rtol=0 if ranks == 2 else 2**-8, atol=0)
    check_adds(ranks)
    leave_groups()


class Observed(GradientSums):
    """Notes at each allocation whether it adds."""

    def __init__(self, module: nn.Module, seen: list[bool]) -> None:
        super().__init__(module)
        self.seen = seen

    def allocate(self, *size: Any, **options: Any) -> torch.Tensor:
        self.seen.append(self.adds())
        return super().allocate(*size, **options)


def check_adds(ranks: int) -> None:
    """Gradients are added only if there are some of an earlier backward."""
    layers = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2))
    module = pl.LightningModule()
    module.layers = layers
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    shard_module(module, mesh, MixedPrecisionPolicy(), torch.device("cpu"), exchanges_gradients=True)
    seen: list[bool] = []
    for part in layers:
        part.set_custom_reduce_scatter(Observed(part, seen))
    for adds in (False, True):
        layers(torch.randn(3, 4)).sum().backward()
        assert seen == [adds] * 4, seen  # the input and the output of two reductions
        seen.clear()


if __name__ == "__main__":
    number = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as shared:
        mp.spawn(check, (number, shared), nprocs=number)
