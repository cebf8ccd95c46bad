"""The operator under PyTorch's tools: opcheck, torch.compile, FLOP counts, autocast, functional calls."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Packing,
    RngState,
    Tree,
    Window,
    attended_pairs,
    attention,
    attention_flops,
)
from flash_train.attention.flops import attention_backward_flops
from tests.support.attention.devices import INTERPRETING, on_devices

OPERATORS = ("flash_train.attention_forward.default", "flash_train.attention_backward.default")


def tensors(device, *rows, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32):
    """q, k and v that require gradients."""
    return [
        torch.randn(*rows, h, head_dim, device=device, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]


def boundaries(device, *lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def padded_call(device):
    q, k, v = tensors(device, 2, 20)
    spec = AttentionSpec(Window(9, 0), softcap=2.0, dropout=0.2)
    slopes, sinks = (torch.rand(2, device=device, requires_grad=True) for _ in "ab")
    return attention(
        q, k, v, spec, rng=RngState(3), alibi_slopes=slopes, sinks=sinks, backend="triton", return_lse=True
    )


def packed_call(device):
    q, k, v = tensors(device, 40)
    ids = (torch.arange(40) // 7).int().to(device)
    cu = boundaries(device, 13, 0, 22)
    out = attention(q, k, v, AttentionSpec(Causal() & Document(ids)), packing=Packing(cu, cu), backend="triton")
    return out, None


def block_call(device):
    q, k, v = tensors(device, 1, 40, heads=4, kv_heads=2)
    pattern = torch.tensor([[True, False], [True, True]], device=device)
    mask = BlockSparse(pattern, 32) & Tree(torch.tensor([-1, 0, 0, 1], device=device))
    out = attention(q, k, v, AttentionSpec(mask & Causal()), backend="triton")
    return out, None


class Recorder(TorchDispatchMode):
    """Records the arguments of the package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in OPERATORS:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@on_devices
@pytest.mark.parametrize("make", [padded_call, packed_call, block_call])
def test_opcheck(device, make):
    with Recorder() as recorder:
        out, lse = make(device)
        (out.sum() if lse is None else out.sum() + lse.sum()).backward()
    assert [str(func) for func, *_ in recorder.calls] == list(OPERATORS)
    for func, args, kwargs in recorder.calls:
        learns = str(func) == OPERATORS[0]
        args = [
            x.detach().clone().requires_grad_(learns and x.is_floating_point()) if isinstance(x, torch.Tensor) else x
            for x in args
        ]
        torch.library.opcheck(func, tuple(args), kwargs)


def compile_counter():
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


@on_devices
@pytest.mark.parametrize(("mask", "inside"), [(Causal(), True), (Window(20, 4), False)], ids=["made-inside", "given"])
def test_new_boundaries_do_not_recompile(device, mask, inside):
    spec, counter = AttentionSpec(mask, dropout=0.25), compile_counter()
    q, k, v = tensors(device, 48)

    def call(q, k, v, where, seed):
        packing = Packing(where, where) if inside else where
        return attention(q, k, v, spec, packing=packing, rng=RngState(seed), backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for number, lengths in enumerate([(48, 0, 0), (1, 2, 3), (16, 16, 16), (0, 47, 1)]):
        cu, seed = boundaries(device, *lengths), torch.tensor(number, device=device)
        where = cu if inside else Packing(cu, cu)
        out = compiled(q, k, v, where, seed)
        expected = call(q, k, v, where, seed)
        assert torch.equal(out, expected), lengths
        weights = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(x, (q, k, v), weights) for x in (out, expected))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), lengths
    assert counter.frame_count == 1


