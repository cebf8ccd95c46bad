"""NaN in the inputs reaches all results that depend on it. A row with NaN is not treated as a row without keys."""

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Full,
    Packing,
    Window,
    attention,
    cached_attention,
)
from flash_train.attention.dense.reference import reference_attention
from tests.support.attention.devices import INTERPRETING, on_devices

#: keys that no query attends to, with 20 keys and 12 queries at their end
HIDING = {
    "window": (slice(0, 5), Window(3, 0)),
    "document": (slice(3, 9), Document(torch.full((12,), 7).int(), torch.tensor([7] * 3 + [1] * 6 + [7] * 11).int())),
    "blocks": (slice(8, 16), BlockSparse(torch.tensor([[1, 0, 1], [1, 0, 0]]).bool(), 8)),
}
SPECS = {"full": AttentionSpec(Full()), "causal": AttentionSpec(Causal())}


def inputs(device, n, head_dim, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, head_dim, device=device).to(dtype) for _ in range(3))
    k[0, n // 3, 1, 2] = float("nan")
    return [x.requires_grad_() for x in (q, k, v)]


def results(function, leaves):
    out, lse = function(*leaves)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))


def same_places(backend, device, spec, sinks, n=40, head_dim=16, dtype=torch.float32):
    leaves = inputs(device, n, head_dim, dtype)
    options = {"sinks": torch.randn(2, device=device) if sinks else None}
    exact = results(lambda q, k, v: reference_attention(q, k, v, spec, **options), leaves)
    ours = results(lambda q, k, v: attention(q, k, v, spec, backend=backend, return_lse=True, **options), leaves)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, strict=True):
        assert b.isnan().any(), name
        assert torch.equal(a.isnan(), b.isnan()), name


@on_devices
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_kernels_propagate_nan(device, name, sinks):
    same_places("triton", device, SPECS[name], sinks)


@on_devices
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding_propagates_nan(device, splits):
    q, k, v = (x.detach() for x in inputs(device, 40, 16, torch.float32))
    out, lse = cached_attention(q[:, -1:], k, v, spec=SPECS["full"], num_splits=splits, backend="triton")
    assert out[0, 0, 1].isnan().all() and not out[0, 0, 0].isnan().any()
    assert lse[0, 1].isnan().all() and lse[0, 0].isfinite().all()


if not INTERPRETING:

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("name", SPECS)
    @pytest.mark.parametrize("backend", ["standard", "chunked"])
    def test_dense_backends_propagate_nan(backend, name, sinks):
        same_places(backend, "cpu", SPECS[name], sinks)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_hopper_kernels_propagate_nan(head_dim):
        from tests.support.attention.emulated import hopper_on_cpu

        with hopper_on_cpu():
            for spec in SPECS.values():
                same_places("hopper", "cpu", spec, True, 150, head_dim, torch.bfloat16)

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("name", HIDING)
    @pytest.mark.parametrize("backend", ["reference", "standard", "chunked", "sdpa"])
    def test_nan_in_keys_that_no_query_sees_has_no_effect(backend, name, packed):
        hidden, mask = HIDING[name]
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 20, heads, 8) for heads in (4, 2, 2))
        q = q[:, -12:]
        dout = torch.randn(1, 12, 4, 8)
        grads = []
        for value in (0.0, float("nan"), float("inf")):
            k[:, hidden], v[:, hidden] = value, value
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            packing = Packing([0, 12], [0, 20]) if packed else None
            inputs = [x[0] for x in leaves] if packed else leaves
            out = attention(*inputs, AttentionSpec(mask), packing=packing, backend=backend)
            grads.append((out, *torch.autograd.grad(out, leaves, dout[0] if packed else dout)))
        for got in grads[1:]:
            for a, b in zip(got, grads[0], strict=True):
                assert torch.equal(a, b)
        assert (grads[0][2][:, hidden] == 0).all() and (grads[0][3][:, hidden] == 0).all()
