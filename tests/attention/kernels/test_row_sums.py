"""Weights of a row add up to 1: with values of 1 the output is 1, for any logits and dtype."""

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, attention, cached_attention, flash_attn_with_kvcache
from tests.support.attention.same_dtype import same_dtype_attention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECS = {
    "causal": AttentionSpec(Causal()),
    "softcap": AttentionSpec(Causal(), softcap=50.0),
    "scale": AttentionSpec(Causal(), scale=0.3),
}


def far_inputs(n, dtype, logit=200.0):
    """q and k whose logits are all near ``logit`` times the scale's factor, and values of 1."""
    torch.manual_seed(1)
    q, k = torch.randn(1, n, 4, 64), torch.randn(1, n, 2, 64)
    q[..., 0], k[..., 0] = 8.0, logit
    return q.to(dtype), k.to(dtype), torch.ones(1, n, 2, 64, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", ["reference", "standard", "chunked", "sdpa"])
def test_outputs_are_1_up_to_twice_the_error_of_pytorch(backend, name, dtype):
    spec = SPECS[name]
    if backend == "sdpa" and spec.softcap:
        pytest.skip("PyTorch's fused attention has no softcap")
    tensors = far_inputs(256, dtype)
    error = (attention(*tensors, spec, backend=backend).double() - 1).abs().max().item()
    same = (same_dtype_attention(*tensors, spec)[0].double() - 1).abs().max().item()
    assert error <= 2 * same + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_outputs_of_the_reference_are_1_up_to_rounding(name, dtype):
    out = attention(*far_inputs(256, dtype), SPECS[name], backend="reference")
    assert (out.double() - 1).abs().max() <= 8 * torch.finfo(torch.float32).eps
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_far_from_0_has_its_exact_share(dtype):
    """One key and a sink of the same logit, 200, share a row equally."""
    q, k, v = far_inputs(1, dtype)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = 8.0, 200.0
    out, lse = attention(q, k, v, sinks=torch.full((4,), 200.0), backend="reference", return_lse=True)
    assert (out == 0.5).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 200.6931471805599))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_on_a_cpu(dtype):
    torch.manual_seed(1)
    n = 4000
    q, k = torch.randn(4, 1, 8, 64).to(dtype), torch.randn(4, n, 2, 64).to(dtype)
    v = torch.ones(4, n, 2, 64, dtype=dtype)
    for out in (
        flash_attn_with_kvcache(q, k, v, backend="reference"),
        cached_attention(q, k, v, backend="reference")[0],
    ):
        assert (out.double() - 1).abs().max() <= n**0.5 * torch.finfo(
            torch.float32
        ).eps  # n rounding errors of random sign


def test_the_reference_computes_in_fp32_under_autocast():
    tensors = far_inputs(64, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*tensors, backend="reference")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.ones_like(out))


def test_products_beyond_the_range_of_fp16():
    """q @ k is 80,000 before the scale and 10,000 after it: no backend may overflow if the logits do not."""
    q, k, v = (torch.zeros(1, 3, 1, 64, dtype=torch.float16) for _ in range(3))
    q[..., 0], k[..., 0], v[0, :, 0, 0] = 200.0, 400.0, torch.tensor([1.0, 2.0, 3.0])
    for backend in ("reference", "standard", "chunked"):
        out = attention(q, k, v, backend=backend)
        assert (out[..., 0] == 2).all(), backend
