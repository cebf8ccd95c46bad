"""Lists of tiles, compared with lists from PyTorch's sort."""

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

from flash_train.attention.kernels.tile_lists import list_tiles
from flash_train.attention.masks import PARTIAL, SKIPPED
from tests.support import gluon


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "with terms"])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("n_blocks", [1, 15, 16, 50])  # a program reads 16 at a time
def test_tiles_of_the_blocks_that_are_visited(n_blocks, repeats, asks):
    generator = torch.Generator().manual_seed(n_blocks)
    states = torch.randint(3, (2, n_blocks, 3, 4), generator=generator, dtype=torch.int8).permute(0, 2, 3, 1)
    states[:, :, 1] = SKIPPED
    states[1, 0, 2] = PARTIAL
    shape, capacity = states.shape[:3], n_blocks * repeats
    tiles, counts = torch.full((*shape, capacity), -7, dtype=torch.int32), torch.full(shape, -7, dtype=torch.int32)
    gluon.launch(
        list_tiles, (shape.numel(),), states, *states.stride(), tiles, counts, *shape[1:], n_blocks, repeats,
        ASKS_TERMS=asks, BLOCKS=16,
    )  # fmt: skip
    states = states.repeat_interleave(repeats, -1)
    visited = states != SKIPPED
    wanted = 2 * torch.arange(capacity) + (states == PARTIAL) * asks
    assert torch.equal(tiles.long(), torch.where(visited, wanted, 2 * capacity).sort(-1).values)
    assert torch.equal(counts.long(), visited.sum(-1))
