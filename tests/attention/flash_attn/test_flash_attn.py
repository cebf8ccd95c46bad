"""flash-attn's functions: signatures, and every argument compared with loops written from its documentation."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_train.attention import AttentionSpec, Causal, Packing, RngState, attention
from flash_train.attention.flash_attn import api as flash_attn
from flash_train.attention.flash_attn import padding
from flash_train.attention.flash_attn.api import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    flash_attn_func: f"q, k, v, {OPTIONS}",
    flash_attn_qkvpacked_func: f"qkv, {OPTIONS}",
    flash_attn_kvpacked_func: f"q, kv, {OPTIONS}",
    flash_attn_varlen_func: "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{OPTIONS}, block_table=None",
    flash_attn_varlen_qkvpacked_func: f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    flash_attn_varlen_kvpacked_func: f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {OPTIONS}",
    flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signatures_equal_flash_attns(function):
    """Names, order and defaults of flash-attn 2.8.3, followed by our keyword-only arguments."""
    own = ["backend='auto'", "rng=None"]
    if function in (flash_attn_func, flash_attn_varlen_func):
        own.append("s_aux=None")
    parameters = list(inspect.signature(function).parameters.values())
    bare = [p.replace(annotation=p.empty) for p in parameters]
    assert ", ".join(map(str, bare[: -len(own)])) == SIGNATURES[function]
    assert [str(p) for p in bare[-len(own) :]] == own
    assert [p.kind for p in bare[-len(own) :]] == [inspect.Parameter.KEYWORD_ONLY] * len(own)


def test_sinks_are_those_of_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
    sinks, cu = torch.randn(4), torch.tensor([0, 9, 18], dtype=torch.int32)
    expected = attention(q, k, v, AttentionSpec(Causal()), sinks=sinks)
    assert (expected - attention(q, k, v, AttentionSpec(Causal()))).abs().max() > 0.01
    assert torch.equal(flash_attn_func(q, k, v, causal=True, s_aux=sinks), expected)
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 9, 9, causal=True, s_aux=sinks)
    torch.testing.assert_close(packed.view_as(expected), expected)


def naive(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, softmax_scale=None):
    """One sequence by loops, from flash-attn's documentation: (n, heads, d) tensors to out and lse (heads, n)."""
    len_q, heads, head_dim = q.shape
    len_k, group = k.shape[0], heads // k.shape[1]
    left, right = (math.inf if bound < 0 else bound for bound in window_size)
    right = min(right, 0) if causal else right
    out = torch.zeros(len_q, heads, v.shape[-1], dtype=q.dtype)
    lse = torch.full((heads, len_q), -math.inf, dtype=q.dtype)
    for h in range(heads):
        for i in range(len_q):
            position = i + len_k - len_q
            seen = [j for j in range(len_k) if position - left <= j <= position + right]
            if not seen:
                continue
            scores = []
            for j in seen:
                score = q[i, h] @ k[j, h // group] * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                if alibi_slopes is not None:
                    score = score - alibi_slopes[h] * abs(position - j)
                scores.append(score)
            scores = torch.stack(scores)
            lse[h, i] = scores.logsumexp(0)
            out[i, h] = torch.softmax(scores, 0) @ v[seen, h // group]
    return out, lse


def tensors(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@st.composite
def options(draw, entries, heads):
    slopes = draw(st.sampled_from([None, (heads,), (entries, heads)]))
    return {
        "softmax_scale": draw(st.sampled_from([None, 0.7])),
        "causal": draw(st.booleans()),
        "window_size": draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 5), st.integers(-1, 5))),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "alibi_slopes": None if slopes is None else torch.rand(slopes, dtype=torch.float64),
    }


def of_entry(chosen, entry):
    slopes = chosen["alibi_slopes"]
    return chosen if slopes is None or slopes.dim() == 1 else chosen | {"alibi_slopes": slopes[entry]}


def expected(rows, chosen):
    """Output and log-sum-exp of each sequence of ``rows``, (q, k, v) in order."""
    return zip(*(naive(*row, **of_entry(chosen, entry)) for entry, row in enumerate(rows)), strict=True)


