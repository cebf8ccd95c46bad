"""Counts of pairs and FLOPs, compared with dense masks and with PyTorch's counts of its own attention."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from flash_train.attention import autograd, flops
from flash_train.attention.flops import attended_pairs, attention_backward_flops, attention_flops, call_pairs
from flash_train.attention.masks import BlockSparse, Causal, Document, Full, MaskFunction, Window
from flash_train.attention.packing import Entry, Packing

HEADS = 3


def cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def tensors(len_q, len_k, batch=None):
    shape = () if batch is None else (batch,)
    return torch.empty(*shape, len_q, HEADS, 8), torch.empty(*shape, len_k, HEADS, 8)


def counted(mask, q, k, packing=None):
    """Pairs of a call, counted from the operator's arguments."""
    left, right, _, _, tail = mask.lower()
    blocks = mask.block_map(q.shape[-3], k.shape[-3], packing is not None)
    states, sizes = (None, (-1, -1)) if blocks is None else (blocks.states, blocks[1:])
    boundaries = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    return call_pairs(q, k, *boundaries, states, [left, right, tail, *sizes])


def dense(mask, entries):
    return sum(int(mask.dense(entry, HEADS).expand(HEADS, -1, -1).sum()) for entry in entries)


def test_pairs_of_lengths_and_entries():
    assert attended_pairs([3, 5]) == 6 + 15
    assert attended_pairs([3, 5], causal=False) == attended_pairs([3, 5], Full()) == 34
    assert attended_pairs([3, 5], Window(1, 0), n_heads=2) == 2 * (5 + 9)
    assert attended_pairs([]) == 0
    packing = Packing(cu(3, 0, 5), cu(4, 2, 1))
    assert attended_pairs(packing.entries(), Full()) == 12 + 0 + 5
    assert attended_pairs([Entry.of_lengths(2, 4)]) == 3 + 4
    function = MaskFunction(None, lambda entry, head, q, k: q + k == entry.index + head)
    assert attended_pairs([2, 2, 2], function, n_heads=2) == (1 + 2) + (2 + 1) + (1 + 0)


def test_flops_of_products():
    assert attention_flops(10, 4, 16) == 2 * (2 * 10 * 4 * 16)
    assert attention_flops(10, 4, 16, 24) == 2 * 10 * 4 * (16 + 24)
    assert attention_backward_flops(10, 4, 16) == 5 * (2 * 10 * 4 * 16)
    assert attention_backward_flops(10, 4, 16, 24) == 2 * 10 * 4 * (3 * 16 + 2 * 24)


def test_full_attention_counts_as_pytorch_counts_its_own():
    q, k, v = (2, 4, 32, 16), (2, 4, 48, 16), (2, 4, 48, 24)  # PyTorch's layout: (batch, heads, seqlen, head_dim)
    pairs = attended_pairs([Entry.of_lengths(32, 48)] * 2, Full())
    assert attention_flops(pairs, 4, 16, 24) == sdpa_flop_count(q, k, v)
    dout = (2, 4, 32, 24)
    assert attention_backward_flops(pairs, 4, 16, 24) == sdpa_backward_flop_count(dout, q, k, v)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(5, 3), Window(None, 4), Window(7)])
@pytest.mark.parametrize("lengths", [(20, 20), (13, 30), (30, 13), (0, 4), (4, 0)])
def test_bands_are_counted_exactly(mask, lengths):
    entry = Entry.of_lengths(*lengths)
    assert counted(mask, *tensors(*lengths, batch=2)) == 2 * dense(mask, [entry])
    packing = Packing(cu(lengths[0], 0, 9), cu(lengths[1], 3, 9))
    total_q, total_k = lengths[0] + 9 + 5, lengths[1] + 12
    assert counted(mask, *tensors(total_q, total_k), packing) == dense(mask, packing.entries())


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["shared", "per-head"])
@pytest.mark.parametrize("band", [Full(), Causal(), Window(6, 2)])
def test_blocks_are_counted_exactly(band, heads):
    torch.manual_seed(0)
    mask = band & BlockSparse(torch.rand(*heads, 7, 5) < 0.5, (4, 8))
    for lengths in ((28, 40), (26, 33), (10, 40), (28, 3)):
        assert counted(mask, *tensors(*lengths, batch=2)) == 2 * dense(mask, [Entry.of_lengths(*lengths)])
    packing = Packing(cu(28, 0, 9, 40), cu(40, 3, 9, 70))  # the last is longer than the pattern
    assert counted(mask, *tensors(77, 122), packing) == dense(mask, packing.entries())


