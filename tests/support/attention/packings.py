"""Counts how many variants of each kernel Triton compiles for rows with few and with many documents.

``python -m tests.support.attention.packings`` compiles for an H200 and needs no GPU.
"""

from collections.abc import Iterator

import torch

from flash_train.attention import AttentionSpec, Causal, Packing
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.hopper import launch as hopper
from flash_train.attention.kernels.launch import Launch
from flash_train.attention.kernels.launch_options import launch_options
from flash_train.attention.kernels.portable import launch
from flash_train.attention.kernels.results import lse_shape
from flash_train.attention.kernels.tile_sizes import Tile
from tests.support.attention.compiled import _driver

TOKENS, DOCUMENTS = 131072, (1, 2, 7, 16, 64, 500)


def launches(documents: int) -> Iterator[Launch]:
    """All launches of a forward and a backward, of Hopper's kernels and of the portable ones."""
    q, k = (torch.empty(TOKENS, heads, 128, dtype=torch.bfloat16) for heads in (16, 8))
    lse, counter = torch.empty(lse_shape(q)), torch.zeros(1, dtype=torch.int32)
    cu = torch.linspace(0, TOKENS, documents + 1).to(torch.int32)
    call = Call(*operands_of(q, k, AttentionSpec(Causal()), Packing(cu, cu), None, (0, 0, 0, 0), None, None))
    sums = hopper.make_backward_buffers(q, call)
    yield hopper.forward_launch(q, k, k, q, lse, counter, call)
    yield hopper.prepare_launch(k, q, q, lse, None, sums, call)
    yield hopper.backward_launch(q, k, k, q, sums, q, k, k, call)
    yield hopper.finish_launch(sums, q, k, call)
    yield hopper.dq_launch(q, k, k, q, sums, q, None, call)
    tile = Tile(64, 64, 4, 2)
    yield launch.forward_launch(q, k, k, q, lse, call, tile)
    yield launch.rows_launch(q, q, lse, None, lse, lse, call)
    yield launch.dkdv_launch(q, k, k, q, lse, lse, k, k, call, tile)
    yield launch.dq_launch(q, k, k, q, lse, lse, q, None, call, tile)


def main() -> None:
    _driver().capability = (9, 0)
    forms: dict[str, set[str]] = {}
    with launch_options(processors=132):
        for documents in DOCUMENTS:
            for found in launches(documents):
                constants = found.options | ({"PRECISION": "bf16x6"} if "PRECISION" in found.constants else {})
                kernel = found.kernel.warmup(*found.arguments, grid=(1,), **constants)
                forms.setdefault(found.kernel.__name__, set()).add(kernel.hash)
    for name, found in forms.items():
        print(name, len(found))


if __name__ == "__main__":
    main()
