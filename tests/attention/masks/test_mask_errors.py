"""Masks and mask arguments that are refused, with one line that names the argument."""

import pytest
import torch

from flash_train.attention.masks import And, BlockSparse, Causal, Document, MaskFunction, Tree, Window
from flash_train.attention.packing import Entry

HEADS = 2
CPU = torch.device("cpu")
META = torch.device("meta")


def int32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def function_of(tensor):
    return MaskFunction(None, lambda entry, head, q, k, x: q >= k, (tensor,))


BAD_MASKS = [
    (lambda: Window(-1), r"Window\(left=-1\): must be an integer >= 0"),
    (lambda: Window(3, 0.5), r"Window\(right=0.5\): must be an integer >= 0"),
    (lambda: BlockSparse(torch.zeros(3, 3)), r"BlockSparse pattern is torch.float32 of shape \(3, 3\): must be bool"),
    (lambda: BlockSparse(torch.zeros(3, dtype=torch.bool)), r"of shape \(3,\): must be bool"),
    (lambda: BlockSparse(torch.zeros(3, 3).bool(), 0), "block=0.: must be a positive integer or two"),
    (lambda: BlockSparse(torch.zeros(3, 3).bool(), (4, 0.5)), "must be a positive integer or two"),
    (lambda: BlockSparse(torch.zeros(3, 3).bool(), (4,)), "must be a positive integer or two"),
    (lambda: Document(torch.zeros(3)), "Document q_ids is torch.float32 .*: must be int32"),
    (lambda: Document(int32(3), int32(1, 2, 3)), r"Document k_ids is torch.int32 of shape \(1, 2, 3\)"),
    (lambda: Tree([0.5]), "Tree parents are torch.float32"),
    (lambda: Tree(torch.zeros(0, dtype=torch.int64)), "n at least 1"),
    (lambda: Tree([-1, 2]), "Tree parents name node 2 of 2: must be 0 to 1, or -1"),
    (lambda: Tree([-1, -2]), "Tree parents name node -2 of 2"),
    (lambda: Tree([[-1, 0, 0], [1, 2, 0]]), "form a cycle: must lead to a root"),
    (lambda: Tree([0]), "form a cycle: must lead to a root"),
    (lambda: Tree([[-1, 0], [-1, 1]]), "form a cycle: must lead to a root"),
    (lambda: And((Causal(), Window(2, 2))), r"And\(band, band\): must have one band at most, and first"),
    (lambda: And((Document(int32(3)), Causal())), r"And\(document, band\): must have one band at most, and first"),
]
NO_TENSORS = [
    (lambda: BlockSparse([[True]]), "BlockSparse pattern is a list: must be a bool tensor"),
    (lambda: Document("ids"), "Document q_ids is a str: must be an int32 tensor"),
    (lambda: Document([0.5]), r"Document q_ids=\[0.5\]: must be integers"),
    (lambda: function_of(3), r"MaskFunction\(tensors=\(3,\)\): must be a tuple of tensors"),
    (lambda: MaskFunction(None, print, torch.ones(3)), "must be a tuple of tensors"),
]


@pytest.mark.parametrize("returned", [None, True, torch.zeros(4, 4)], ids=repr)
def test_mask_function_needs_a_twin_that_returns_bool_tensors(returned):
    with pytest.raises(TypeError, match="twin=None.: must be a function, the kernel's rule in PyTorch"):
        MaskFunction(None, None)
    given = "torch.float32" if torch.is_tensor(returned) else repr(returned)
    with pytest.raises(TypeError, match=f"MaskFunction's twin returned {given}: must return a bool tensor"):
        (Causal() & MaskFunction(None, lambda *_: returned)).dense(Entry.of_lengths(4, 4))


@pytest.mark.parametrize(("build", "message"), BAD_MASKS, ids=[message for _, message in BAD_MASKS])
def test_bad_masks_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(("build", "message"), NO_TENSORS, ids=[message for _, message in NO_TENSORS])
def test_masks_of_other_things_than_tensors_are_refused(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_document_ids_may_be_lists():
    assert torch.equal(Document([0, 0, 1], [0, 1, 1]).k_ids, torch.tensor([0, 1, 1], dtype=torch.int32))


BAD_CALLS = [
    (BlockSparse(torch.zeros(4, 4).bool(), 16), {"device": META}, "BlockSparse pattern is on cpu and q on meta"),
    (BlockSparse(torch.zeros(3, 4, 4).bool(), 16), {}, "BlockSparse pattern has 3 heads and q 2"),
    (BlockSparse(torch.zeros(4, 3).bool(), 16), {}, r"has \(4, 3\) blocks: must be at least \(4, 4\)"),
    (BlockSparse(torch.zeros(3, 4).bool(), (16, 16)), {}, r"has \(3, 4\) blocks: must be at least \(4, 4\)"),
    (Document(int32(2, 64)), {"device": META}, "Document q_ids is on cpu and q on meta"),
    (Document(int32(3, 64)), {}, r"Document q_ids has shape \(3, 64\): must be \(64,\) or \(2, 64\)"),
    (Document(int32(64), int32(63)), {}, r"Document k_ids has shape \(63,\)"),
    (Document(int32(2, 64)), {"packed": True}, r"must be \(64,\)$"),
    (Tree([[-1]] * 3), {}, "Tree has 3 trees for 2 sequences: must be 1 or as many"),
    (Tree([-1]), {"device": META}, "Tree parents is on cpu and q on meta"),
    (function_of(torch.zeros(3)), {"device": META}, "MaskFunction tensor is on cpu and q on meta"),
    (function_of(torch.zeros(3, 2).t()), {}, r"strides \(1, 2\): must be contiguous"),
]


@pytest.mark.parametrize(("mask", "changes", "message"), BAD_CALLS, ids=[message for *_, message in BAD_CALLS])
@pytest.mark.parametrize("composed", [False, True], ids=["alone", "composed"])
def test_masks_that_do_not_fit_the_call_are_refused(mask, changes, message, composed):
    call = {"batch": 2, "len_q": 64, "len_k": 64, "n_heads": HEADS, "device": CPU, "packed": False} | changes
    with pytest.raises(ValueError, match=message):
        (Causal() & mask if composed else mask).validate(**call)