def test_each_sequence_uses_its_own_map():
    visited = torch.zeros(2, 1, 2, 2, dtype=torch.bool)
    visited[1, 0, 1, 0] = True
    q, k = tensors(20, 20, batch=2)
    assert call_pairs(q, k, None, None, visited, (-1, 0, -1, 16, 16)) == HEADS * 4 * 16
    q, k = tensors(40, 40)
    assert call_pairs(q, k, cu(30, 10), cu(30, 10), visited, (-1, 0, -1, 16, 16)) == 0  # the second has one block


def test_documents_count_as_an_upper_bound():
    ids = torch.arange(600).div(100, rounding_mode="floor").int()
    mask = Causal() & Document(torch.stack([ids, ids.flip(0)]))
    exact = sum(mask.pairs(Entry(b, b, 0, 0, 600, 600), HEADS) for b in range(2))
    band = counted(Causal(), *tensors(600, 600, batch=2))
    assert exact <= counted(mask, *tensors(600, 600, batch=2)) < band
    packing = Packing(cu(600), cu(600))
    assert counted(Causal() & Document(ids), *tensors(600, 600), packing) == band // 2


def test_fake_boundaries_and_maps_count_as_full():
    mask = Causal() & BlockSparse(torch.zeros(4, 4, dtype=torch.bool), 16)
    assert counted(mask, *tensors(64, 64, batch=1)) == 0
    states, mode = mask.block_map(64, 64, packed=True).states, FakeTensorMode()
    q, k = tensors(64, 64)
    for unread in (mode.from_tensor(states), states.to("meta")):
        bounds = mode.from_tensor(cu(32, 32))
        assert call_pairs(q, k, bounds, bounds, unread, (-1, 0, -1, 16, 16)) == HEADS * 64 * 65 // 2


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_flop_counter_mode(packed):
    """The registered formulas read the right arguments of the operators."""
    bounds = [-1, 0, -1, -1, -1]
    pairs = 2 * HEADS * 32 * 33 // 2
    with FakeTensorMode():
        shape = (64,) if packed else (2, 32)
        q, k, v = (torch.empty(*shape, HEADS, d) for d in (8, 8, 5))
        boundaries = torch.empty(2, dtype=torch.int32) if packed else None
        rest = (boundaries, boundaries, *[None] * 5, [], "", bounds, [0, 0, 0, 0], 1, 1.0, 0.0, 256, "flash")
        with FlopCounterMode(display=False) as forward:
            out, lse = autograd.attention_forward(q, k, v, *rest)
        with FlopCounterMode(display=False) as backward:
            autograd.attention_backward(out, None, q, k, v, out, lse, *rest, False)
    if packed:  # fake boundaries count as one sequence
        pairs = HEADS * 64 * 65 // 2
    assert forward.get_total_flops() == attention_flops(pairs, 1, 8, 5)
    assert backward.get_total_flops() == attention_backward_flops(pairs, 1, 8, 5)


def test_formulas_read_boundaries():
    q, k, v = (torch.empty(30, HEADS, d) for d in (8, 8, 5))
    call = (cu(10, 20), cu(10, 20), *[None] * 5, [], "", [-1, 0, -1, -1, -1], [0] * 4, 1, 1.0, 0.0, 256, "flash")
    pairs = HEADS * (10 * 11 // 2 + 20 * 21 // 2)
    assert flops._forward_flops(q, k, v, *call, out_val=None) == attention_flops(pairs, 1, 8, 5)
    backward = flops._backward_flops(v, None, q, k, v, v, None, *call, False, out_val=None)
    assert backward == attention_backward_flops(pairs, 1, 8, 5)
