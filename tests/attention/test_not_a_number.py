"""A number that is none reaches what depends on it, and its row is not taken for one that saw no key."""

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, Full, attention, cached_attention
from flash_train.attention.reference import reference_attention
from tests.attention.devices import INTERPRETING, on_devices

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
def test_kernels(device, name, sinks):
    same_places("triton", device, SPECS[name], sinks)


@on_devices
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding(device, splits):
    q, k, v = (x.detach() for x in inputs(device, 40, 16, torch.float32))
    out, lse = cached_attention(q[:, -1:], k, v, spec=SPECS["full"], num_splits=splits, backend="triton")
    assert out[0, 0, 1].isnan().all() and not out[0, 0, 0].isnan().any()
    assert lse[0, 1].isnan().all() and lse[0, 0].isfinite().all()


if not INTERPRETING:

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("name", SPECS)
    @pytest.mark.parametrize("backend", ["standard", "chunked"])
    def test_implementations_in_pytorch(backend, name, sinks):
        same_places(backend, "cpu", SPECS[name], sinks)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_hopper_in_the_emulator(head_dim):
        from tests.attention.emulated import hopper_on_cpu

        with hopper_on_cpu():
            for spec in SPECS.values():
                same_places("hopper", "cpu", spec, True, 150, head_dim, torch.bfloat16)
