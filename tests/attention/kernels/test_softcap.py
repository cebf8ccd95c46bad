"""The softcap's gradient where logits are saturated."""

import torch

from flash_train.attention import AttentionSpec, attention
from flash_train.attention.dense.reference import reference_attention
from tests.support.attention.devices import on_devices

LARGEST_RELATIVE = 1e-4  #: of a gradient whose terms partly cancel; without care it is 7e-2


@on_devices
def test_saturated_logits_have_an_accurate_gradient(device):
    """1 - tanh² is near 1e-6 here: as a difference of fp32 numbers, it would have an error of about 10 %."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 24, 2, 32, generator=generator).to(device) * 1e-2 for _ in range(3))
    q[..., 0], k[..., 0] = 7.5, 1.0  # every logit is near 7.5 times the softcap
    spec = AttentionSpec(scale=1.0, softcap=1.0)
    gradients = []
    for function, dtype in ((attention, torch.float32), (reference_attention, torch.float64)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        if function is attention:
            out = attention(*leaves, spec, backend="triton")
        else:
            out, _ = reference_attention(*leaves, spec)
        gradients.append(torch.autograd.grad(out.sum(), leaves[:2]))
    for ours, exact in zip(*gradients, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < LARGEST_RELATIVE, error
