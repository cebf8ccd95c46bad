"""The cache: positions, writes and attention, compared with caches that are Python lists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_train.attention import (
    AttentionSpec,
    Causal,
    Document,
    MaskFunction,
    RngState,
    Tree,
    Window,
    attention,
)
from flash_train.attention.decoding.cache_rows import append, gather, gather_packed
from flash_train.attention.decoding.kvcache import cached_attention
from flash_train.attention.decoding.rotary import rotate
from flash_train.attention.dense.reference import reference_attention
from flash_train.attention.flash_attn.api import flash_attn_func, flash_attn_with_kvcache
from tests.support.attention.caches import HEADS, KV_HEADS, Store


def rotated(x, cos, sin, position, interleaved):
    """Rotate one token (heads, head_dim): each pair of dimensions is multiplied as a complex number."""
    half, x = cos.shape[1], x.clone()
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        turned = torch.complex(x[:, i], x[:, j]) * torch.complex(cos[position, pair], sin[position, pair])
        x[:, i], x[:, j] = turned.real, turned.imag
    return x


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_random_arguments_equal_the_list_cache(data):
    """flash_attn_with_kvcache with random arguments: its result, and the cache afterwards."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**32)))
    batch, len_q, len_new = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
    capacity = len_new + draw(st.integers(1, 9))
    store = Store(batch, capacity, draw(st.sampled_from([None, 1, 2, 3, 5])), draw(st.booleans()), 8, 6)
    seqlens = draw(st.lists(st.integers(0, capacity - len_new), min_size=batch, max_size=batch))
    as_int = draw(st.booleans())
    if as_int:
        seqlens = seqlens[:1] * batch
    leftpad = [draw(st.integers(0, n)) for n in seqlens] if draw(st.booleans()) else None
    causal = draw(st.booleans())
    window = draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 5), st.integers(-1, 5)))
    softcap, scale = draw(st.sampled_from([0.0, 1.5])), draw(st.sampled_from([None, 0.6]))
    half, interleaved = draw(st.sampled_from([0, 1, 3, 4])), draw(st.booleans())
    slopes = draw(st.sampled_from([None, (HEADS,), (batch, HEADS)]))
    slopes = None if slopes is None else torch.rand(slopes, dtype=torch.float64)

    q = torch.randn(batch, len_q, HEADS, 8, dtype=torch.float64)
    k, v = (torch.randn(batch, len_new, KV_HEADS, d, dtype=torch.float64) for d in (8, 6))
    angles = torch.randn(capacity + 4, half, dtype=torch.float64)
    cos, sin = (angles.cos(), angles.sin()) if half and len_new else (None, None)
    caches = store.k.clone(), store.v.clone()
    out, lse = flash_attn_with_kvcache(
        q,
        *caches,
        *((k, v) if len_new else (None, None)),
        cos,
        sin,
        seqlens[0] if as_int else torch.tensor(seqlens).int(),
        cache_leftpad=None if leftpad is None else torch.tensor(leftpad).int(),
        softmax_scale=scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        rotary_interleaved=interleaved,
        alibi_slopes=slopes,
        num_splits=draw(st.integers(0, 3)),
        return_softmax_lse=True,
        backend=draw(st.sampled_from(["auto", "reference", "standard", "chunked"])),
        **store.address,
    )

    q, expected = q.clone(), [store.k.clone(), store.v.clone()]
    moving = causal or window != (-1, -1)
    for b, n in enumerate(seqlens):
        for i in range(len_q if cos is not None else 0):
            q[b, i] = rotated(q[b, i], cos, sin, n + i * moving, interleaved)
        for i in range(len_new):
            key = k[b, i] if cos is None else rotated(k[b, i], cos, sin, n + i, interleaved)
            expected[0][store.where[b][n + i]], expected[1][store.where[b][n + i]] = key, v[b, i]
        begin, end = leftpad[b] if leftpad else 0, n + len_new
        ref = flash_attn_func(
            q[b, None],
            *(store.row(cache, b, begin, end)[None] for cache in expected),
            0.0,
            scale,
            causal,
            window,
            softcap,
            slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            return_attn_probs=True,
            backend="reference",
        )
        torch.testing.assert_close(out[b], ref[0][0])
        torch.testing.assert_close(lse[b], ref[1][0])
        if begin == end:
            assert (out[b] == 0).all()
            assert (lse[b] == -math.inf).all()
    for cache, ref in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, ref)


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_token_by_token_is_causal_attention(page_size, dtype):
    """A prompt, then one token at a time, with rotary embedding, compared with one call for the whole sequence."""
    n, prompt, half = 11, 4, 3
    store = Store(2, n, page_size)
    caches = [torch.full_like(x, math.nan, dtype=dtype) for x in (store.k, store.v)]
    q, k, v = (torch.randn(2, n, heads, 8, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    angles = torch.randn(n, half)
    turn = (angles.cos().to(dtype), angles.sin().to(dtype))
    steps = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, n))]
    outs = [
        flash_attn_with_kvcache(
            q[:, s], *caches, k[:, s], v[:, s], *turn, cache_seqlens=s.start, causal=True, **store.address
        )
        for s in steps
    ]
    positions = torch.arange(n).expand(2, n)
    whole = flash_attn_func(
        rotate(q, *turn, positions, True), rotate(k, *turn, positions, True), v, causal=True, backend="reference"
    )
    tolerance = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(torch.cat(outs, 1), whole, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_rounds_once(dtype, interleaved):
    x, angles = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(9, 3)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [8, 3, 3, 0, 5]])
    out = rotate(x, cos, sin, positions, interleaved)
    exact = [
        [rotated(x[b, i].double(), cos.double(), sin.double(), int(positions[b, i]), interleaved) for i in range(5)]
        for b in range(2)
    ]
    exact = torch.stack([torch.stack(row) for row in exact])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(out[..., 6:], x[..., 6:])


