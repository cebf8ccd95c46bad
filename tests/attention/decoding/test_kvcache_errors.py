"""Calls with arguments that do not fit together raise an error and leave the cache unchanged."""

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, Document
from flash_train.attention.decoding.kvcache import cached_attention
from flash_train.attention.flash_attn.api import flash_attn_with_kvcache
from tests.support.attention.caches import HEADS, KV_HEADS, Store

S, P = Store(2, 6), Store(2, 6, page_size=2)
S.k, S.v, P.k, P.v = (x.float() for x in (S.k, S.v, P.k, P.v))
Q, NEW, INT = torch.randn(2, 1, HEADS, 8), torch.randn(2, 2, KV_HEADS, 8), torch.zeros(2, dtype=torch.int32)
COS = torch.ones(8, 4)
JAGGED = torch.nested.nested_tensor([torch.zeros(n, HEADS, 8) for n in (1, 2)], layout=torch.jagged)
CALLS = [
    ((Q[0], S.k, S.v), {}, ValueError, r"q has shape .*: must be \(batch, seqlen, heads"),
    ((Q, S.k[0], S.v), {}, ValueError, r"k_cache has shape .*: must be \(batch_size_cache, capacity"),
    ((Q, P.k[0], P.v), {"block_table": P.table}, ValueError, r"must be \(num_blocks, page_size"),
    ((Q, S.k.half(), S.v), {}, TypeError, "k_cache is torch.float16"),
    ((Q.int(), S.k.int(), S.v.int()), {}, TypeError, "q is torch.int32"),
    ((Q, S.k, S.v[:, :3]), {}, ValueError, "must be equal up to head_dim"),
    ((Q, S.k[..., :4], S.v), {}, ValueError, "q has head_dim 8 and k_cache 4"),
    ((Q[:, :, :3], S.k, S.v), {}, ValueError, "q has 3 heads and k_cache 2"),
    ((Q, S.k[:1], S.v[:1]), {}, ValueError, "k_cache has 1 rows and q 2"),
    ((Q, S.k, S.v), {"cache_seqlens": 7}, ValueError, "cache_seqlens=7: must be between 0 and .* 6"),
    ((Q, S.k, S.v), {"cache_seqlens": -1}, ValueError, "cache_seqlens=-1"),
    ((Q, S.k, S.v), {"cache_seqlens": INT + 7}, ValueError, "cache_seqlens is 7: must be between 0 and 6"),
    ((Q, S.k, S.v), {"cache_seqlens": INT.float()}, ValueError, "cache_seqlens is torch.float32"),
    ((Q, S.k, S.v), {"cache_seqlens": INT[:1]}, ValueError, r"must be int32 \(2,\)"),
    ((Q, S.k, S.v), {"cache_batch_idx": INT - 1}, ValueError, "cache_batch_idx is -1"),
    ((Q, S.k, S.v), {"cache_batch_idx": INT + 4}, ValueError, "cache_batch_idx is 4: must be between 0 and 3"),
    ((Q, S.k, S.v), {"cache_leftpad": INT - 1}, ValueError, "cache_leftpad is -1"),
    ((Q, P.k, P.v), {"block_table": P.table[0]}, ValueError, r"block_table has shape \(3,\)"),
    ((Q, P.k, P.v), {"block_table": [[0, 1, 2], [3]]}, TypeError, r"block_table=\[\[0.*: must be integers, or"),
    ((Q, P.k, P.v), {"block_table": 5}, TypeError, r"block_table=5: must be int32 \(batch, blocks per sequence\)"),
    ((Q, S.k, S.v), {"cache_seqlens": "5"}, TypeError, r"cache_seqlens='5': must be int32 \(2,\) on cpu, or integers"),
    ((JAGGED, S.k, S.v), {"cache_seqlens": 5}, TypeError, "q is nested: must be padded"),
    ((Q, P.k, P.v), {"block_table": P.table[:1]}, ValueError, r"block_table is .* must be int32 \(2, 3\)"),
    ((Q, P.k, P.v), {"block_table": P.table + 7}, ValueError, "block_table is 1"),
    ((Q, P.k, P.v), {"block_table": P.table, "cache_batch_idx": INT}, ValueError, "reorder the rows of block_table"),
    ((Q, S.k, S.v, NEW), {"cache_seqlens": 0}, ValueError, "k was given without the other"),
    ((Q, S.k, S.v, None, NEW), {"cache_seqlens": 0}, ValueError, "v was given without the other"),
    ((Q, S.k, S.v, NEW, NEW), {}, ValueError, "without cache_seqlens"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 5}, ValueError, "position in the cache is 6: must be between 0 and 5"),
    ((Q, P.k, P.v, NEW, NEW), {"cache_seqlens": 5, "block_table": P.table}, ValueError, "position in the cache is 6"),
    ((Q, S.k, S.v, NEW, NEW[:, :1]), {"cache_seqlens": 0}, ValueError, "v has shape .*the seqlen_new of k"),
    ((Q, S.k, S.v, NEW[:1], NEW), {"cache_seqlens": 0}, ValueError, "k has shape .*with batch 2"),
    ((Q, S.k, S.v, NEW.half(), NEW), {"cache_seqlens": 0}, TypeError, "k is torch.float16"),
    ((Q, S.k, S.v, NEW, NEW, COS), {"cache_seqlens": 0}, ValueError, "one of rotary_cos and rotary_sin"),
    ((Q, S.k, S.v, None, None, COS, COS), {"cache_seqlens": 0}, ValueError, "rotary_cos was given without k, v"),
    ((Q, S.k, S.v, NEW, NEW, COS, COS[:4]), {"cache_seqlens": 0}, ValueError, "rotary_sin .4, 4.: must be equal"),
    ((Q, S.k, S.v, NEW, NEW, *[COS.repeat(1, 2)] * 2), {"cache_seqlens": 0}, ValueError, "up to head_dim, 8"),
    ((Q, S.k, S.v, NEW, NEW, *[COS[:4]] * 2), {"cache_seqlens": 3}, ValueError, "position in rotary_cos is 4"),
    ((Q, S.k, S.v, NEW, NEW, *[COS.int()] * 2), {"cache_seqlens": 3}, ValueError, "rotary_cos is torch.int32"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes is"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "num_splits": -1}, ValueError, "num_splits=-1"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "window_size": 4}, ValueError, "window_size=4"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "backend": "sdpa"}, ValueError, "has no cache"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "backend": "hopper"}, ValueError, "have no cache"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "backend": "flash"}, ValueError, "on cpu; standard and chunked can"),
    ((Q, S.k, S.v, NEW, NEW), {"cache_seqlens": 0, "backend": "fast"}, ValueError, "must be one of auto"),
    ((Q, S.k, S.v), {"alibi_slopes": [0.1] * HEADS}, TypeError, "alibi_slopes is a list: must be a tensor"),
    ((Q, S.k, S.v), {"rng": 5}, TypeError, "rng is 5: must be an RngState"),
    ((Q.clone().requires_grad_(), S.k, S.v), {}, ValueError, "q requires a gradient"),
    ((Q, S.k, S.v, NEW, NEW.clone().requires_grad_()), {"cache_seqlens": 0}, ValueError, "v requires a gradient"),
]


