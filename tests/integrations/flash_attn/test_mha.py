"""`MHA` has flash-attn's names and computes what dense attention in PyTorch does."""

import pytest
import torch
import torch.nn.functional as F

from flash_train.attention import AttentionSpec, Causal, attention
from flash_train.integrations.flash_attn import (
    MHA,
    FlashCrossAttention,
    FlashSelfAttention,
    InferenceParams,
    get_alibi_slopes,
)
from flash_train.integrations.flash_attn import mha as module_under_test
from tests.support.integrations.rotary_reference import turned

LENGTHS = (4, 0, 7)
BOUNDARIES = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
EXACT = {"rtol": 1e-9, "atol": 1e-9}
TABLES = {"rtol": 1e-5, "atol": 1e-6}  # the tables of rotary positions are computed in fp32


def mha(seed=0, **options):
    torch.manual_seed(seed)
    return MHA(32, 4, **options).double()


def inputs(*sizes, n=1):
    found = [torch.randn(*sizes, dtype=torch.float64) for _ in range(n)]
    return found[0] if n == 1 else found


def dense(q, k, v, *, causal=False, window=(-1, -1), scale=None, slopes=None, counts=None):
    """Attention of (batch, seqlen, heads, head_dim) with all pairs in memory; a query without keys gives 0."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=q.dtype)[:, None, None] * distance.abs()
    left, right = window
    seen = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    seen = seen & (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else True)
    if counts is not None:
        seen = seen & counts[:, None, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def expected(module, x, x_kv=None, *, base=100.0, rotary_dim=0, interleaved=False, **options):
    """What the module should compute, from its weights."""
    heads, kv_heads, dim = module.num_heads, module.num_heads_kv, module.head_dim
    if module.cross_attn:
        q, kv = module.Wq(x), module.Wkv(x if x_kv is None else x_kv)
    else:
        q, kv = module.Wqkv(x).split([heads * dim, 2 * kv_heads * dim], -1)
    q, (k, v) = q.unflatten(-1, (heads, dim)), (part.unflatten(-1, (kv_heads, dim)) for part in kv.chunk(2, -1))
    if rotary_dim:
        steps = torch.arange(x.shape[1])
        angles = steps[:, None] * base ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        call = (angles.cos(), angles.sin(), steps.expand(x.shape[:2]), interleaved)
        q, k = turned(q, *call), turned(k, *call)
    return module.out_proj(dense(q, k, v, **options).flatten(-2))


def compare(module, found, reference, tensors, tolerance=EXACT):
    """Results, and the gradients of the inputs and of all weights."""
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    leaves = [*tensors, *module.parameters()]
    torch.testing.assert_close(found, reference, **tolerance)
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in (found, reference)]
    for name, a, b in zip(range(len(leaves)), *grads, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"gradient {name}: {text}")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"Wqkv.weight": (96, 32), "Wqkv.bias": (96,)}),
        ({"num_heads_kv": 2, "rotary_emb_dim": 8}, {"Wqkv.weight": (64, 32), "Wqkv.bias": (64,)}),
        ({"qkv_proj_bias": False, "use_alibi": True, "rotary_emb_scale_base": 64}, {"Wqkv.weight": (96, 32)}),
        (
            {"cross_attn": True, "num_heads_kv": 1},
            {"Wq.weight": (32, 32), "Wq.bias": (32,), "Wkv.weight": (16, 32), "Wkv.bias": (16,)},
        ),
    ],
)
def test_state_dict_of_flash_attn_2_8(options, names):
    names |= {"out_proj.weight": (32, 32), "out_proj.bias": (32,)}
    assert {name: tuple(x.shape) for name, x in mha(**options).state_dict().items()} == names
    assert "out_proj.bias" not in mha(out_proj_bias=False).state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"rotary_emb_dim": 8, "causal": True, "num_heads_kv": 2},
        {"rotary_emb_dim": 6, "rotary_emb_interleaved": True, "softmax_scale": 0.5, "qkv_proj_bias": False},
        {"use_alibi": True, "causal": True, "use_flash_attn": True},
        {"window_size": (3, 1), "num_heads_kv": 1, "fused_bias_fc": True},
        {"window_size": (2, -1), "causal": True, "checkpointing": True, "out_proj_bias": False},
    ],
)
def test_self_attention(options):
    module, x = mha(rotary_emb_base=100.0, **options), inputs(2, 9, 32).requires_grad_()
    reference = expected(
        module, x,
        causal=options.get("causal", False), window=options.get("window_size", (-1, -1)),
        scale=options.get("softmax_scale"), slopes=get_alibi_slopes(4) if "use_alibi" in options else None,
        rotary_dim=options.get("rotary_emb_dim", 0), interleaved=options.get("rotary_emb_interleaved", False),
    )  # fmt: skip
    compare(module, module(x), reference, [x], TABLES if "rotary_emb_dim" in options else EXACT)


def test_cross_attention():
    module = mha(cross_attn=True, num_heads_kv=2, return_residual=True)
    x, x_kv = (x.requires_grad_() for x in (inputs(2, 5, 32), inputs(2, 9, 32)))
    out, residual = module(x, x_kv)
    assert residual is x
    compare(module, out, expected(module, x, x_kv), [x, x_kv])
    out, _ = module(x, x_kv, causal=True)
    compare(module, out, expected(module, x, x_kv, causal=True), [x, x_kv])
    subset = torch.tensor([0, 3])
    out, residual = module(x, mixer_subset=subset)
    assert residual is x
    compare(module, out, expected(module, x[:, subset], x), [x])


@pytest.mark.parametrize(
    "options", [{}, {"num_heads_kv": 2, "causal": True, "rotary_emb_dim": 8, "use_alibi": True, "checkpointing": True}]
)
def test_packed_entries_are_computed_alone(options):
    module, x = mha(**options), inputs(11, 32).requires_grad_()
    alone = torch.cat([module(entry[None])[0] for entry in x.split(LENGTHS) if len(entry)])
    compare(module, module(x, cu_seqlens=BOUNDARIES, max_seqlen=7), alone, [x])
    torch.testing.assert_close(module(x, cu_seqlens=BOUNDARIES), alone, **EXACT)


def test_packed_cross_attention():
    module, x, x_kv = mha(cross_attn=True), inputs(11, 32), inputs(6, 32)
    boundaries = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    found = module(x, x_kv, cu_seqlens=BOUNDARIES, max_seqlen=7, cu_seqlens_k=boundaries, max_seqlen_k=3)
    parts = zip(x.split(LENGTHS), x_kv.split((2, 1, 3)), strict=True)
    alone = [expected(module, q[None], kv[None])[0] for q, kv in parts if len(q)]
    torch.testing.assert_close(found, torch.cat(alone), **EXACT)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "num_heads_kv": 2}, {"causal": True, "window_size": (3, 0)}, {"cross_attn": True}],
)
def test_keys_that_do_not_count(options):
    """Padding on either side and gaps: every query has its result, and one that sees no key has the bias."""
    module, cross = mha(**options), "cross_attn" in options
    x, x_kv = (x.requires_grad_() for x in (inputs(3, 6, 32), inputs(3, 8, 32)))
    counts = torch.ones(3, 8 if cross else 6, dtype=torch.bool)
    counts[0, 4:] = counts[1, :3] = counts[2, 1:3] = False
    given = [x, x_kv] if cross else [x]
    found = module(*given, key_padding_mask=counts)
    settings = {"causal": module.causal, "window": module.inner_attn.window_size, "counts": counts}
    compare(module, found, expected(module, *given, **settings), given)
    if module.causal:
        torch.testing.assert_close(found[1, 0], module.out_proj.bias, **EXACT)


def test_dropout_acts_on_the_weights_in_training():
    module, x = mha(dropout=0.25, causal=True), inputs(2, 9, 32)
    torch.manual_seed(3)
    found = module(x)
    q, k, v = module.Wqkv(x).unflatten(-1, (3, 4, 8)).unbind(-3)
    torch.manual_seed(3)
    reference = attention(q, k, v, AttentionSpec(Causal(), dropout=0.25))
    torch.testing.assert_close(found, module.out_proj(reference.flatten(-2)), **EXACT)
    torch.manual_seed(3)
    masked = module(x, key_padding_mask=torch.ones(2, 9, dtype=torch.bool))
    torch.testing.assert_close(masked, found, **EXACT)
    module.eval()
    torch.testing.assert_close(module(x), expected(module, x, causal=True), **EXACT)


def test_checkpointing_draws_the_same_mask_again(monkeypatch):
    calls = []
    for name in ("FlashSelfAttention", "FlashCrossAttention"):
        inner = getattr(module_under_test, name)
        plain = inner.forward
        monkeypatch.setattr(inner, "forward", lambda *a, plain=plain: calls.append(1) or plain(*a))
    for options, count in (({}, 2), ({"num_heads_kv": 2}, 2)):
        x = inputs(2, 9, 32)
        grads = []
        for checkpointing in (False, True):
            module = mha(dropout=0.5, checkpointing=checkpointing, **options)
            calls.clear()
            torch.manual_seed(1)
            module(x).square().sum().backward()
            grads.append([p.grad for p in module.parameters()])
            assert len(calls) == (count if checkpointing else 1)
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize(
    "options", [{"num_heads_kv": 2, "rotary_emb_dim": 8, "window_size": (3, 0)}, {"use_alibi": True}]
)
@pytest.mark.parametrize("by_row", [False, True])
def test_generation_equals_the_whole_row(options, by_row):
    """A prompt, then two steps; the caches' first row belongs to someone else."""
    module, x = mha(causal=True, layer_idx=5, **options).eval(), inputs(2, 9, 32)
    whole = module(x)
    state = InferenceParams(max_seqlen=12, max_batch_size=3, batch_size_offset=1)
    if by_row:
        state.lengths_per_sample = torch.zeros(2, dtype=torch.int32)
    caches = state.key_value_memory_dict[5] = module.allocate_inference_cache(3, 12).fill_(7.0)
    parts = []
    with torch.no_grad():
        for part in x.split((6, 1, 2), 1):
            parts.append(module(part, inference_params=state))
            state.seqlen_offset += part.shape[1]
            if by_row:
                state.lengths_per_sample += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
    assert (caches[0] == 7.0).all() and (caches[1:, :9] != 7.0).all() and (caches[1:, 9:] == 7.0).all()
    state.reset(12, 3)
    del state.key_value_memory_dict[5]
    with torch.no_grad():
        again = module(x[:, :6], inference_params=state)
    torch.testing.assert_close(again, whole[:, :6], **EXACT)
    assert state.key_value_memory_dict[5].shape == (3, 12, 2, module.num_heads_kv, 8)


