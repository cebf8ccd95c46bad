"""Padding rows in a decode batch have output 0 and write nothing, and they do not change the other rows."""

import math

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, Full, cached_attention, flash_attn_with_kvcache
from flash_train.attention.decoding.cache_rows import append
from tests.support.attention.devices import INTERPRETING, on_devices

#: lengths and first pages of rows; the real rows are 0 and 2
LENGTHS = {
    "negative length": ([9, -1, 3, -1], [4, 5, 1, 0]),
    "negative pages": ([9, 0, 3, 7], [4, -1, 1, -1]),
    "both": ([9, -1, 3, -2], [4, -1, 1, -5]),
}


def batch(device, kind, new):
    """q, caches, new keys and values, lengths and pages; rows 1 and 3 are padding."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    lengths, first = LENGTHS[kind]
    table = [[page, page + 1 if page >= 0 else -1, page] for page in first]
    integers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, table)]
    return normal(4, 2, 4, 16), normal(6, 8, 2, 16), normal(6, 8, 2, 16), normal(4, new, 2, 16), *integers


def check(device, backend, kind, new, mask, rotary=False, num_splits=0, sinks=None):
    q, k_cache, v_cache, added, lengths, table = batch(device, kind, new)
    angles = torch.arange(24.0, device=device)[:, None] * torch.tensor([1.0, 0.1], device=device)
    turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if rotary else {}

    def call(rows):
        caches = k_cache.clone(), v_cache.clone()
        more = {"cache_seqlens": lengths[rows], "block_table": table[rows], "num_splits": num_splits}
        if new:
            more |= {"k": added[rows], "v": added[rows]}
        if rotary or sinks is None:
            found = flash_attn_with_kvcache(
                q[rows], *caches, causal=mask == Causal(), return_softmax_lse=True, backend=backend, **turn, **more
            )
        else:
            found = cached_attention(q[rows], *caches, spec=AttentionSpec(mask), sinks=sinks, backend=backend, **more)
        return (*found, *caches)

    out, lse, *caches = call([0, 1, 2, 3])
    right, right_lse, *right_caches = call([0, 2])
    assert torch.equal(out[[0, 2]], right) and torch.equal(lse[[0, 2]], right_lse)
    assert all(torch.equal(a, b) for a, b in zip(caches, right_caches, strict=True))
    assert (out[[1, 3]] == 0).all()
    expected = torch.full_like(lse[[1, 3]], -math.inf) if sinks is None else sinks[None, :, None].expand(2, 4, 2)
    assert torch.equal(lse[[1, 3]], expected)
    if new:  # the first position of the cache, which padding indexes, is unchanged or has a real row's key
        assert not torch.equal(caches[0], k_cache)


CASES = [
    (0, Full(), False, 0),
    (1, Causal(), False, 0),
    (2, Causal(), True, 3),
    (2, Full(), True, 0),
]


@on_devices
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("new", "mask", "rotary", "num_splits"), CASES)
def test_decode_kernel_ignores_padding_rows(device, kind, new, mask, rotary, num_splits):
    check(device, "triton", kind, new, mask, rotary, num_splits)


@on_devices
def test_padding_has_the_sink_as_log_sum_exp(device):
    check(device, "triton", "both", 1, Causal(), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=device))


@on_devices
def test_indices_of_padding_are_not_read(device):
    """Without pages: cache_batch_idx and cache_leftpad of padding may have any value."""
    check_indices(device, "triton")


def check_indices(device, backend):
    q, cache, new = (torch.randn(shape, device=device) for shape in ((3, 1, 4, 16), (2, 8, 2, 16), (3, 1, 2, 16)))
    lengths, rows, left = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, -1, 3], [1, -1, 0], [2, -7, 0])
    )
    caches = cache.clone(), cache.clone()
    out, _ = cached_attention(
        q, *caches, lengths, k=new, v=new, cache_batch_idx=rows, cache_leftpad=left, backend=backend
    )
    assert (out[1] == 0).all() and (out[[0, 2]] != 0).all()
    cache[1, 5], cache[0, 3] = new[0, 0], new[2, 0]
    assert torch.equal(caches[0], cache) and torch.equal(caches[1], cache)


if not INTERPRETING:
    BACKENDS = ("reference", "standard", "chunked")

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("kind", LENGTHS)
    @pytest.mark.parametrize(("new", "mask", "rotary", "num_splits"), CASES)
    def test_dense_backends_ignore_padding_rows(backend, kind, new, mask, rotary, num_splits):
        check("cpu", backend, kind, new, mask, rotary, num_splits)
        check("cpu", backend, kind, new, mask, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_indices_of_padding_are_not_read_by_dense_backends(backend):
        check_indices("cpu", backend)

    @pytest.mark.parametrize("first_row", [0, 3])
    def test_padding_with_a_row_that_writes_the_first_position_of_the_cache(first_row):
        """Padding must not restore the previous content of that position."""
        cache, new = torch.zeros(2, 4, 1, 8), torch.randn(4, 1, 1, 8)
        lengths = torch.full((4,), -1, dtype=torch.int32)
        lengths[first_row] = 0
        append(cache, cache, new, new, lengths, torch.zeros(4, dtype=torch.int32))
        assert torch.equal(cache[0, 0], new[first_row, 0])
        assert (cache[0, 1:] == 0).all() and (cache[1] == 0).all()

    @pytest.mark.parametrize("paged", [False, True])
    def test_a_batch_with_only_padding_writes_nothing(paged):
        cache, new = torch.randn(2, 4, 1, 8), torch.randn(2, 3, 1, 8)
        before = cache.clone()
        lengths = torch.full((2,), -1, dtype=torch.int32)
        table = {"block_table": torch.full((2, 2), -1, dtype=torch.int32)} if paged else {}
        out, lse = cached_attention(torch.randn(2, 1, 1, 8), cache, cache, lengths, k=new, v=new, **table)
        assert torch.equal(cache, before)
        assert (out == 0).all() and (lse == -math.inf).all()

    def test_padding_stays_padding_while_a_graph_adds_to_its_length():
        """A CUDA graph that adds 1 to all lengths turns -1 into 0, then 1: the negative page still marks padding."""
        pages, new = torch.randn(3, 2, 1, 8), torch.randn(2, 1, 1, 8)
        table = torch.tensor([[2, 1], [-1, -1]], dtype=torch.int32)
        lengths = torch.tensor([0, -1], dtype=torch.int32)
        before = pages.clone()
        for _ in range(4):
            out = flash_attn_with_kvcache(
                torch.randn(2, 1, 1, 8), pages, pages, new, new, cache_seqlens=lengths, block_table=table
            )
            assert (out[1] == 0).all() and (out[0] != 0).all()
            lengths += 1
        assert torch.equal(pages[0], before[0])

    def test_a_row_that_is_not_padding_needs_all_of_its_pages():
        pages, table = torch.randn(3, 2, 1, 8), torch.tensor([[-1, 1]], dtype=torch.int32)
        with pytest.raises(ValueError, match="block_table is -1: must be between 0 and 2"):
            flash_attn_with_kvcache(torch.randn(1, 1, 1, 8), pages, pages, cache_seqlens=3, block_table=table)
