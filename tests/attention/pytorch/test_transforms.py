"""``torch.func`` over the operator: gradients with every backend, and a one-line error for unsupported transforms."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from flash_train.attention import AttentionSpec, Causal, Document, Packing, RngState, attention, cached_attention
from tests.support.attention.devices import INTERPRETING, on_devices

CAUSAL = AttentionSpec(Causal())
VMAP = "attention under torch.func.vmap .*must be backend=reference, chunked or sdpa, or one call in which"
FORWARD = "attention under torch.func.jvp, jacfwd or forward-mode AD: must be backend=reference or chunked"
SECOND = "a gradient of attention's gradient: must be backend=reference or chunked"


def qkv(device, *shape):
    torch.manual_seed(0)
    return [torch.randn(shape, device=device) for _ in range(3)]


def everything(device):
    """A scalar function of q, k, v, slopes and sinks that uses every feature, and its arguments."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, heads, 16, device=device) for heads in (4, 2, 2))
    cu = torch.tensor([0, 11, 30], dtype=torch.int32, device=device)
    ids = (torch.arange(30, device=device) // 5).int()
    spec = AttentionSpec(Causal() & Document(ids), softcap=5.0, dropout=0.3)
    weight_out, weight_lse = torch.randn(30, 4, 16, device=device), torch.randn(4, 30, device=device)

    def loss(backend, q, k, v, slopes, sinks):
        out, lse = attention(
            q, k, v, spec, packing=Packing(cu, cu), rng=RngState(3), alibi_slopes=slopes, sinks=sinks, backend=backend,
            return_lse=True,
        )  # fmt: skip
        return (out * weight_out).sum() + (lse * weight_lse).sum()

    return loss, (q, k, v, torch.rand(2, 4, device=device), torch.randn(4, device=device))


def gradients_are_autograds(backend, device):
    loss, arguments = everything(device)
    leaves = [x.clone().requires_grad_() for x in arguments]
    right = torch.autograd.grad(loss(backend, *leaves), leaves)
    by_grad = grad(loss, (1, 2, 3, 4, 5))(backend, *arguments)
    _, pull = vjp(lambda *x: loss(backend, *x), *arguments)
    with torch.no_grad():
        by_vjp = pull(torch.ones((), device=device))
    for a, b, c in zip(right, by_grad, by_vjp, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def a_second_gradient_is_refused(backend, device):
    q, k, v = qkv(device, 1, 9, 2, 16)

    def loss(q):
        return attention(q, k, v, backend=backend).pow(2).sum()

    with pytest.raises(RuntimeError, match=SECOND):
        grad(lambda q: grad(loss)(q).pow(2).sum())(q)
    q.requires_grad_()
    (first,) = torch.autograd.grad(loss(q), q, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        first.sum().backward()


def vmap_is_refused(backend, device):
    q, k, v = qkv(device, 3, 1, 9, 2, 16)
    with pytest.raises(RuntimeError, match=VMAP):
        vmap(lambda *x: attention(*x, backend=backend))(q, k, v)
    with pytest.raises(RuntimeError, match=VMAP):
        vmap(grad(lambda *x: attention(*x, backend=backend).sum()))(q, k, v)
    with pytest.raises(RuntimeError, match=FORWARD):
        jvp(lambda q: attention(q, k[0], v[0], backend=backend), (q[0],), (q[0],))


def forward_mode_is_refused(backend, device):
    q, k, v = qkv(device, 1, 9, 2, 16)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=FORWARD),
    ):
        attention(forward_ad.make_dual(q, q), k, v, backend=backend)


@on_devices
def test_kernels_refuse_forward_mode(device):
    forward_mode_is_refused("triton", device)


@on_devices
def test_the_decode_kernel_refuses_transforms_before_it_writes(device):
    q, k, v = qkv(device, 1, 9, 2, 16)
    k_cache, v_cache = torch.zeros(1, 20, 2, 16, device=device), torch.zeros(1, 20, 2, 16, device=device)

    def decode(q):
        return cached_attention(q, k_cache, v_cache, 3, k=k, v=v, backend="triton")[0]

    def with_dual(q):
        with forward_ad.dual_level():
            return decode(forward_ad.make_dual(q, q))

    calls = [
        lambda: vmap(decode)(q[None]),
        lambda: jvp(decode, (q,), (q,)),
        lambda: grad(lambda s: (s * decode(q)).sum())(torch.ones((), device=device)),
        lambda: with_dual(q),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="by the decode kernel under a transform .*: must be backend=reference"):
            call()
    assert not k_cache.any() and not v_cache.any()


@on_devices
def test_kernels_under_func_transforms(device):
    gradients_are_autograds("triton", device)
    a_second_gradient_is_refused("triton", device)
    vmap_is_refused("triton", device)


@on_devices
def test_kernels_refuse_batched_gradients(device):
    q, k, v = qkv(device, 1, 9, 2, 16)
    q.requires_grad_()
    out = attention(q, k, v, backend="triton")
    with pytest.raises(RuntimeError, match=VMAP):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape, device=device), is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=VMAP):
        vmap(lambda g: torch.autograd.grad(out, q, g, retain_graph=True)[0])(torch.ones(3, *out.shape, device=device))
    with pytest.raises(RuntimeError, match=VMAP):
        jacrev(lambda q: attention(q, k, v, backend="triton"))(q.detach())


