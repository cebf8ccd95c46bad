"""Partial results over disjoint keys merge to the result over all keys."""

from functools import reduce

import pytest
import torch

from flash_train.attention.dense.reference import reference_attention
from flash_train.attention.masks import BlockSparse, Full
from flash_train.attention.merge import merge
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec

INFINITY = float("inf")


def partials(count, packed=False, dtype=torch.float64, unseen=0.0):
    """Random partial results of (batch, seqlen, heads, head_dim) = (2, 7, 3, 5), or (7, 3, 5) packed.

    A share ``unseen`` of the rows saw no key.
    """
    batch = () if packed else (2,)
    outs = [torch.randn(*batch, 7, 3, 5, dtype=dtype) for _ in range(count)]
    lses = [torch.randn(*batch, 3, 7, dtype=torch.promote_types(dtype, torch.float32)) * 3 for _ in range(count)]
    lses = [torch.where(torch.rand_like(lse) < unseen, -INFINITY, lse) for lse in lses]
    return [(torch.where((lse == -INFINITY).mT[..., None], 0.0, out), lse) for out, lse in zip(outs, lses, strict=True)]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_merged_parts_equal_attention_over_all_keys(packed):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, d, dtype=torch.float64) for n, d in ((6, 8), (24, 8), (24, 5)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = [torch.tensor([0, 6, 12]).int(), torch.tensor([0, 24, 48]).int()]

    def attend(columns):
        pattern = torch.zeros(1, 24, dtype=torch.bool)
        pattern[0, columns] = True
        spec = AttentionSpec(Full() & BlockSparse(pattern, (6, 1)))
        tensors = [x.flatten(0, 1) for x in leaves] if packed else leaves
        return reference_attention(*tensors, spec, Packing(*cu) if packed else None)

    order = torch.randperm(24)
    whole, parts = attend(order), [attend(order[a:b]) for a, b in ((0, 5), (5, 6), (6, 6), (6, 24))]
    merged = reduce(lambda one, other: merge(*one, *other), parts)
    torch.testing.assert_close(merged, whole)
    upstream = tuple(torch.randn_like(x) for x in whole)
    gradients = [torch.autograd.grad(result, leaves, upstream) for result in (merged, whole)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("unseen", [0.0, 0.5, 1.0])
def test_merge_is_associative_and_commutative(unseen, packed):
    torch.manual_seed(1)
    a, b, c = partials(3, packed, unseen=unseen)
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(merge(*a, *b), merge(*b, *a))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_part_without_keys_changes_nothing(packed):
    torch.manual_seed(2)
    a, b = partials(2, packed)
    nothing = torch.full_like(b[0], float("nan")), torch.full_like(b[1], -INFINITY)  # an uninitialised output
    for pair in ((*a, *nothing), (*nothing, *a)):
        out, lse = merge(*pair)
        assert torch.equal(out, a[0])
        assert torch.equal(lse, a[1])
    out, lse = merge(*nothing, *nothing)
    assert (out == 0).all()
    assert (lse == -INFINITY).all()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_of_merged_parts_equal_the_whole(packed):
    torch.manual_seed(3)
    a, b = partials(2, packed)
    assert torch.autograd.gradcheck(merge, [x.requires_grad_() for x in (*a, *b)])


@pytest.mark.parametrize("upstream", [1.0, float("nan")])
def test_gradients_of_rows_without_keys(upstream):
    """A part without keys gets a gradient of 0, even if its output is NaN; the other part gets the whole gradient."""
    torch.manual_seed(4)
    a, b = partials(2, unseen=0.5)
    leaves = [x.requires_grad_() for x in (*a, *b)]
    out, lse = merge(*leaves)
    dlse = torch.where(torch.isfinite(lse), torch.randn_like(lse), upstream)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert all(torch.isfinite(x).all() for x in grads)
    for (_, own), (_, other), d_out, d_lse in ((a, b, *grads[:2]), (b, a, *grads[2:])):
        blind, alone = own == -INFINITY, (other == -INFINITY) & (own != -INFINITY)
        assert (d_lse[blind] == 0).all()
        assert (d_out.transpose(1, 2)[blind] == 0).all()
        torch.testing.assert_close(d_out.transpose(1, 2)[alone], dout.transpose(1, 2)[alone])
        torch.testing.assert_close(d_lse[alone], dlse[alone])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge_is_computed_in_fp32(dtype):
    """A 16-bit result differs from the exact one only by its rounding."""
    torch.manual_seed(5)
    a, b = partials(2, dtype=dtype)
    out, lse = merge(*a, *b)
    exact, exact_lse = merge(*(x.double() for x in (*a, *b)))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, exact_lse.float())
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps * 0.501 + 1e-6).all()


@pytest.mark.parametrize("lse", [5e3, 3e4, 1e6, 1e7, 2e7])
def test_the_mean_of_equal_parts_is_exact_at_any_log_sum_exp(lse):
    """The rounding of a large log-sum-exp had changed the weights, up to a factor of 2."""
    out, lse = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), lse)
    merged, total = merge(out, lse, out, lse)
    assert merged.item() == 3.0 and total.item() == pytest.approx(lse.item() + 0.6931, rel=1e-7)


def test_large_log_sum_exps_do_not_overflow():
    out, lse = merge(torch.ones(1, 1, 1), torch.full((1, 1), 3e4), torch.zeros(1, 1, 1), torch.full((1, 1), -3e4))
    assert out.item() == 1
    assert lse.item() == 3e4


BAD = [
    ((2, 7, 3, 5), (2, 7, 3), (2, 7, 3, 5), (2, 7, 3)),
    ((7, 3, 5), (3, 7), (7, 3, 4), (3, 7)),
    ((7, 3, 5), (3, 7), (7, 3, 5), (3, 6)),
    ((7, 5), (7,), (7, 5), (7,)),
]


@pytest.mark.parametrize("shapes", BAD)
def test_shapes_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ValueError, match="must be .batch, seqlen, heads, head_dim. with .batch, heads, seqlen."):
        merge(*(torch.zeros(shape) for shape in shapes))