def naive_ancestors(parents, node):
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parents[node]
    return seen


@pytest.mark.parametrize("page_size", [None, 2])
def test_tree_mask_over_a_cached_prefix(page_size):
    """A tree per row: each node attends to its row's whole prefix and to its ancestors."""
    parents, prefix = [[-1, 0, 0, 1], [-1, -1, 1, 2]], [5, 0]
    store = Store(2, 10, page_size)
    q, k, v = (torch.randn(2, 4, heads, 8, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, lse = cached_attention(
        q, store.k, store.v, torch.tensor(prefix).int(), AttentionSpec(Tree(parents)), k=k, v=v, **store.address
    )
    for b, n in enumerate(prefix):
        for node in range(4):
            seen = [*range(n), *(n + other for other in sorted(naive_ancestors(parents[b], node)))]
            keys, values = (store.row(cache, b, 0, n + 4)[seen] for cache in (store.k, store.v))
            alone, alone_lse = reference_attention(q[b, None, node, None], keys[None], values[None], AttentionSpec())
            torch.testing.assert_close(out[b, node], alone[0, 0])
            torch.testing.assert_close(lse[b, :, node], alone_lse[0, :, 0])


def test_masks_count_positions_from_the_left_padding():
    """A mask function gets positions and lengths within the row; Document has one id per position of the cache."""
    store, begins, ends = Store(2, 9), [2, 4], [9, 7]
    ids = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0, 1, 0, 1]]).int()
    seen = {}

    def even(entry, head, q, k):
        seen[entry.index] = (entry.len_q, entry.len_k)
        return (k % 2 == 0) | (entry.index == 1)

    mask = MaskFunction(None, even) & Document(torch.ones(2, 3).int(), ids) & Window(left=4)
    q = torch.randn(2, 3, HEADS, 8, dtype=torch.float64)
    options = {"cache_leftpad": torch.tensor(begins).int(), "backend": "reference"}
    out, _ = cached_attention(q, store.k, store.v, torch.tensor(ends).int(), AttentionSpec(mask), **options)
    assert seen == {0: (3, 7), 1: (3, 3)}
    for b in range(2):
        n = ends[b] - begins[b]
        for i in range(3):
            keys = [
                begins[b] + j
                for j in range(n)
                if (j % 2 == 0 or b == 1) and ids[b, begins[b] + j] == 1 and j >= i + n - 3 - 4
            ]
            if not keys:
                assert (out[b, i] == 0).all()
                continue
            alone = attention(q[b, None, i, None], store.k[b, None, keys], store.v[b, None, keys], backend="reference")
            torch.testing.assert_close(out[b, i], alone[0, 0])


