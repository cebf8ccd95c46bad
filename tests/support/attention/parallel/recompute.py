"""Two ranks share a row: how often memory modes communicate, and whether gradients repeat bit for bit.

    python -m tests.support.attention.parallel.recompute

Prints a JSON object per method: exchanges of a forward and backward by memory mode, and whether all gradients agree.
"""

from __future__ import annotations

import json
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from flash_train.attention import AttentionSpec, Causal, RngState
from flash_train.attention.parallel import SharedRow, plan_row, shared_attention
from flash_train.attention.parallel.exchange import Route
from flash_train.distributed.leave import leave_groups
from flash_train.model.recompute import MEMORY_MODES, run_block

RANKS, TOKENS = 2, 128


def check(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    exchanges = 0
    pack = Route.pack

    def counted(self: Route, *sources: Tensor) -> object:
        nonlocal exchanges
        exchanges += 1
        return pack(self, *sources)

    Route.pack = counted  # type: ignore[method-assign]
    for method in ("gather", "ulysses"):
        plan = plan_row([100, 28], TOKENS, RANKS)
        row = SharedRow(plan, dist.group.WORLD, torch.device("cpu"), method, group_bytes=1)  # a group per key head
        generator = torch.Generator().manual_seed(rank)
        q, k, v = (
            torch.randn(TOKENS // RANKS, heads, 8, generator=generator).bfloat16().requires_grad_()
            for heads in (8, 4, 4)
        )
        dout = torch.randn(q.shape, generator=generator).bfloat16()

        def block(q: Tensor, k: Tensor, v: Tensor, row: SharedRow = row) -> Tensor:
            spec, rng = AttentionSpec(Causal(), dropout=0.1), RngState(3)
            return shared_attention(2 * q, 2 * k, 2 * v, spec, row, rng=rng, backend="chunked")

        counts, gradients = {}, []
        for memory in (*MEMORY_MODES, "none"):
            exchanges = 0
            out = run_block(block, q, k, v, memory=memory, random=False)
            gradients.append(torch.autograd.grad(out, (q, k, v), dout))
            counts[memory] = exchanges
        same = all(torch.equal(a, b) for found in gradients for a, b in zip(found, gradients[0], strict=True))
        if rank == 0:
            print(json.dumps({"method": method, "exchanges": counts, "same": same}), flush=True)
    dist.barrier()
    leave_groups()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(check, (folder,), nprocs=RANKS)