def same_gradients(out, ref, inputs):
    grad = torch.randn_like(out)
    if not ref.requires_grad:  # there is no pair
        assert all((mine == 0).all() for mine in torch.autograd.grad(out, inputs, grad))
        return
    theirs = torch.autograd.grad(ref, inputs, grad, allow_unused=True, materialize_grads=True)
    for mine, other in zip(torch.autograd.grad(out, inputs, grad), theirs, strict=True):
        torch.testing.assert_close(mine, other)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_padded_functions_equal_the_loops(data):
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    batch, len_q, len_k = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    group, form = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from(["qkv", "kv", "separate"]))
    if form == "qkv":
        len_q, group = len_k, 1
    chosen = data.draw(options(batch, 2 * group)) | {"return_attn_probs": True, "backend": "reference"}
    q, k, v = tensors((batch, len_q, 2 * group, 4), (batch, len_k, 2, 4), (batch, len_k, 2, 4))
    if form == "qkv":
        out, lse, nothing = flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **chosen)
    elif form == "kv":
        out, lse, nothing = flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **chosen)
    else:
        out, lse, nothing = flash_attn_func(q, k, v, **chosen)
    chosen = {name: chosen[name] for name in list(chosen)[:-2]}
    ref, ref_lse = map(torch.stack, expected(zip(q, k, v, strict=True), chosen))
    assert nothing is None
    torch.testing.assert_close(out, ref)
    torch.testing.assert_close(lse, ref_lse)
    same_gradients(out, ref, (q, k, v))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_packed_functions_equal_the_loops(data):
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3))
    group, form = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from(["qkv", "kv", "separate", "pages"]))
    if form == "qkv":
        lengths, group = [(n, n) for n, _ in lengths], 1
    cu_q, cu_k = (torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True))
    longest = data.draw(st.sampled_from([(6, 6), (None, None)]))
    chosen = data.draw(options(len(lengths), 2 * group)) | {"return_attn_probs": True, "backend": "reference"}
    q, k, v = tensors((int(cu_q[-1]), 2 * group, 4), (int(cu_k[-1]), 2, 4), (int(cu_k[-1]), 2, 4))
    if form == "qkv":
        out, lse, nothing = flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), cu_q, longest[0], **chosen)
    elif form == "kv":
        out, lse, nothing = flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu_q, cu_k, *longest, **chosen)
    elif form == "pages":
        pages_k, pages_v, table = paged(k, v, cu_k, page_size=data.draw(st.integers(1, 4)))
        out, lse, nothing = flash_attn_varlen_func(
            q, pages_k, pages_v, cu_q, cu_k, *longest, block_table=table, **chosen
        )
    else:
        out, lse, nothing = flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **chosen)
    chosen = {name: chosen[name] for name in list(chosen)[:-2]}
    rows = [(q[cu_q[e] : cu_q[e + 1]], k[cu_k[e] : cu_k[e + 1]], v[cu_k[e] : cu_k[e + 1]]) for e in range(len(lengths))]
    outs, lses = expected(rows, chosen)
    ref, ref_lse = torch.cat(outs), torch.cat(lses, 1)
    assert nothing is None
    torch.testing.assert_close(out, ref)
    torch.testing.assert_close(lse, ref_lse)
    same_gradients(out, ref, (q, k, v))