def test_the_inner_modules():
    qkv = inputs(2, 9, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    slopes = torch.tensor(get_alibi_slopes(4))
    settings = {"causal": True, "scale": 0.5, "window": (4, -1), "slopes": slopes.tolist()}
    itself = FlashSelfAttention(True, 0.5, 0.9, (4, -1), slopes, True).eval()
    across = FlashCrossAttention(True, 0.5, 0.9, slopes, (4, -1), True).eval()
    assert not itself.state_dict() and not across.state_dict()
    torch.testing.assert_close(itself(qkv), dense(q, k, v, **settings), **TABLES)
    torch.testing.assert_close(across(q[:, 3:], qkv[:, :, 1:]), dense(q[:, 3:], k, v, **settings), **TABLES)
    settings["causal"] = False
    torch.testing.assert_close(itself(qkv, causal=False), dense(q, k, v, **settings), **TABLES)
    ends = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = itself(qkv.flatten(0, 1), False, ends, 9)
    torch.testing.assert_close(packed.view(q.shape), dense(q, k, v, **settings), **TABLES)
    packed = across(q.flatten(0, 1), qkv[:, :, 1:].flatten(0, 1), False, ends, 9, ends, 9)
    torch.testing.assert_close(packed.view(q.shape), dense(q, k, v, **settings), **TABLES)


def test_compiled_to_one_graph():
    module, x = mha(num_heads_kv=2, rotary_emb_dim=8, causal=True, backend="reference"), inputs(2, 9, 32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compare(module, compiled(x), module(x), [])
    packed = {"cu_seqlens": torch.tensor([0, 4, 18], dtype=torch.int32), "max_seqlen": 14}
    compare(module, compiled(x.flatten(0, 1), **packed), module(x.flatten(0, 1), **packed), [])


def test_slopes_of_a_power_of_two_and_of_another_number():
    assert get_alibi_slopes(8) == [2**-i for i in range(1, 9)]
    assert get_alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert get_alibi_slopes(1) == [2**-8]


def test_weights_in_16_bits():
    """The error against fp64 is at most twice PyTorch's in the same precision."""
    exact, x = mha(num_heads_kv=2, causal=True), inputs(2, 40, 32)
    module = mha(num_heads_kv=2, causal=True).to(torch.bfloat16)
    exact.load_state_dict(module.state_dict())
    x = x.bfloat16()
    q, k, v = module.Wqkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), -2)
    k, v = (part.repeat_interleave(2, 2) for part in (k, v))
    plain = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
    plain = module.out_proj(plain.transpose(1, 2).flatten(-2))
    reference = expected(exact, x.double(), causal=True)
    assert (module(x).double() - reference).norm() <= 2 * (plain.double() - reference).norm()


