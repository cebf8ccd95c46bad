"""The state of AdamW on weights that two ranks share, by rows or by columns.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.test_sharded_state FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from flash_train.distributed.leave import leave_groups
from flash_train.distributed.sharding import local, state_like, state_zeros
from flash_train.optim import AdamW
from tests.support.processes import run_ranks

CASES = [
    (torch.float32, None, {512: torch.float32}),
    (torch.bfloat16, "bf16", {512: torch.bfloat16}),
    (torch.bfloat16, "8bit", {512: torch.uint8, 1024: torch.uint8}),
    (torch.float32, "8bit", {512: torch.uint8}),
]


def test_states_return_from_a_checkpoint(tmp_path):
    out = run_ranks("tests.distributed.test_sharded_state", 2, tmp_path)
    assert out.splitlines() == ["all states are equal"]


def trained(width, dtype, moments, steps, *, seed=0, dim=None):
    """Train a weight (6, width), sharded over a dimension or whole, and return it with its optimizer."""
    torch.manual_seed(seed)
    model = nn.Linear(width, 6, bias=False).to(dtype)
    if dim is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: Shard(dim))
    optimizer = AdamW(model.parameters(), lr=1e-2, moments=moments)
    for _ in range(steps):
        model(torch.randn(4, width).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight, optimizer


def entries(optimizer):
    return {name: value for name, value in optimizer.state_dict()["state"][0].items() if name != "step"}


def check_round_trip(folder, width, dtype, moments, dim, stored):
    weight, optimizer = trained(width, dtype, moments, 2, dim=dim)
    whole = entries(trained(width, dtype, moments, 2)[1])
    saved = entries(optimizer)
    assert saved["exp_avg"].dtype == stored
    for name, value in saved.items():
        assert isinstance(value, DTensor) and value.shape == whole[name].shape, (name, value.shape)
        if value.dtype not in (torch.int16, torch.bfloat16):  # gloo gathers no int16; each part rounds with its draws
            assert torch.equal(value.full_tensor(), whole[name]), name
        placed = state_like(whole[name], weight, None)
        assert torch.equal(placed.to_local(), whole[name].chunk(2, dim)[dist.get_rank()]), name
        assert placed.shape == value.shape
        assert placed.to_local().untyped_storage().nbytes() == placed.to_local().nbytes
        empty = state_zeros(weight, value.shape, value.dtype, None)
        assert empty.shape == value.shape and local(empty).shape == local(value).shape
    dcp.save(saved, checkpoint_id=folder)
    _, other = trained(width, dtype, moments, 1, seed=1, dim=dim)
    read = entries(other)
    assert not torch.equal(local(read["exp_avg"]), local(saved["exp_avg"]))
    dcp.load(read, checkpoint_id=folder)
    other.load_state_dict({**other.state_dict(), "state": {0: {"step": torch.tensor(2.0), **read}}})
    for name, value in entries(other).items():
        assert torch.equal(local(value), local(saved[name])), name


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, (dtype, moments, widths) in enumerate(CASES):
        for dim in (0, 1):
            for width, stored in widths.items():
                check_round_trip(Path(sys.argv[1]) / f"{number}-{dim}-{width}", width, dtype, moments, dim, stored)
    _, narrow = trained(768, torch.float32, "8bit", 1, dim=1)  # 384 columns are no whole number of blocks
    assert entries(narrow)["exp_avg"].dtype == torch.float32 and entries(narrow)["exp_avg"].shape == (6, 768)
    if dist.get_rank() == 0:
        print("all states are equal")
    leave_groups()


if __name__ == "__main__":
    main()