def paged(k, v, cu_seqlens, page_size):
    """Packed keys and values in shuffled pages, differentiable; the table is invalid past the end of a sequence."""
    lengths = cu_seqlens.diff().tolist()
    columns = max(-(-n // page_size) for n in lengths) + 1
    table = torch.full((len(lengths), columns), 10**6, dtype=torch.int32)
    used = [(e, c) for e, n in enumerate(lengths) for c in range(-(-n // page_size))]
    for (e, c), page in zip(used, torch.randperm(len(used)).tolist(), strict=True):
        table[e, c] = page
    e = torch.repeat_interleave(torch.tensor(lengths))
    position = torch.arange(len(e)) - cu_seqlens[e]
    where = (table[e, position // page_size].long(), position % page_size)
    empty = torch.full((len(used) + 1, page_size, *k.shape[1:]), math.nan, dtype=k.dtype)
    return empty.index_put(where, k), empty.index_put(where, v), table


def test_pages_past_the_end_of_an_entry_need_not_exist():
    cu = torch.tensor([0, 3, 7, 7]).int()
    q, k, v = tensors(*[(7, 2, 4)] * 3)
    pages_k, pages_v, table = paged(k, v, cu, page_size=2)
    assert (table == 10**6).sum() == 5
    out = flash_attn_varlen_func(q, pages_k, pages_v, cu, cu, None, None, block_table=table, backend="reference")
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, backend="reference"))


PACKED = [
    (flash_attn_qkvpacked_func, (2, 6, 3, 2, 8), ()),
    (flash_attn_varlen_qkvpacked_func, (6, 3, 2, 8), (torch.tensor([0, 4, 6]).int(), 4)),
]


@pytest.mark.parametrize(("function", "shape", "boundaries"), PACKED, ids=lambda x: getattr(x, "__name__", None))
def test_packed_tensors_are_not_copied(monkeypatch, function, shape, boundaries):
    (qkv,) = tensors(shape)
    seen = []

    def spy(*args, **kwargs):
        seen.extend(args[:3])
        return attention(*args, **kwargs)

    monkeypatch.setattr(flash_attn, "attention", spy)
    out = function(qkv, *boundaries, causal=True, backend="reference")
    assert [x.untyped_storage().data_ptr() for x in seen] == [qkv.untyped_storage().data_ptr()] * 3
    (grad,) = torch.autograd.grad(out.square().sum(), qkv)
    parts = [x.detach().requires_grad_() for x in qkv.unbind(-3)]
    packing = Packing(boundaries[0], boundaries[0]) if boundaries else None
    alone = attention(*parts, AttentionSpec(Causal()), packing=packing, backend="reference")
    torch.testing.assert_close(grad, torch.stack(torch.autograd.grad(alone.square().sum(), parts), -3))


def test_values_may_have_another_head_dim():
    q, k, v = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 6))
    out = flash_attn_func(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(out[0], naive(q[0], k[0], v[0], causal=True)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_equals_the_operators(packed):
    shape, packing = ((2, 20, 2, 8), None), None
    q, k, v = tensors(*[(40, 2, 8) if packed else shape[0]] * 3)
    rng, spec = RngState(3, 4, entry=2, head=1), AttentionSpec(Causal(), dropout=0.4)
    if packed:
        cu = torch.tensor([0, 25, 40]).int()
        packing = Packing(cu, cu)
        out = flash_attn_varlen_func(q, k, v, cu, cu, 25, 25, 0.4, causal=True, rng=rng, backend="reference")
    else:
        out = flash_attn_func(q, k, v, 0.4, causal=True, rng=rng, backend="reference")
    assert torch.equal(out, attention(q, k, v, spec, packing=packing, rng=rng, backend="reference"))
    assert not torch.equal(out, attention(q, k, v, AttentionSpec(Causal()), packing=packing, backend="reference"))


def test_dropout_without_a_state_follows_the_seed():
    q, k, v = tensors(*[(1, 20, 2, 8)] * 3)

    def draw(seed):
        torch.manual_seed(seed)
        return flash_attn_func(q, k, v, 0.5, backend="reference")

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_slopes_get_a_gradient():
    q, k, v, slopes = tensors((2, 5, 2, 4), (2, 7, 2, 4), (2, 7, 2, 4), (2, 2))
    out = flash_attn_func(q, k, v, alibi_slopes=slopes, backend="reference")
    ref = torch.stack([naive(*row, alibi_slopes=s)[0] for *row, s in zip(q, k, v, slopes, strict=True)])
    same_gradients(out, ref, (q, k, v, slopes))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "standard", "chunked"])
def test_every_backend_can_be_chosen(backend):
    q, k, v = tensors((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    out = flash_attn_func(q, k, v, window_size=(3, 1), deterministic=True, backend=backend)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, window_size=(3, 1), backend="reference"))


@pytest.mark.parametrize("given", [{"return_attn_probs": True}, {"dropout_p": 0.5, "rng": RngState(1)}], ids=str)
def test_auto_chooses_a_backend_for_features_that_sdpa_lacks(given):
    q, k, v = tensors(*[(1, 6, 2, 8)] * 3)
    out, ref = flash_attn_func(q, k, v, **given), flash_attn_func(q, k, v, backend="reference", **given)
    torch.testing.assert_close(out, ref)


@pytest.mark.parametrize("window_size", [(-1, -1), (3, 0)])
def test_calls_compile_into_one_graph(window_size):
    qkv = torch.randn(1, 6, 3, 2, 8)

    def call(qkv):
        return flash_attn_qkvpacked_func(qkv, causal=True, window_size=window_size, backend="sdpa")

    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(qkv), call(qkv))


def test_max_seqlen_is_never_read():
    q, k, v = tensors(*[(6, 2, 4)] * 3)
    cu = torch.tensor([0, 4, 6]).int()
    unreadable = torch.empty((), dtype=torch.int32, device="meta")
    out = flash_attn_varlen_func(q, k, v, cu, cu, unreadable, unreadable, causal=True, backend="reference")
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, causal=True, backend="reference"))


@pytest.mark.gpu
def test_deterministic_refuses_sdpa_on_a_gpu():
    q = torch.randn(1, 16, 2, 32, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="deterministic=True, and backend=sdpa"):
        flash_attn_func(q, q, q, deterministic=True, backend="sdpa")
    torch.testing.assert_close(
        flash_attn_func(q, q, q, deterministic=True), flash_attn_func(q, q, q, backend="sdpa"), atol=2e-2, rtol=2e-2
    )