if not INTERPRETING:

    @pytest.mark.parametrize("backend", ["reference", "standard", "chunked"])
    def test_gradients_equal_autograds(backend):
        gradients_are_autograds(backend, "cpu")

    def test_gradients_of_hopper_in_the_emulator():
        from tests.support.attention.emulated import hopper_on_cpu

        q, k, v = (x.bfloat16() for x in qkv("cpu", 1, 40, 2, 64))
        with hopper_on_cpu():
            ours = grad(lambda *x: attention(*x, CAUSAL, backend="hopper").float().sum(), (0, 1, 2))(q, k, v)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            right = torch.autograd.grad(attention(*leaves, CAUSAL, backend="hopper").float().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))

    def test_standard_refuses_unsupported_transforms():
        a_second_gradient_is_refused("standard", "cpu")
        vmap_is_refused("standard", "cpu")
        forward_mode_is_refused("standard", "cpu")

    @pytest.mark.parametrize("backend", ["reference", "chunked"])
    def test_forward_mode_is_jvp(backend):
        q, k, v = qkv("cpu", 1, 9, 2, 16)
        _, right = jvp(lambda q: attention(q, k, v, CAUSAL, backend=backend), (q,), (q,))
        with forward_ad.dual_level():
            out = attention(forward_ad.make_dual(q, q), k, v, CAUSAL, backend=backend)
            assert torch.equal(forward_ad.unpack_dual(out).tangent, right)

    def test_standard_refuses_a_second_gradient_without_transforms():
        q, k, v = (x.requires_grad_() for x in qkv("cpu", 1, 9, 2, 16))
        (first,) = torch.autograd.grad(attention(q, k, v, backend="standard").pow(2).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=SECOND):
            torch.autograd.grad(first.pow(2).sum(), q)

    @pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
    def test_vmap_equals_a_loop(backend):
        """Also for per-sample gradients."""
        tensors = qkv("cpu", 3, 1, 9, 2, 16)

        def loss(*x):
            return attention(*x, CAUSAL, backend=backend).pow(2).sum()

        ours = vmap(grad(loss, (0, 1, 2)))(*tensors)
        each = [grad(loss, (0, 1, 2))(*(x[i] for x in tensors)) for i in range(3)]
        for got, *rows in zip(ours, *each, strict=True):
            torch.testing.assert_close(got, torch.stack(rows))

    @pytest.mark.parametrize("backend", ["reference", "chunked", "standard"])
    def test_jacobians(backend):
        q, k, v = qkv("cpu", 1, 5, 1, 8)

        def row(q, name=backend):
            return attention(q, k, v, CAUSAL, backend=name)[0, 3, 0]

        torch.testing.assert_close(jacrev(row)(q), jacrev(lambda q: row(q, "reference"))(q))

    def test_second_gradients_of_chunked_equal_the_references():
        q, k, v = qkv("cpu", 1, 5, 1, 8)
        ours, right = (
            hessian(lambda q, b=backend: attention(q, k, v, CAUSAL, backend=b).pow(2).sum())(q)
            for backend in ("chunked", "reference")
        )
        torch.testing.assert_close(ours, right)

    @pytest.mark.parametrize("backend", ["reference", "standard", "chunked", "sdpa"])
    def test_a_module_without_state(backend):
        """As in libraries for meta-learning."""

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(16, 16, bias=False)

            def forward(self, x):
                return attention(self.project(x), x, x, CAUSAL, backend=backend)

        torch.manual_seed(0)
        layer, (x, _, _) = Layer(), qkv("cpu", 2, 9, 2, 16)
        weights = dict(layer.named_parameters())
        ours = grad(lambda w: functional_call(layer, w, (x,)).sum())({n: w.detach() for n, w in weights.items()})
        layer(x).sum().backward()
        torch.testing.assert_close(ours["project.weight"], layer.project.weight.grad)

    @pytest.mark.parametrize("backend", ["reference", "standard", "sdpa"])
    def test_compiled_gradients(backend):
        tensors = qkv("cpu", 1, 9, 2, 16)
        gradient = grad(lambda *x: attention(*x, CAUSAL, backend=backend).pow(2).sum(), (0, 1, 2))
        compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)(*tensors)
        for a, b in zip(compiled, gradient(*tensors), strict=True):
            torch.testing.assert_close(a, b)