X, MASK, CACHE = torch.randn(1, 5, 32), torch.ones(1, 5, dtype=torch.bool), InferenceParams(8, 1)
ENDS = torch.tensor([0, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MHA(32, 4, dwconv=True), "dwconv=True: must be False"),
        (lambda: MHA(32, 5), "embed_dim=32: must be a multiple of num_heads, 5"),
        (lambda: MHA(32, 4, 3), "num_heads=4: must be a multiple of num_heads_kv, 3"),
        (lambda: MHA(32, 4, cross_attn=True, rotary_emb_dim=8), "rotary_emb_dim=8 with cross_attn=True: must be 0"),
        (lambda: MHA(32, 4, backend="fast"), "backend='fast': must be one of"),
        (lambda: MHA(32, 4)(X, X), "x_kv or mixer_subset was given with cross_attn=False"),
        (lambda: MHA(32, 4)(X, key_padding_mask=MASK, cu_seqlens=ENDS), "key_padding_mask and cu_seqlens were given"),
        (lambda: MHA(32, 4)(X, key_padding_mask=MASK[:, :4]), r"key_padding_mask has shape \(1, 4\): must be \(1, 5\)"),
        (lambda: MHA(32, 4)(X, inference_params=CACHE), "layer_idx=None: must be the layer's number"),
        (lambda: MHA(32, 4, layer_idx=0, dropout=0.1)(X, inference_params=CACHE), r"call eval\(\) before"),
        (lambda: MHA(32, 4, layer_idx=0)(X, inference_params=CACHE), "requires a gradient"),
        (lambda: MHA(32, 4, cross_attn=True)(X, X, MASK, causal=True), "padding moves the diagonal"),
        (lambda: MHA(32, 4, cross_attn=True)(X[0], X[0], cu_seqlens=ENDS), "must be both, or neither"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