@pytest.mark.parametrize("backend", ["reference", "standard", "chunked"])
def test_dropout_and_sinks_equal_attention_without_a_cache(backend):
    """Row b of the batch is entry b of the dropout mask, for any order of the cache; the state's origin is added."""
    store = Store(3, 12, shuffled_rows=True)
    q, sinks = torch.randn(3, 5, HEADS, 8, dtype=torch.float64), torch.randn(HEADS, dtype=torch.float64)
    spec, rng = AttentionSpec(Causal(), dropout=0.5), RngState(9, 2, entry=4, head=1, query=16, key=3)
    out, lse = cached_attention(q, store.k, store.v, spec=spec, sinks=sinks, rng=rng, backend=backend, **store.address)
    rows = store.idx.long()
    whole, whole_lse = attention(
        q, store.k[rows], store.v[rows], spec, sinks=sinks, rng=rng, backend="reference", return_lse=True
    )
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_dropout_without_a_state_follows_the_seed():
    store, q = Store(2, 12), torch.randn(2, 5, HEADS, 8, dtype=torch.float64)

    def draw(seed):
        torch.manual_seed(seed)
        return cached_attention(q, store.k, store.v, spec=AttentionSpec(dropout=0.5))[0]

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_an_empty_row_has_the_sink_as_log_sum_exp():
    store, sinks = Store(1, 4), torch.randn(HEADS, dtype=torch.float64)
    q = torch.randn(1, 2, HEADS, 8, dtype=torch.float64)
    out, lse = cached_attention(q, store.k, store.v, 0, sinks=sinks)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, HEADS, 2))


def test_an_empty_batch_and_no_queries():
    store = Store(2, 4)
    out, lse = cached_attention(torch.randn(0, 2, HEADS, 8, dtype=torch.float64), store.k, store.v, 3)
    assert out.shape == (0, 2, HEADS, 8)
    assert lse.shape == (0, HEADS, 2)
    out, lse = cached_attention(torch.randn(2, 0, HEADS, 8, dtype=torch.float64), store.k, store.v, 3)
    assert out.shape == (2, 0, HEADS, 8)
    assert lse.shape == (2, HEADS, 0)


def test_pages_past_the_end_of_a_row_need_not_exist():
    store = Store(3, 8, page_size=2)
    lengths, q = torch.tensor([5, 1, 0]).int(), torch.randn(3, 1, HEADS, 8, dtype=torch.float64)
    out, _ = cached_attention(q, store.k, store.v, lengths, block_table=store.table)
    store.table[0, 3:], store.table[1, 1:], store.table[2] = -1, 10**6, 10**6
    again, _ = cached_attention(q, store.k, store.v, lengths, block_table=store.table)
    assert torch.equal(out, again)
    assert (out[:2] != 0).all()


def test_strided_caches_are_written_in_place():
    """Keys and values interleaved in one tensor, as in serving engines."""
    both = torch.randn(2, 6, 2, KV_HEADS, 8, dtype=torch.float64)
    before = both.clone()
    k, v = (torch.randn(2, 2, KV_HEADS, 8, dtype=torch.float64) for _ in "kv")
    append(*both.unbind(2), k, v, torch.tensor([0, 3]).int())
    before[0, 0:2], before[1, 3:5] = torch.stack([k, v], 2)[0], torch.stack([k, v], 2)[1]
    assert torch.equal(both, before)


def test_gather_and_append_are_inverse():
    store, lengths = Store(2, 7, page_size=3), torch.tensor([2, 4]).int()
    k, v = (torch.randn(2, 3, KV_HEADS, 8, dtype=torch.float64) for _ in "kv")
    append(store.k, store.v, k, v, lengths, block_table=store.table)
    found = gather(store.v, lengths + 3, 7, block_table=store.table)
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(found[b, n : n + 3], v[b])
        assert torch.equal(found[b, :n], store.row(store.v, b, 0, n))


def test_no_values_are_read_on_the_host():
    """Tensors on the meta device have no values."""
    with torch.device("meta"):
        cache, new, lengths = torch.empty(5, 4, 2, 8), torch.empty(3, 2, 2, 8), torch.empty(3, dtype=torch.int32)
        table, boundaries = torch.empty(3, 2, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
        append(cache, cache, new, new, lengths, lengths)
        append(cache, cache, new, new, lengths, block_table=table)
        assert gather(cache, lengths, 7, block_table=table).shape == (3, 7, 2, 8)
        assert gather_packed(cache, boundaries, 6, table).shape == (18, 2, 8)
        assert gather_packed(cache, boundaries, None, table).shape == (24, 2, 8)
        cos = torch.empty(9, 4)
        assert rotate(new, cos, cos, lengths[:, None] + torch.arange(2), True).shape == new.shape