@pytest.mark.parametrize(("tensors", "options", "error", "message"), CALLS, ids=[message for *_, message in CALLS])
def test_bad_calls_leave_the_cache_unchanged(tensors, options, error, message):
    before = [x.clone() for x in tensors[1:3]]
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(*tensors, **options)
    assert all(torch.equal(x, y) for x, y in zip(tensors[1:3], before, strict=True))


def test_parameters_are_accepted_under_no_grad():
    q = Q.clone().requires_grad_()
    with torch.no_grad():
        out = flash_attn_with_kvcache(q, S.k, S.v)
    assert torch.equal(out, flash_attn_with_kvcache(Q, S.k, S.v))


def test_masks_must_fit_the_capacity():
    with pytest.raises(ValueError, match="Document k_ids"):
        cached_attention(Q, S.k, S.v, 3, AttentionSpec(Document(INT[:, None], torch.zeros(2, 3).int())))
    with pytest.raises(ValueError, match="sinks is"):
        cached_attention(Q, S.k, S.v, 3, sinks=torch.ones(3))


def test_types_are_checked_as_in_any_call():
    with pytest.raises(TypeError, match="must be an AttentionSpec"):
        cached_attention(Q, S.k, S.v, 3, Causal())
    with pytest.raises(ValueError, match="q is on the meta device"):
        cached_attention(*(x.to("meta") for x in (Q, S.k, S.v)), 3)
