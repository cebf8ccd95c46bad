"""Single mask terms: small masks written out, documents, trees, functions, and patterns of blocks."""

import ast
import subprocess
import sys

import pytest
import torch

from flash_train.attention.masks import BlockSparse, Causal, Document, Full, MaskFunction, Tree, Window, device_term
from flash_train.attention.packing import Entry

HEADS = 2
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Causal(), ["xxx..", "xxxx.", "xxxxx"]),  # three queries at the end of five keys
        (Window(1, 0), [".xx..", "..xx.", "...xx"]),
        (Window(0, 1), ["..xx.", "...xx", "....x"]),
        (Window(None, 1), ["xxxx.", "xxxxx", "xxxxx"]),
        (Full(), ["xxxxx"] * 3),
        (BlockSparse(torch.tensor([[False, True, True], [True, False, False]]), 2), ["..xxx", "..xxx", "xx..."]),
        (Document(torch.tensor([0, 1, 1]).int(), torch.tensor([0, 0, 1, 1, 2]).int()), ["xx...", "..xx.", "..xx."]),
        (Tree([-1, 0, 0]), ["xxx..", "xxxx.", "xxx.x"]),
        (Tree([-1, 0, 0]) & Window(2), ["xxx..", ".xxx.", "..x.x"]),
    ],
)
def test_small_masks_equal_their_drawings(mask, rows):
    dense = mask.dense(Entry.of_lengths(3, 5))[0]
    assert ["".join("x" if seen else "." for seen in row) for row in dense.tolist()] == rows


def test_queries_before_the_first_key_attend_to_nothing():
    dense = Causal().dense(Entry.of_lengths(5, 3))[0]
    assert not dense[:2].any()
    assert dense[2].tolist() == [True, False, False]


def test_packed_documents_read_their_own_rows():
    ids = torch.tensor([9, 0, 0, 1, 5, 5]).int()
    entry = Entry(1, 0, 1, 4, 3, 2)
    assert Document(ids, torch.tensor([0, 0, 0, 0, 1, 0]).int()).dense(entry)[0].tolist() == [
        [False, True],
        [False, True],
        [True, False],
    ]


@pytest.mark.parametrize(("len_q", "len_k"), [(2, 9), (7, 9), (7, 3)])
def test_trees_may_be_longer_or_shorter_than_the_call(len_q, len_k):
    """The last queries are the last nodes; queries before the tree attend only to keys before the tree."""
    parents = [-1, 0, 1, 0, 3]
    whole = Tree(parents).dense(Entry.of_lengths(20, 20))[0]
    assert whole[:, :15].all()
    assert not whole[:15, 15:].any()
    part = Tree(parents).dense(Entry.of_lengths(len_q, len_k))[0]
    assert torch.equal(part, whole[20 - len_q :, 20 - len_k :])


def test_each_sequence_has_its_own_tree():
    mask = Tree([[-1, 0, 0], [-1, 0, 1]])
    assert mask.per_entry
    for index, row in enumerate(([True, False, True], [True, True, True])):
        assert mask.dense(Entry(index, 0, 0, 0, 3, 3))[0, 2].tolist() == row


def test_bits_are_packed_by_words_of_32():
    bits = Tree(list(range(-1, 69))).bits
    assert bits.shape == (1, 70, 3)
    assert bits.dtype == torch.int32
    assert [word % 2**32 for word in bits[0, 65].tolist()] == [2**32 - 1, 2**32 - 1, 3]


def test_mask_functions_with_the_same_kernel_share_a_name():
    def kernel():
        pass

    one, two = (MaskFunction(kernel, lambda entry, head, q, k, x: q >= x, (torch.tensor(n),)) for n in (1, 2))
    other = MaskFunction(lambda: None, one.twin, one.tensors)
    assert one.name == two.name != other.name
    assert one.lower().terms == one.name
    assert two.lower().tensors[0] is two.tensors[0]
    assert device_term(two.name, iter(two.tensors)) == (kernel, two.tensors)


NAMES = """
import triton
from flash_train.attention import MaskFunction
from tests.support.attention.cases.rules import budget, budget_twin, parity, parity_twin
kinds = {"parity": (parity, parity_twin), "budget": (budget, budget_twin)}
print({name: MaskFunction(*kinds[name]).name for name in %r.split()})
"""


def test_kernels_have_the_same_name_in_every_process():
    """A saved program would otherwise run the kernel of another mask."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    orders = ("parity budget", "budget parity")
    outputs = [subprocess.check_output([sys.executable, "-c", NAMES % order], text=True) for order in orders]
    one, two = (ast.literal_eval(output) for output in outputs)
    assert one == two == {name: f"tests.support.attention.cases.rules.{name}" for name in ("parity", "budget")}
    with pytest.raises(ValueError, match=r"mask term 'rules\.other': must be known in this process before"):
        device_term("rules.other", iter(()))


def test_lowered_ids_are_contiguous():
    ids = torch.arange(20).int()[::2]
    assert all(x.is_contiguous() for x in Document(ids).lower().tensors)


def test_patterns_may_be_shorter_than_packed_tensors():
    mask = BlockSparse(torch.ones(1, 2).bool(), 16)
    mask.validate(3, 640, 640, HEADS, CPU, packed=True)
    dense = mask.dense(Entry(0, 0, 0, 0, 40, 40))[0]
    assert dense[:16, :32].all()
    assert dense.sum() == 16 * 32
