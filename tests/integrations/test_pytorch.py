"""PyTorch's functions compute the same on this project's kernels: on a GPU, and on a CPU in the Gluon emulator."""

import inspect
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
    varlen,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention import keep_mask
from flash_train.integrations import pytorch as adapter
from flash_train.integrations.pytorch import Kernels, override, register
from tests.support.attention.devices import GPU
from tests.support.attention.emulated import hopper_on_cpu

KNOWN_OPERATORS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace", "_flash_attention_backward",
)  # fmt: skip
OPERATORS = [name for name in KNOWN_OPERATORS if hasattr(torch.ops.aten, name)]
LENGTHS_Q, LENGTHS_K = (7, 0, 41), (23, 5, 60)
on_devices = pytest.mark.parametrize("device", [GPU, "cpu"])
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention


@contextmanager
def ours(device, backend="flash"):
    """Inside it, PyTorch's operators on the device are ours; on a CPU they run Hopper's kernels in the emulator."""
    if device == "cuda":
        activate_flash_attention_impl(register(backend=backend))
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch 2.15 prefers cuDNN
                yield
        finally:
            restore_flash_attention_impl()
        return
    handle = override("hopper", "CPU")
    try:
        with hopper_on_cpu():
            yield
    finally:
        handle.remove()


def tensors(device, *shapes, dtype=torch.bfloat16, layout="rows"):
    """Tensors that require gradients; with `rows`, (batch, heads, seqlen, d) has a row's heads next to each other."""
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        x = torch.randn(shape, device=device).to(dtype)
        if len(shape) == 4 and layout == "rows":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "slice":
            x = torch.stack([x, x], -2)[..., 0, :]
        made.append(x.requires_grad_())
    return made


def dense(q, k, v, mask=None, keep=None, scale=None):
    """Output and log-sum-exp of (heads, seqlen, d) or (batch, heads, seqlen, d), with all pairs in memory."""
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    weights = logits.softmax(-1).nan_to_num(0)
    return (weights if keep is None else weights * keep) @ v, logits.logsumexp(-1)


def band(len_q, len_k, left, right, device):
    """Which keys a query attends to; queries and keys are aligned at their ends, and -1 is no bound."""
    distance = torch.arange(len_k, device=device) - torch.arange(len_q, device=device)[:, None] - (len_k - len_q)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    return visible & (distance <= right) if right >= 0 else visible


def packed_reference(q, k, v, window, scale):
    parts = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), strict=True)
    outs, lses = [], []
    for a, b, c in parts:
        mask = band(len(a), len(b), *window, q.device)
        out, lse = dense(*(x.transpose(0, 1) for x in (a, b, c)), mask, scale=scale)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def results(run, inputs, dtype=None):
    """Output, log-sum-exp and gradients of `run(*inputs)`, in fp64."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    if dtype is None:  # keep the memory layout
        leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    out, lse = run(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    gradients = torch.autograd.grad(out, leaves, weights.to(out.dtype))
    return [x.detach().double() for x in (out, lse, *gradients)]


def assert_close(found, exact, plain):
    """The error is at most twice PyTorch's in this precision (gradients: three times), plus the rounding of results."""
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), found, exact, plain, strict=True):
        assert torch.equal(a.isinf(), b.isinf()), name
        a, b, c = (x.nan_to_num(0, 0, 0) for x in (a, b, c))
        rounding = torch.finfo(torch.float32 if name == "lse" else torch.bfloat16).eps * b.abs().max()
        allowed = (2 if name in ("out", "lse") else 3) * (c - b).abs().max() + rounding
        assert (a - b).abs().max() <= allowed, (name, (a - b).abs().max(), allowed)


@on_devices
@pytest.mark.parametrize(
    "causal, heads, len_k, scale, layout",
    [(True, 2, 72, None, "rows"), (False, 4, 100, 0.3, "dense"), (True, 4, 100, None, "slice")],
)
def test_scaled_dot_product_attention(device, causal, heads, len_k, scale, layout):
    inputs = tensors(device, (2, heads, 72, 64), (2, 2, len_k, 64), (2, 2, len_k, 64), layout=layout)
    mask = band(72, len_k, -1, 0, device) if causal else None

    def run(q, k, v):
        return flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]

    def reference(q, k, v):
        return dense(q, k, v, mask, scale=scale)

    with ours(device):
        found = results(run, inputs)
    exact = results(reference, inputs, torch.float64)
    assert_close(found, exact, results(reference, inputs))
    math = F.scaled_dot_product_attention(*(x.double() for x in inputs), mask, scale=scale, enable_gqa=True)
    torch.testing.assert_close(exact[0], math.detach())


