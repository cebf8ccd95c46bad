"""The traffic formulas, compared with a count by loops."""

import pytest
import torch

from flash_train.attention import BlockSparse, Causal, Full, Window
from flash_train.attention.packing import Entry
from flash_train.attention.patterns import random
from flash_train.attention.traffic import flash_traffic, standard_traffic

TILES = {"forward_tile": (32, 16), "dkdv_tile": (16, 32), "dq_tile": (16, 16)}


def by_loops(entry, n_heads, n_kv_heads, head_dim, itemsize, mask):
    """Count every load and store of the kernels' loops, program by program."""
    seen = mask.dense(entry, n_heads).expand(n_heads, -1, -1)
    row = head_dim * itemsize
    forward = backward = 0

    def blocks(start, stop, step):
        return [slice(i, i + step) for i in range(start, stop, step)]

    for head in range(n_heads):
        for (block_m, block_n), way in ((TILES["forward_tile"], "forward"), (TILES["dq_tile"], "dq")):
            for rows in blocks(0, entry.len_q, block_m):
                held = len(range(*rows.indices(entry.len_q)))
                loaded = 2 * block_n * row * sum(
                    bool(seen[head, rows, keys].any()) for keys in blocks(0, entry.len_k, block_n)
                )  # fmt: skip
                if way == "forward":
                    forward += held * (2 * row + 4) + loaded
                else:
                    backward += held * (3 * row + 8) + loaded
        backward += entry.len_q * (2 * row + 12)  # the kernel that computes delta
        block_m, block_n = TILES["dkdv_tile"]
        for keys in blocks(0, entry.len_k, block_n):
            for rows in blocks(0, entry.len_q, block_m):
                backward += bool(seen[head, rows, keys].any()) * block_m * (2 * row + 8)
    return forward, backward + n_kv_heads * entry.len_k * 4 * row


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(20, 5)], ids=["causal", "full", "window"])
@pytest.mark.parametrize("lengths", [(64, 64), (50, 90), (90, 41)])
def test_flash_traffic_equals_the_count_by_loops(mask, lengths):
    entry = Entry.of_lengths(*lengths)
    found = flash_traffic(entry, 4, 2, 8, 2, mask, **TILES)
    assert (found.forward, found.backward) == by_loops(entry, 4, 2, 8, 2, mask)


def test_standard_traffic_is_quadratic_and_flash_traffic_is_less():
    one, two = (standard_traffic(n, 16, 16, 128, 2) for n in (16384, 32768))
    assert two.forward / one.forward == pytest.approx(4, rel=0.05)
    assert two.backward / one.backward == pytest.approx(4, rel=0.05)
    ours = flash_traffic(16384, 16, 16, 128, 2)
    assert ours.forward < one.forward / 3 and ours.backward < one.backward / 2


def test_standard_traffic_of_a_small_call_by_hand():
    """Two queries, three keys, one head, head_dim 1, two bytes per element: S and P have six elements."""
    found = standard_traffic(Entry.of_lengths(2, 3), 1, 1, 1, 2)
    assert found.forward == 4 * 6 * 2 + 2 * 2 * 2 + 2 * 3 * 2
    assert found.backward == 7 * 6 * 2 + 4 * 2 * 2 + 4 * 3 * 2


@pytest.mark.slow
def test_block_sparse_traffic_is_proportional_to_density():
    dense = flash_traffic(16384, 1, 1, 128, 2, Full())
    pattern = random(128, 128, 16, torch.Generator().manual_seed(0))
    sparse = flash_traffic(16384, 1, 1, 128, 2, BlockSparse(pattern, 128))
    assert sparse.forward / dense.forward == pytest.approx(16 / 128, abs=0.03)
    assert sparse.backward / dense.backward == pytest.approx(16 / 128, abs=0.03)
