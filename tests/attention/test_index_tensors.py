"""Index tensors may be strided views, int64, or lists."""

import functools

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    Causal,
    Document,
    Packing,
    RngState,
    attention,
    cached_attention,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_train.attention.functional import operands_of
from tests.support.attention.devices import INTERPRETING, on_devices

BACKENDS = ("reference", "standard", "chunked")


def column(x):
    """The same values with stride 3 along the last dimension."""
    store = torch.full((*x.shape, 3), 77, dtype=x.dtype, device=x.device)
    store[..., 1] = x
    return store[..., 1]


def turned(x):
    """The same values with the last dimension outermost in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def tail(x):
    """The same values with other values before them in each row of memory."""
    return torch.cat([torch.full_like(x, 77), x], -1)[..., x.shape[-1] :]


VIEWS = {"column": column, "turned": turned, "tail": tail}


def decode_call(device, paged):
    """The tensors of a decode step, and its options by name."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    def integers(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    shape = (11, 8) if paged else (5, 40)
    tensors = (normal(3, 2, 4, 16), normal(*shape, 2, 16), normal(*shape, 2, 16))
    options = {
        "cache_seqlens": integers(5, 17, 30),
        "cache_leftpad": integers(2, 0, 11),
        "k": normal(3, 2, 2, 16),
        "v": normal(3, 2, 2, 16),
        "alibi_slopes": normal(3, 4).abs(),
        "sinks": normal(4),
    }
    if paged:
        options["block_table"] = integers([3, 9, 0, 1], [2, 10, 4, 5], [6, 7, 8, 1])
    else:
        options["cache_batch_idx"] = integers(4, 0, 2)
    return tensors, options


def decode(tensors, options, backend, spec):
    q, *caches = (x.clone() for x in tensors)
    return (*cached_attention(q, *caches, spec=spec, backend=backend, rng=RngState(5), **options), *caches)


INDICES = [(False, name) for name in ("cache_seqlens", "cache_leftpad", "cache_batch_idx")] + [
    (True, name) for name in ("cache_seqlens", "cache_leftpad", "block_table")
]


def check_decode(device, backend, paged, name, change):
    spec = AttentionSpec(Causal(), dropout=0.3)
    tensors, options = decode_call(device, paged)
    right = decode(tensors, options, backend, spec)
    changed = change(options[name])
    found = decode(tensors, options | {name: changed}, backend, spec)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@on_devices
@pytest.mark.parametrize("view", ["column", "turned"])
@pytest.mark.parametrize(("paged", "name"), [*INDICES, (False, "alibi_slopes"), (False, "sinks")])
def test_decode_kernel_accepts_views(device, paged, name, view):
    check_decode(device, "triton", paged, name, VIEWS[view])