X, P, CU = torch.randn(1, 8, 2, 4), torch.randn(8, 2, 4), torch.tensor([0, 8]).int()
PAGES, TABLE, ONE = torch.randn(2, 4, 2, 4), torch.tensor([[1, 0]]).int(), torch.tensor([[1], [0]]).int()
BAD_CALLS = [
    (lambda: flash_attn_func(P, P, P), r"q has shape \(8, 2, 4\): must be \(batch, seqlen"),
    (lambda: flash_attn_func(X, X, X, window_size=3), "window_size=3: must be two integers"),
    (lambda: flash_attn_func(X, X, X, window_size=(1, None)), r"window_size=\(1, None\)"),
    (lambda: flash_attn_func(X, X, X, 1.5), "dropout=1.5"),
    (lambda: flash_attn_func(X, X, X, softmax_scale=0.0), "scale=0.0"),
    (lambda: flash_attn_func(X, X, X, softcap=-1.0), "softcap=-1"),
    (lambda: flash_attn_func(X, X, X, backend="fast"), "must be one of auto"),
    (lambda: flash_attn_func(X, X, X, alibi_slopes=torch.ones(3)), "alibi_slopes is"),
    (lambda: flash_attn_qkvpacked_func(X), r"qkv has shape .*: must be \(batch, seqlen, 3, heads"),
    (lambda: flash_attn_qkvpacked_func(X[:, :, None].expand(-1, -1, 2, -1, -1)), "must be .batch, seqlen, 3"),
    (lambda: flash_attn_kvpacked_func(X, torch.randn(1, 8, 3, 2, 4)), r"kv has shape .*: must be \(batch, seqlen, 2"),
    (lambda: flash_attn_varlen_qkvpacked_func(P, CU, 8), r"qkv has shape .*: must be \(total, 3, heads"),
    (lambda: flash_attn_varlen_kvpacked_func(P, P, CU, CU, 8, 8), r"kv has shape .*: must be \(total, 2"),
    (lambda: flash_attn_varlen_func(X, X, X, CU, CU, 8, 8), r"must be \(total, heads"),
    (lambda: flash_attn_varlen_func(P, P, P, CU.long(), CU, 8, 8), "cu_seqlens_q is torch.int64"),
    (lambda: flash_attn_varlen_func(P, P, P, CU, CU, 8, 8, block_table=TABLE), "num_blocks, page_size"),
    (
        lambda: flash_attn_varlen_func(P, PAGES, PAGES, CU, CU, 8, 8, block_table=TABLE - 1),
        "block_table is -1: must be between 0 and 1",
    ),
    (
        lambda: flash_attn_varlen_func(P, PAGES, PAGES, CU, CU, None, None, block_table=TABLE[:, :1]),
        "cu_seqlens is 8: must be between 0 and 4",
    ),
    (
        lambda: flash_attn_varlen_func(P, PAGES, PAGES, *[torch.tensor([0, 8, 8]).int()] * 2, 8, None, block_table=ONE),
        "position in the pages is 7: must be between 0 and 3",
    ),
    (
        lambda: flash_attn_varlen_func(P, PAGES, PAGES, CU, CU, 8, 8, block_table=TABLE.long()),
        "block_table is torch.int64",
    ),
    (
        lambda: flash_attn_varlen_func(P, PAGES, PAGES, CU, CU, 8, 8, block_table=TABLE[[0, 0]]),
        r"block_table is .* \(2, 2\): must be int32 \(1, blocks per entry\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_types_are_refused():
    with pytest.raises(TypeError, match="k is torch.float16"):
        flash_attn_func(X, X.half(), X)


def test_the_packed_path_of_transformers():
    """A padded batch through these functions, as transformers calls them, equals attention with a padding mask."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    q, k, v = (torch.randn(2, 5, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    for length in (5, 3, 1):
        late = q[:, -length:]
        packed_q, packed_k, packed_v, indices, cu, longest = utils._upad_input(
            late, k, v, mask, length, padding.unpad_input
        )
        packed = flash_attn_varlen_func(
            packed_q, packed_k, packed_v, *cu, *longest, softmax_scale=0.5, causal=True, backend="reference"
        )
        out = padding.pad_input(packed, indices, 2, length)
        for row, tokens in enumerate(mask.bool()):
            seen = tokens[-length:]
            ref, _ = naive(late[row, seen], k[row, tokens], v[row, tokens], causal=True, softmax_scale=0.5)
            torch.testing.assert_close(out[row, seen], ref)