@on_devices
@pytest.mark.parametrize("packed", [False, True])
def test_new_documents_do_not_recompile(device, packed):
    """Also if the compiled function makes the mask and the specification."""
    counter = compile_counter()
    q, k, v = tensors(device, *((30,) if packed else (2, 30)))
    cu = boundaries(device, 10, 20)

    def call(q, k, v, ids):
        packing = Packing(cu, cu) if packed else None
        return attention(q, k, v, AttentionSpec(Causal() & Document(ids)), packing=packing, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for every in (30, 7, 1):
        ids = (torch.arange(30) // every).int().to(device)
        assert torch.equal(compiled(q, k, v, ids), call(q, k, v, ids))
    assert counter.frame_count == 1


@on_devices
def test_one_compilation_serves_all_lengths(device):
    """The second length compiles for all lengths; a third does not recompile."""
    counter = compile_counter()
    spec = AttentionSpec(Causal())

    def call(q, k, v, cu):
        return attention(q, k, v, spec, packing=Packing(cu, cu), backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for total in (30, 44, 57, 61):
        q, k, v = tensors(device, total)
        cu = boundaries(device, 11, total - 11)
        assert torch.equal(compiled(q, k, v, cu), call(q, k, v, cu))
    assert counter.frame_count <= 2


@on_devices
def test_dropout_without_a_state_is_consistent_when_compiled(device):
    """With q = 0 and V = I the output shows the dropout mask; the backward must use the same one."""
    n = 32
    q = torch.zeros(1, n, 1, n, device=device)
    v = torch.eye(n, device=device)[None, :, None].requires_grad_()

    def call(v):
        return attention(q, q, v, AttentionSpec(dropout=0.5), backend="triton")

    torch._dynamo.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(v)
    (grad,) = torch.autograd.grad(out, v, torch.eye(n, device=device)[None, :, None])
    assert 0.3 < (out > 0).float().mean() < 0.7
    torch.testing.assert_close(grad[0, :, 0], out[0, :, 0].t())


@on_devices
@pytest.mark.parametrize("mask", [Causal(), Window(5, 3)], ids=["causal", "window"])
@pytest.mark.parametrize("packed", [False, True])
def test_flop_counter_counts_the_operator(device, mask, packed):
    lengths = (11, 0, 25)
    q, k, v = tensors(device, *((40,) if packed else (2, 40)))
    cu = boundaries(device, *lengths)
    pairs = attended_pairs(lengths if packed else (40, 40), mask)
    counter = FlopCounterMode(display=False)
    with counter:
        out = attention(q, k, v, AttentionSpec(mask), packing=Packing(cu, cu) if packed else None, backend="triton")
        assert counter.get_total_flops() == attention_flops(pairs, 2, 16) > 0
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert counter.get_total_flops() == attention_flops(pairs, 2, 16) + attention_backward_flops(pairs, 2, 16)


@on_devices
def test_autocast_converts_inputs(device):
    q, k, v = tensors(device, 1, 20)
    dtype = torch.float16  # the interpreter has no bfloat16
    with torch.autocast(device, dtype=dtype):
        out = attention(q, k, v, AttentionSpec(Causal()), backend="triton")
    assert out.dtype == dtype
    halves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    expected = attention(*halves, AttentionSpec(Causal()), backend="triton")
    assert torch.equal(out, expected)
    weights = torch.randn_like(out)
    grads, theirs = torch.autograd.grad(out, (q, k, v), weights), torch.autograd.grad(expected, halves, weights)
    assert all(a.dtype == torch.float32 and torch.equal(a, b.float()) for a, b in zip(grads, theirs, strict=True))


def test_autocast_leaves_double_precision():
    q, k, v = tensors("cpu", 1, 20, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v, AttentionSpec(Causal())).dtype == torch.float64


@on_devices
def test_a_second_gradient_is_refused(device):
    q, k, v = tensors(device, 1, 20)
    out = attention(q, k, v, AttentionSpec(Causal()), backend="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="a gradient of attention's gradient: must be backend=reference or chunked"):
        torch.autograd.grad(dq.square().sum(), v)


@on_devices
@pytest.mark.parametrize("backend", ["triton", "standard", "chunked"])
def test_a_sink_does_not_hide_nan(device, backend):
    q, k, v = tensors(device, 1, 20)
    sinks = torch.zeros(2, device=device, requires_grad=True)
    with torch.no_grad():
        q[0, 3] = float("nan")
    out = attention(q, k, v, AttentionSpec(Causal()), sinks=sinks, backend=backend)
    assert torch.autograd.grad(out.sum(), sinks)[0].isnan().all()


@on_devices
@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**63])
def test_a_window_wider_than_any_sequence(device, far):
    q, k, v = tensors(device, 1, 40)
    weights = torch.randn_like(q)
    found, expected = (
        [out, *torch.autograd.grad(out, (q, k, v), weights)]
        for out in (
            attention(q, k, v, AttentionSpec(mask), backend="triton")
            for mask in (Window(far, far) & Window(far, 3), Window(None, 3))
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Attend(torch.nn.Module):
    """A typical module: projections around the call, and learnable slopes and sinks."""

    def __init__(self, device, backend):
        super().__init__()
        self.project = torch.nn.Linear(16, 3 * 16, bias=False, device=device)
        self.slopes = torch.nn.Parameter(torch.rand(2, device=device))
        self.sinks = torch.nn.Parameter(torch.rand(2, device=device))
        self.backend = backend

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        out = attention(
            q, k, v, AttentionSpec(Causal()), alibi_slopes=self.slopes, sinks=self.sinks, backend=self.backend
        )
        return out.flatten(-2)


@on_devices
def test_module_under_functional_call(device):
    torch.manual_seed(0)
    module, x = Attend(device, "triton"), torch.randn(2, 20, 16, device=device)
    others = {name: (0.3 * torch.randn_like(p)).requires_grad_() for name, p in module.named_parameters()}
    out = torch.func.functional_call(module, others, x)
    grads = torch.autograd.grad(out.square().sum(), list(others.values()))
    reference = Attend(device, "reference")
    reference.load_state_dict({name: p.detach() for name, p in others.items()})
    expected = reference(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    theirs = torch.autograd.grad(expected.square().sum(), list(reference.parameters()))
    by_name = dict(zip((name for name, _ in reference.named_parameters()), theirs, strict=True))
    for name, grad in zip(others, grads, strict=True):
        torch.testing.assert_close(grad, by_name[name], rtol=1e-3, atol=1e-3)


def checkpointed(device, backend):
    q, k, v = tensors(device, 2, 40)
    spec = AttentionSpec(Causal(), dropout=0.4)

    def call(q, k, v):
        return attention(q, k, v, spec, backend=backend)

    results = []
    for through in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(7)
        out = through(q, k, v)
        torch.manual_seed(8)  # the recomputed forward starts from another state
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(9)
    assert not torch.equal(call(q, k, v), results[0][0])


@on_devices
def test_checkpointing_reproduces_the_mask(device):
    checkpointed(device, "triton")


if not INTERPRETING:

    @pytest.mark.parametrize("backend", ["standard", "reference", "chunked", "sdpa"])
    def test_checkpointing_reproduces_the_mask_of_dense_backends(backend):
        checkpointed("cpu", backend)

    @pytest.mark.parametrize("backend", ["standard", "reference"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_dense_backends_compile(backend, packed):
        """Packed calls give the lengths, since the backends would otherwise read the boundaries."""
        counter, spec = compile_counter(), AttentionSpec(Window(9, 0), softcap=3.0)
        q, k, v = tensors("cpu", *((20,) if packed else (2, 20)))
        cu = boundaries("cpu", 12, 8)

        def call(q, k, v):
            packing = Packing(cu, cu, lengths=(12, 8)) if packed else None
            return attention(q, k, v, spec, packing=packing, backend=backend)

        out, expected = torch.compile(call, fullgraph=True, backend=counter)(q, k, v), call(q, k, v)
        torch.testing.assert_close(out, expected)
        weights = torch.randn_like(out)
        for a, b in zip(*(torch.autograd.grad(x, (q, k, v), weights) for x in (out, expected)), strict=True):
            torch.testing.assert_close(a, b)