@on_devices
@pytest.mark.parametrize("name", ["cache_seqlens", "cache_leftpad", "cache_batch_idx"])
def test_one_value_expanded_to_all_rows(device, name):
    tensors, options = decode_call(device, False)
    one = torch.tensor([3], dtype=torch.int32, device=device).expand(3)
    options.pop("k"), options.pop("v")  # rows that share a cache row would overwrite each other
    found, right = (
        decode(tensors, options | {name: index}, "triton", AttentionSpec()) for index in (one, one.contiguous())
    )
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@on_devices
def test_one_row_of_pages_expanded_to_all_rows(device):
    tensors, options = decode_call(device, True)
    options.pop("k"), options.pop("v")
    one = torch.tensor([[3, 9, 0, 1]], dtype=torch.int32, device=device).expand(3, 4)
    found, right = (
        decode(tensors, options | {"block_table": table}, "triton", AttentionSpec())
        for table in (one, one.contiguous())
    )
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@on_devices
@pytest.mark.parametrize("view", ["column", "tail"])
def test_decode_kernel_accepts_views_of_documents(device, view):
    tensors, options = decode_call(device, False)
    k_ids = (torch.arange(3 * 40, device=device) // 7).int().view(3, 40)
    q_ids = k_ids[:, 20:22].contiguous()
    spec, strided = (AttentionSpec(Document(change(q_ids), change(k_ids))) for change in (torch.clone, VIEWS[view]))
    found, right = (decode(tensors, options, "triton", given) for given in (strided, spec))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@functools.cache
def operator_call(device):
    """The arguments of a call of the operators, a function that makes it, and its results."""
    from flash_train.attention.kernels.call import Call

    generator = torch.Generator().manual_seed(4)
    q, dout = (torch.randn(40, 4, 16, generator=generator).to(device) for _ in "qd")
    k, v = (torch.randn(40, 2, 16, generator=generator).to(device) for _ in "kv")
    cu = torch.tensor([0, 13, 13, 31], dtype=torch.int32, device=device)
    ids = (torch.arange(40, device=device) // 5).int()
    spec = AttentionSpec(Causal() & Document(ids), dropout=0.2)
    state = torch.tensor([3, 4], device=device)
    slopes, sinks = (torch.rand(shape, generator=generator).to(device) for shape in ((3, 4), (4,)))
    call = Call(*operands_of(q, k, spec, Packing(cu, cu.clone()), state, (0, 0, 0, 0), slopes, sinks))

    def run(call, change=torch.clone):
        out, lse = torch.ops.flash_train.attention_forward(q, k, v, *call, "triton")
        grads = torch.ops.flash_train.attention_backward(
            dout, torch.ones_like(lse), q, k, v, out, change(lse), *call, "triton", True
        )
        return out, lse, *grads

    return call, run, run(call)


@on_devices
@pytest.mark.parametrize("view", ["column", "tail"])
@pytest.mark.parametrize(
    "name", ["cu_seqlens_q", "cu_seqlens_k", "rng", "alibi_slopes", "sinks", "term_tensors", "lse"]
)
def test_operators_take_views(device, name, view):
    """Without the checks of the public function, as in a saved program."""
    (call, run, right), change = operator_call(device), VIEWS[view]
    if name == "lse":
        found = run(call, change)
    else:
        given = getattr(call, name)
        changed = [change(x) for x in given] if name == "term_tensors" else change(given)
        found = run(call._replace(**{name: changed}))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@on_devices
@pytest.mark.parametrize("view", ["column", "tail"])
def test_kernels_accept_views_of_boundaries_slopes_and_sinks(device, view):
    check_packed(device, "triton", VIEWS[view])


def check_packed(device, backend, change):
    """Output and gradients of a packed call whose boundaries, slopes and sinks are views."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(40, h, 16, generator=generator).to(device).requires_grad_() for h in (4, 2, 2))
    cu = torch.tensor([0, 13, 13, 31], dtype=torch.int32, device=device)
    slopes, sinks = (torch.rand(shape, generator=generator).to(device) for shape in ((3, 4), (4,)))
    results = []
    for view in (torch.clone, change):
        learnt = [view(x).requires_grad_() for x in (slopes, sinks)]
        packing = Packing(view(cu), view(cu))
        out = attention(
            q, k, v, AttentionSpec(Causal()), packing=packing, alibi_slopes=learnt[0], sinks=learnt[1], backend=backend
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, *learnt))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_devices
def test_views_of_boundaries_with_pages(device):
    pages = torch.randn(9, 8, 2, 16, device=device)
    q = torch.randn(9, 4, 16, device=device)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 4, 9], [0, 11, 30]))
    table = torch.tensor([[3, 1, 0], [2, 8, 7]], dtype=torch.int32, device=device)
    found, right = (
        flash_attn_varlen_func(
            q, pages, pages, change(cu_q), change(cu_k), 5, 19, block_table=change(table), backend="triton"
        )
        for change in (column, torch.clone)
    )
    assert torch.equal(found, right)


if not INTERPRETING:

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(("paged", "name"), INDICES)
    @pytest.mark.parametrize("change", [column, turned, torch.Tensor.long, torch.Tensor.tolist, torch.Tensor.numpy])
    def test_dense_backends_accept_views_dtypes_and_lists(backend, paged, name, change):
        check_decode("cpu", backend, paged, name, change)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("view", VIEWS)
    def test_dense_backends_accept_views_of_boundaries_slopes_and_sinks(backend, view):
        check_packed("cpu", backend, VIEWS[view])

    def test_a_length_may_be_a_numpy_integer():
        import numpy as np

        (q, k, v), _ = decode_call("cpu", False)
        found, right = (flash_attn_with_kvcache(q, k, v, cache_seqlens=n) for n in (np.int64(7), 7))
        assert torch.equal(found, right)

    @pytest.mark.parametrize("wrong", [2**31 + 5, -(2**31) - 1])
    def test_numbers_that_int32_cannot_hold_are_refused(wrong):
        (q, k, v), _ = decode_call("cpu", False)
        with pytest.raises(ValueError, match=f"cache_seqlens is {wrong}"):
            flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([1, 2, wrong]))
