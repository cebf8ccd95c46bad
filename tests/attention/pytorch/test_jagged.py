"""Jagged nested tensors give the same outputs, log-sum-exps and gradients as packed tensors."""

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    Causal,
    Document,
    Packing,
    RngState,
    attention,
    explain,
    flash_attn_func,
)
from tests.support.attention.devices import INTERPRETING, on_devices

CAUSAL = AttentionSpec(Causal())
LENGTHS_Q, LENGTHS_K = (3, 0, 9, 1), (5, 2, 9, 4)


def cu(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def problem(device, lengths_k=LENGTHS_K):
    """Packed leaf tensors, and functions that make them jagged with the offsets of queries and keys."""
    torch.manual_seed(0)
    leaves = [
        torch.randn(sum(lengths), heads, dim, device=device, requires_grad=True)
        for lengths, heads, dim in ((LENGTHS_Q, 4, 16), (lengths_k, 2, 16), (lengths_k, 2, 8))
    ]
    offsets = cu(LENGTHS_Q, device), cu(lengths_k, device)
    return leaves, (offsets[0], offsets[1], offsets[1])


def hold(device, backend, by_head, spec=CAUSAL, **options):
    leaves, offsets = problem(device)
    packing = Packing(offsets[0].int(), offsets[1].int())
    jagged = [torch.nested.nested_tensor_from_jagged(x, at) for x, at in zip(leaves, offsets, strict=True)]
    tensors = [x.transpose(1, 2) for x in jagged] if by_head else jagged
    exact = backend != "sdpa"
    right = attention(*leaves, spec, packing=packing, backend=backend, return_lse=exact, **options)
    ours = attention(*tensors, spec, backend=backend, return_lse=exact, **options)
    right, ours = (x if exact else (x,) for x in (right, ours))
    out = ours[0].transpose(1, 2) if by_head else ours[0]
    assert ours[0].layout == torch.jagged
    assert (out + jagged[0][..., :8]).shape == (4, jagged[0].shape[1], 4, 8)  # out has the boundaries of q
    assert torch.equal(out.values(), right[0])
    weights = [torch.randn_like(x) for x in right]
    loss = (out.values() * weights[0]).sum()
    if exact:
        assert ours[1].shape == (4, 4, jagged[0].shape[1])
        lse = ours[1].transpose(1, 2).values().t()
        assert torch.equal(lse, right[1])
        finite = lse.isfinite()
        loss = loss + (lse * weights[1])[finite].sum()
        weights[1] = weights[1] * finite
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(right, leaves, weights), strict=True):
        torch.testing.assert_close(a, b)
        assert b.abs().max() > 0


@on_devices
@pytest.mark.parametrize("by_head", [False, True])
def test_kernels_accept_jagged_tensors(device, by_head):
    hold(device, "triton", by_head)
    hold(device, "triton", by_head, AttentionSpec(Causal(), dropout=0.3), rng=RngState(3))


if not INTERPRETING:

    @pytest.mark.parametrize("by_head", [False, True])
    @pytest.mark.parametrize("backend", ["reference", "standard", "chunked", "sdpa", "auto"])
    def test_dense_backends_accept_jagged_tensors(backend, by_head):
        hold("cpu", backend if backend != "auto" else "reference", by_head)
        if backend == "auto":
            leaves, offsets = problem("cpu")
            tensors = [torch.nested.nested_tensor_from_jagged(x, at) for x, at in zip(leaves, offsets, strict=True)]
            assert explain(*tensors) == explain(*leaves, packing=Packing(offsets[0].int(), offsets[1].int()))
            assert attention(*tensors).shape == (4, tensors[0].shape[1], 4, 8)

    def test_all_options_together():
        ids = (torch.arange(sum(LENGTHS_Q)) // 3).int(), (torch.arange(sum(LENGTHS_K)) // 4).int()
        spec = AttentionSpec(Causal() & Document(*ids), softcap=3.0)
        hold("cpu", "chunked", False, spec, alibi_slopes=torch.rand(4, 4), sinks=torch.rand(4))


def jagged_leaves(*lengths):
    return torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in lengths], layout=torch.jagged, requires_grad=True)


def test_leaves_get_jagged_gradients():
    x = jagged_leaves(3, 5)
    out = flash_attn_func(x, x, x, causal=True)
    out.values().sum().backward()
    assert x.grad.shape == x.shape
    first = x.detach().unbind()[0][None].requires_grad_()
    attention(first, first, first, CAUSAL).sum().backward()
    torch.testing.assert_close(x.grad.unbind()[0], first.grad[0])


def test_offsets_may_be_equal_without_being_shared():
    q, k, v = jagged_leaves(3, 5), jagged_leaves(3, 5), jagged_leaves(3, 5)
    out = attention(q, k, v, CAUSAL)
    right = [
        attention(*(x[None] for x in row), CAUSAL)[0] for row in zip(*(x.unbind() for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(out.values(), torch.cat(right))


def test_jagged_tensors_with_gaps_between_rows():
    base = torch.randn(2, 10, 2, 8, requires_grad=True)
    x = torch.nested.narrow(base, 1, torch.tensor([1, 2]), torch.tensor([4, 5]), layout=torch.jagged)
    out = attention(x, x, x, CAUSAL)
    right = [attention(*(base[i : i + 1, a : a + n],) * 3, CAUSAL)[0] for i, (a, n) in enumerate([(1, 4), (2, 5)])]
    for a, b in zip(out.unbind(), right, strict=True):
        torch.testing.assert_close(a, b)
    assert out.shape == x.shape
    (grad,) = torch.autograd.grad(out.values().sum(), base)
    torch.testing.assert_close(grad, torch.autograd.grad(torch.cat(right).sum(), base)[0])


def test_an_empty_batch():
    x = torch.nested.nested_tensor_from_jagged(torch.randn(0, 2, 8), torch.zeros(1, dtype=torch.int64))
    for backend in ("reference", "standard", "chunked", "sdpa"):
        assert attention(x, x, x, backend=backend).values().shape == (0, 2, 8)


def test_tensors_that_do_not_fit_are_refused():
    x, plain = jagged_leaves(3, 5), torch.randn(2, 5, 2, 8)
    with pytest.raises(TypeError, match="k is not nested: q, k and v must all be nested with layout=torch.jagged, or"):
        attention(x, plain, x)
    with pytest.raises(TypeError, match="q is not nested"):
        attention(plain, x, x)
    with pytest.warns(UserWarning, match="prototype"):
        strided = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)])
    with pytest.raises(TypeError, match="q is nested with layout=torch.strided: q, k and v must all be nested with"):
        attention(strided, strided, strided)
    with pytest.raises(ValueError, match="packing was given with nested tensors"):
        attention(x, x, x, packing=Packing([0, 8], [0, 8]))
    with pytest.raises(ValueError, match=r"k has boundaries \[0, 3, 8\] and v \[0, 4, 8\]: must be equal"):
        attention(x, x, jagged_leaves(4, 4))
    with pytest.raises(ValueError, match="q, k and v are jagged in different dimensions: must be in the same"):
        attention(x, x.transpose(1, 2), x)
    with pytest.raises(ValueError, match=r"q is jagged of shape .*: must be \(batch, j, heads, head_dim\), or"):
        flat = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
        attention(flat, flat, flat)
