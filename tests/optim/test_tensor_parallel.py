"""AdamW with PyTorch's tensor parallelism: the steps of one process.

python -m torch.distributed.run --nproc-per-node 2 -m tests.optim.test_tensor_parallel
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from flash_train.distributed.leave import leave_groups
from flash_train.optim import AdamW
from tests.support.processes import run_ranks


def test_a_gradient_in_summands_is_summed():
    assert run_ranks("tests.optim.test_tensor_parallel", 2).splitlines() == ["equal to one process"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def trained(parallel):
    torch.manual_seed(0)
    block = Block()
    if parallel:  # each rank normalises its own tokens, so it has its part of the sum over tokens
        plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0))}
        parallelize_module(block, init_device_mesh("cpu", (2,)), {**plan, "down": RowwiseParallel()})
    optimizer = AdamW(block.parameters(), lr=1e-2)
    kinds = set()
    for _ in range(3):
        x = torch.randn(4, 8)
        block(x.chunk(2)[dist.get_rank()] if parallel else x).square().mean().backward()
        kinds |= {type(place).__name__ for p in block.parameters() if parallel for place in p.grad.placements}
        optimizer.step()
        optimizer.zero_grad()
    weights = [weight.full_tensor() if parallel else weight for weight in block.parameters()]
    return [weight.detach() for weight in weights], kinds


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found, kinds = trained(True)
    assert kinds == {"Partial", "Replicate", "Shard"}, kinds
    for weight, right in zip(found, trained(False)[0], strict=True):
        assert not isinstance(weight, DTensor)
        torch.testing.assert_close(weight, right)
    if dist.get_rank() == 0:
        print("equal to one process")
    leave_groups()


if __name__ == "__main__":
    main()
