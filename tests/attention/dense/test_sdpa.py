"""The backend sdpa: unsupported features, and PyTorch's packed kernel."""

from types import SimpleNamespace

import pytest
import torch

from flash_train.attention.dense import sdpa
from flash_train.attention.dense.reference import reference_attention
from flash_train.attention.dense.sdpa import sdpa_attention, sdpa_unavailable
from flash_train.attention.masks import Causal, Full, Window
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec


def test_sdpa_names_unsupported_features():
    assert sdpa_unavailable(AttentionSpec(Causal(), dropout=0.5), sinks=False) is None
    assert sdpa_unavailable(AttentionSpec(softcap=30.0), sinks=False) == "it has no softcap (30 was given)"
    assert sdpa_unavailable(AttentionSpec(), sinks=True) == "it has no sinks"
    assert sdpa_unavailable(AttentionSpec(), sinks=False, exact=True) == "it gives no log-sum-exp and takes no rng"
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="cannot run this: it has no softcap"):
        sdpa_attention(x, x, x, AttentionSpec(softcap=1.0))


def varlen(calls):
    """Emulates PyTorch's packed kernel on a GPU: rows of no entry are garbage, in the forward and the backward."""

    class Garbage(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rows):
            ctx.rows = rows
            return torch.cat([x[:rows], torch.full_like(x[rows:], float("nan"))])

        @staticmethod
        def backward(ctx, grad):
            return torch.cat([grad[: ctx.rows], torch.full_like(grad[ctx.rows :], float("nan"))]), None

    def attend(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, scale, enable_gqa=False):
        assert cu_q.diff().max() <= max_q
        assert cu_k.diff().max() <= max_k
        assert enable_gqa == (q.shape[1] != k.shape[1])
        calls.append(window_size)
        left, right = (None if bound < 0 else bound for bound in window_size)
        q, k, v = Garbage.apply(q, int(cu_q[-1])), Garbage.apply(k, int(cu_k[-1])), Garbage.apply(v, int(cu_k[-1]))
        spec = AttentionSpec(Window(left, right), scale)
        return Garbage.apply(reference_attention(q, k, v, spec, Packing(cu_q, cu_k))[0], int(cu_q[-1]))

    return attend


@pytest.mark.parametrize("known", ["lengths", "longest"])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(3, 1)])
def test_sdpa_uses_the_packed_kernel(monkeypatch, mask, tail, known):
    torch.manual_seed(0)
    calls = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen(calls))
    monkeypatch.setattr(sdpa, "_varlen_applies", lambda *_: True)
    cu = torch.tensor([0, 4, 13, 14, 14, 14], dtype=torch.int32)
    packing = Packing(cu, cu, lengths=(4, 9, 1)) if known == "lengths" else Packing(cu, cu, 9, 9)
    q, k, v = (torch.randn(14 + tail, heads, 8) for heads in (4, 2, 2))
    for x in (q, k, v):
        x[14:] = float("nan")
        x.requires_grad_()
    spec = AttentionSpec(mask)
    out, expected = sdpa_attention(q, k, v, spec, packing), reference_attention(q, k, v, spec, packing)[0]
    assert calls == [tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))]
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("rows", "lengths"), [(12, (12,)), (12, (4, 4, 4)), (12, (4, 8)), (13, (4, 4, 4)), (12, None)])
def test_entries_of_equal_length_run_as_a_batch(monkeypatch, rows, lengths):
    """So that PyTorch can choose among all its kernels."""
    batches, own = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa._nn,
        "scaled_dot_product_attention",
        lambda q, *a, **k: (batches.append(q.shape[0]), own(q, *a, **k))[1],
    )
    cu = torch.tensor([0, *(lengths or (4, 4, 4)), 0], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packing, spec = Packing(cu, cu, lengths=lengths), AttentionSpec(Causal())
    q, k, v = (torch.randn(rows, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out, expected = sdpa_attention(q, k, v, spec, packing), reference_attention(q, k, v, spec, packing)[0]
    assert batches == {(12,): [1], (4, 4, 4): [3]}.get(lengths if rows == 12 else None, [1] * len(lengths or (4, 4, 4)))
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("capability", "applies"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_the_packed_kernel_needs_ampere(monkeypatch, capability, applies):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x = SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(9, 2, 64), device=torch.device("cuda"))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert sdpa._varlen_applies(x, x, AttentionSpec(Causal()), Packing(cu, cu, lengths=(4, 5))) is applies


@pytest.mark.gpu
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(30, 7), Window(30, 0)])
def test_packed_kernel_equals_the_reference_on_a_gpu(mask, tail):
    torch.manual_seed(0)
    cu = torch.tensor([0, 40, 130, 131, 131], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(131 + tail, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    for x in (q, k, v):
        x[131:] = float("nan")
        x.requires_grad_()
    spec = AttentionSpec(mask)
    for packing in (Packing(cu, cu, lengths=(40, 90, 1)), Packing(cu, cu, 90, 90)):
        assert sdpa._varlen_applies(q, v, spec, packing)
        out = sdpa_attention(q, k, v, spec, packing)
        expected, _ = reference_attention(*(x.double() for x in (q, k, v)), spec, packing)
        torch.testing.assert_close(out.double(), expected, atol=0.03, rtol=0.03)
        assert (out[131:] == 0).all()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert torch.isfinite(gradient).all()
            assert (gradient[131:] == 0).all()