@on_devices
def test_dropout_has_one_mask_in_forward_and_backward(device):
    inputs = tensors(device, (2, 4, 72, 64), (2, 2, 72, 64), (2, 2, 72, 64))
    states = []

    def run(q, k, v):
        out, lse, _, _, _, _, state, *_ = flash_attention(q, k, v, 0.25, True)
        states.append(state)
        return out, lse

    with ours(device):
        torch.manual_seed(5)
        found = results(run, inputs)
        torch.manual_seed(5)
        again, other = run(*inputs)[0], run(*inputs)[0]
    assert torch.equal(again.double(), found[0]) and not torch.equal(again, other)
    assert [x.dtype for x in states] == [torch.uint64] * 3 and states[0].tolist() != states[2].tolist()
    rows, state = torch.arange(72), states[0].view(torch.int64)
    keep = torch.stack(
        [torch.stack([keep_mask(state, entry, head, rows, rows, 192) for head in range(4)]) for entry in range(2)]
    )
    assert 0.2 < 1 - keep.float().mean() < 0.3

    def reference(q, k, v):
        return dense(q, k, v, band(72, 72, -1, 0, device), keep.to(device, q.dtype) / 0.75)

    assert_close(found, results(reference, inputs, torch.float64), results(reference, inputs))


@on_devices
@pytest.mark.parametrize("window, heads, scale", [((-1, -1), 2, None), ((-1, 0), 4, 0.2), ((9, 0), 4, None)])
def test_varlen_attn(device, window, heads, scale):
    shape_k = (sum(LENGTHS_K), 2, 64)
    inputs = tensors(device, (sum(LENGTHS_Q), heads, 64), shape_k, shape_k, layout="slice")
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().to(device) for x in (LENGTHS_Q, LENGTHS_K))
    given = (cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K))
    options = {"window_size": window, "scale": scale}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 groups heads without it
        options["enable_gqa"] = heads != 2

    def run(q, k, v):
        return varlen_attn(q, k, v, *given, **options, return_aux=AuxRequest(lse=True))

    def reference(q, k, v):
        return packed_reference(q, k, v, window, scale)

    with ours(device):
        found = results(run, inputs)
        written = torch.empty_like(inputs[0])
        if has_out := hasattr(varlen, "varlen_attn_out"):  # not in torch 2.11
            with torch.no_grad():
                varlen.varlen_attn_out(written, *inputs, *given, **options)
    assert not has_out or torch.equal(written.double(), found[0])
    assert_close(found, results(reference, inputs, torch.float64), results(reference, inputs))


@on_devices
@pytest.mark.parametrize("layout", ["rows", "dense", "slice"])
def test_results_are_laid_out_as_compiled_programs_expect(device, layout):
    inputs = tensors(device, (2, 4, 72, 64), (2, 2, 72, 64), (2, 2, 72, 64), layout=layout)

    def run(q, k, v):
        found = flash_attention(q, k, v, 0.0, True)
        return [*found[:2], *torch.autograd.grad(found[0], (q, k, v), torch.empty_like(found[0]))], found[2:]

    with ours(device):
        found, rest = run(*inputs)
    with FakeTensorMode() as mode:
        fake, fake_rest = run(*(mode.from_tensor(x) for x in inputs))
    for a, b in zip(found, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    for a, b in zip(rest, fake_rest, strict=True):
        assert a == b if not isinstance(a, torch.Tensor) else (a.shape, a.dtype) == (b.shape, b.dtype)


@on_devices
def test_autocast_changes_no_dtypes_of_varlen_attn(device):
    (q,) = tensors(device, (48, 2, 64), dtype=torch.float16)
    cu = torch.tensor([0, 48], dtype=torch.int32, device=device)
    with ours(device), torch.autocast(device, torch.bfloat16):
        assert varlen_attn(q, q, q, cu, cu, 48, 48).dtype == torch.float16


def test_overrides_exist_while_they_are_active():
    def dumps():
        return [torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS]

    before = dumps()
    name = register()
    assert name == "flash_train" and name in list_flash_attention_impls()
    assert dumps() == before and current_flash_attention_impl() is None
    for _ in range(2):
        activate_flash_attention_impl(name)
        assert current_flash_attention_impl() == name
        for text, old in zip(dumps(), before, strict=True):
            added = [line for line in text.splitlines() if line not in old.splitlines()]
            assert any(line.startswith("CUDA") for line in added), text
        restore_flash_attention_impl()
        assert dumps() == before and current_flash_attention_impl() is None
    handle = override("triton")
    assert dumps() != before
    handle.remove()
    assert dumps() == before


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((0.0, False, True), {}, "return_debug_mask was given"),
        ((0.0, False, False), {"alibi_slopes": torch.ones(2)}, "alibi_slopes was given"),
        ((0.0, False, False), {"seqused_k": torch.ones(1)}, "seqused_k was given"),
        ((0.0, False, False), {"block_table": torch.ones(1, 1)}, "block_table was given"),
        ((0.0, False, False), {"num_splits": 4}, "num_splits was given.*restore_flash_attention_impl"),
        ((0.001, False, False), {}, "attention dropout comes in steps of 1/256"),
        ((0.0, False, False), {"scale": -1.0}, "scale=-1.0: must be a positive number"),
        ((0.0, False, False), {}, "the triton backend cannot run here: there is no NVIDIA GPU"),
    ],
)
def test_what_the_kernels_cannot_do_is_one_error(arguments, options, message):
    (q,) = tensors("cpu", (1, 8, 2, 64))
    with pytest.raises(ValueError, match=message):
        Kernels("triton").forward(q, q, q, None, None, 8, 8, *arguments, **options)


