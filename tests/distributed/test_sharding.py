"""Weights on the meta device are allocated and filled, and no others.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.test_sharding
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flash_train.distributed.leave import leave_groups
from flash_train.distributed.sharding import materialize
from tests.support.processes import run_ranks

CPU = torch.device("cpu")


def partly_on_meta():
    torch.manual_seed(0)
    module = nn.ModuleDict({"trunk": nn.Linear(4, 4)})
    module.register_buffer("scale", torch.tensor([2.0]), persistent=False)
    with torch.device("meta"):
        module["head"] = nn.Linear(4, 3)
    return module


def test_weights_that_have_values_keep_them():
    module = partly_on_meta()
    right = {name: x.clone() for name, x in (*module.named_parameters(), *module.named_buffers()) if not x.is_meta}
    assert right.keys() == {"trunk.weight", "trunk.bias", "scale"}
    materialize(module, CPU)
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(torch.equal(found[name], value) for name, value in right.items())
    assert not found["head.weight"].is_meta and 0 < found["head.weight"].abs().max() <= 0.5  # as nn.Linear draws them


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MultiheadAttention(4, 2), "in_proj_bias, in_proj_weight: on the meta device"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.PReLU(), nn.ParameterList([torch.ones(2)])), "2.0: on the meta"),
    ],
)
def test_weights_that_nothing_fills_are_refused(make, message):
    with torch.device("meta"):
        module = make()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*give {type(module).__name__} a method initialize_w"):
        materialize(module, CPU)
    materialize(module, CPU, loads_state=True)  # a checkpoint has them
    assert not any(weight.is_meta for weight in module.parameters())


def test_a_checkpoint_has_no_buffers_that_are_not_persistent():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
        module.positions = nn.Module()
        module.positions.register_buffer("angles", torch.ones(3), persistent=False)
    module.reset_parameters = None
    with pytest.raises(ValueError, match=r"^positions\.angles: on the meta device"):
        materialize(module, CPU, loads_state=True)


def test_a_module_that_fills_its_parts_is_asked_alone():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.empty(3)), nn.Linear(3, 3)

        def initialize_weights(self):
            for weight in self.parameters():
                nn.init.constant_(weight, 5.0)

    with torch.device("meta"):
        module = Whole()
    materialize(module, CPU)
    assert all(bool((weight == 5.0).all()) for weight in module.parameters())


def test_a_part_of_a_sharded_weight_can_be_filled():
    """`nn.Embedding` zeroes the row of its padding."""
    assert run_ranks("tests.distributed.test_sharding", 2).splitlines() == ["as on one device"]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def make():
        return nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 3))

    with torch.device("meta"):
        module = make()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(0)
    materialize(module, CPU)
    torch.manual_seed(0)
    right = make()
    assert not right[0].weight[1].any()
    for found, weight in zip(module.parameters(), right.parameters(), strict=True):
        assert isinstance(found, DTensor) and torch.equal(found.full_tensor(), weight), (found.full_tensor(), weight)
    if dist.get_rank() == 0:
        print("as on one device")
    leave_groups()


if __name__ == "__main__":
    main()
