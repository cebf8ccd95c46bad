"""Padded and packed forms of the same entries, and shards of a larger attention, have the same dropout mask."""

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, Full, Packing, RngState, attention, merge
from tests.support.attention.devices import INTERPRETING, on_devices

ALL = AttentionSpec(Full(), dropout=0.4)
CAUSAL = AttentionSpec(Causal(), dropout=0.4)


def inputs(device, *rows, heads=4, kv_heads=2):
    torch.manual_seed(0)
    return [torch.randn(*rows, h, 16, device=device, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def heads(device, backend):
    q, k, v = inputs(device, 2, 40)
    whole = attention(q, k, v, ALL, rng=RngState(5, 1), backend=backend)
    shards = [
        attention(
            q[:, :, 2 * i : 2 * i + 2], k[:, :, i : i + 1], v[:, :, i : i + 1], ALL,
            rng=RngState(5, 1, head=2 * i), backend=backend,
        )
        for i in range(2)
    ]  # fmt: skip
    close(torch.cat(shards, 2), whole)
    same = attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], ALL, rng=RngState(5, 1), backend=backend)
    assert not torch.allclose(same, whole[:, :, 2:], rtol=1e-2)  # without the head in its origin, the mask differs


def batch(device, backend):
    q, k, v = inputs(device, 3, 30)
    whole = attention(q, k, v, CAUSAL, rng=RngState(5, 1), backend=backend)
    part = attention(q[1:], k[1:], v[1:], CAUSAL, rng=RngState(5, 1, entry=1), backend=backend)
    close(part, whole[1:])


def queries(device, backend, cut):
    """The last queries of a causal attention attend to all keys."""
    q, k, v = inputs(device, 1, 60)
    whole = attention(q, k, v, CAUSAL, rng=RngState(5, 1), backend=backend)
    part = attention(q[:, cut:], k, v, CAUSAL, rng=RngState(5, 1, query=cut), backend=backend)
    close(part, whole[:, cut:])
    weights = torch.randn_like(whole)
    before = attention(q[:, :cut], k[:, :cut], v[:, :cut], CAUSAL, rng=RngState(5, 1), backend=backend)
    ours = torch.autograd.grad((before, part), (q, k, v), (weights[:, :cut], weights[:, cut:]))
    for a, b in zip(ours, torch.autograd.grad(whole, (q, k, v), weights), strict=True):
        close(a, b)


def keys(device, backend, cut):
    """Attention over disjoint keys, merged."""
    q, k, v = inputs(device, 1, 50)
    whole, whole_lse = attention(q, k, v, ALL, rng=RngState(5, 1), backend=backend, return_lse=True)
    parts = []
    for first, part in ((0, slice(0, cut)), (cut, slice(cut, None))):
        rng = RngState(5, 1, key=first)
        parts += attention(q, k[:, part], v[:, part], ALL, rng=rng, backend=backend, return_lse=True)
    out, lse = merge(*parts)
    close(out, whole)
    close(lse, whole_lse)
    weights = torch.randn_like(whole)
    ours, theirs = (torch.autograd.grad(x, (q, k, v), weights) for x in (out, whole))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def padded_and_packed(device, backend):
    """The mask depends on entry and position, not on the place in memory: padding at the end changes nothing."""
    lengths = (33, 7, 50)
    q, k, v = (x.detach() for x in inputs(device, 3, 50))
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    packed = [torch.cat([x[i, :n] for i, n in enumerate(lengths)]) for x in (q, k, v)]
    ours = attention(*packed, CAUSAL, packing=Packing(cu, cu), rng=RngState(5, 1), backend=backend)
    padded = attention(q, k, v, CAUSAL, rng=RngState(5, 1), backend=backend)
    close(ours, torch.cat([padded[i, :n] for i, n in enumerate(lengths)]))


FACTS = [
    pytest.param(heads, {}, id="heads"),
    pytest.param(batch, {}, id="batch"),
    pytest.param(queries, {"cut": 32}, id="queries"),
    pytest.param(queries, {"cut": 37}, id="queries-unaligned"),
    pytest.param(keys, {"cut": 16}, id="keys"),
    pytest.param(keys, {"cut": 23}, id="keys-unaligned"),
    pytest.param(padded_and_packed, {}, id="padded-and-packed"),
]


@on_devices
@pytest.mark.parametrize(("fact", "options"), FACTS)
def test_dropout_mask_of_shards_with_kernels(device, fact, options):
    fact(device, "triton", **options)


if not INTERPRETING:

    @pytest.mark.parametrize(("fact", "options"), FACTS)
    @pytest.mark.parametrize("backend", ["reference", "standard", "chunked"])
    def test_dropout_mask_of_shards_with_dense_backends(backend, fact, options):
        fact("cpu", backend, **options)