def test_mistakes(monkeypatch):
    with pytest.raises(ValueError, match="name='FA4': must not be empty or one of FA2, FA3, FA4"):
        register("FA4")
    with pytest.raises(ValueError, match="backend='sdpa': must be one of flash, triton, hopper"):
        register(backend="sdpa")
    (q,) = tensors("cpu", (8, 2, 64))
    with pytest.raises(ValueError, match="one of cum_seq_q and cum_seq_k was given: must be both"):
        Kernels("triton").forward(q, q, q, torch.tensor([0, 8]).int(), None, 8, 8, 0.0, False, False)
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(ImportError, match="must be 2.11 or later"):
        register()


# -- on a GPU alone


def own_calls(monkeypatch):
    """A list that grows with each forward and backward of ours."""
    calls, plain = [], adapter.operands_of
    monkeypatch.setattr(adapter, "operands_of", lambda *a: calls.append(a) or plain(*a))
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 1000, 2048])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_as_exact_as_pytorchs_flash_attention(length, head_dim, monkeypatch):
    calls = own_calls(monkeypatch)
    inputs = tensors("cuda", (2, 4, length, head_dim), (2, 2, length, head_dim), (2, 2, length, head_dim))

    def run(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out, out.new_zeros(())

    def exact(q, k, v):
        out = dense(q, k, v, band(length, length, -1, 0, "cuda"))[0]
        return out, out.new_zeros(())

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        plain = results(run, inputs)
    assert not calls
    with ours("cuda"):
        found = results(run, inputs)
    assert len(calls) == 2
    assert_close(found, results(exact, inputs, torch.float64), plain)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_programs_run_the_kernels(dropout, monkeypatch):
    calls = own_calls(monkeypatch)
    inputs = tensors("cuda", (2, 4, 200, 64), (2, 4, 200, 64), (2, 4, 200, 64))
    cu = torch.tensor([0, 150, 400], dtype=torch.int32, device="cuda")

    def run(q, k, v):
        first = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (first, k, v)]
        return varlen_attn(*packed, cu, cu, 250, 250, window_size=(30, 0)) * 2

    compiled, found = torch.compile(run, fullgraph=True), []
    with ours("cuda", "triton"):  # their gradients are repeatable
        for function in (compiled, run, compiled):
            torch.manual_seed(3)
            calls.clear()
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = function(*leaves)
            out.square().sum().backward()
            assert len(calls) == 4
            found.append([out.detach(), *(x.grad for x in leaves)])
    for a, b in zip(found[0], found[2], strict=True):
        assert torch.equal(a, b)
    if dropout == 0:  # compiled programs draw other seeds
        for a, b in zip(found[0], found[1], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_jagged_tensors(monkeypatch):
    calls = own_calls(monkeypatch)
    parts = [x.detach().clone() for x in tensors("cuda", (50, 4, 64), (1, 4, 64), (300, 4, 64))]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with ours("cuda"):
        q = x.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.transpose(1, 2).values().sum().backward()
    assert len(calls) == 2
    for part, found in zip(parts, out.transpose(1, 2).unbind(), strict=True):
        row = part.transpose(0, 1)
        expected = dense(row.double(), row.double(), row.double(), band(len(part), len(part), -1, 0, "cuda"))[0]
        torch.testing.assert_close(found.double(), expected.transpose(0, 1), rtol=0, atol=2e-2)


@pytest.mark.gpu
def test_a_graph_draws_a_new_dropout_mask_in_each_replay():
    inputs = [x.detach() for x in tensors("cuda", (1, 2, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64))]

    def run():
        return F.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    with ours("cuda"):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        replays = []
        for _ in range(2):
            graph.replay()
            replays.append(out.clone())
    assert not torch.equal(*replays)
