"""The public function on any machine: backends compared with each other, validation, and error messages."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from flash_train.attention import (
    AttentionSpec,
    Causal,
    EntryOrigins,
    Full,
    Packing,
    RngState,
    Tree,
    attention,
    backends,
    resolve_backend,
)
from flash_train.attention.kernels import families

CAUSAL = AttentionSpec(Causal())


def qkv(*shape, kv_heads=None, dtype=torch.float64):
    kv = (*shape[:-2], kv_heads or shape[-2], shape[-1])
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (shape, kv, kv)]


def cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pack(*lengths, padded_to=0):
    bounds = torch.cat([cu(*lengths), cu(*lengths)[-1:].expand(padded_to)])
    return Packing(bounds, bounds, lengths=lengths)


@pytest.mark.parametrize("backend", ["sdpa", "standard"])
@pytest.mark.parametrize("spec", [CAUSAL, AttentionSpec(Full(), scale=0.3)], ids=["causal", "full-scale"])
@pytest.mark.parametrize("packed", [False, True])
def test_baselines_equal_the_reference(backend, spec, packed):
    torch.manual_seed(0)
    tensors = qkv(60, 4, 16, kv_heads=2) if packed else qkv(2, 30, 4, 16, kv_heads=2)
    packing = pack(11, 1, 48, padded_to=3) if packed else None
    out = attention(*tensors, spec, packing=packing, backend=backend)
    ref = attention(*tensors, spec, packing=packing, backend="reference")
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, ref)
    for ours, theirs in zip(*(torch.autograd.grad(x, tensors, grad) for x in (out, ref)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["sdpa", "standard", "reference"])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)])
def test_causal_is_aligned_at_the_ends(backend, lengths):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, lengths[0], 1, 8), torch.randn(1, lengths[1], 1, 8), torch.randn(1, lengths[1], 1, 8)
    out = attention(q, k, v, CAUSAL, backend=backend)
    torch.testing.assert_close(out[0, -1], attention(q[:, -1:], k, v, backend="reference")[0, -1])
    unseeing = max(lengths[0] - lengths[1], 0)
    assert (out[0, :unseeing] == 0).all()
    assert (out[0, unseeing:] != 0).any(-1).all()


def test_documents_do_not_see_each_other():
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in qkv(50, 2, 8))
    packing = pack(20, 7, 23)
    before = attention(q, k, v, CAUSAL, packing=packing, backend="sdpa")
    for x in (q, k, v):
        x[20:27] = torch.randn(7, 2, 8, dtype=x.dtype)
    after = attention(q, k, v, CAUSAL, packing=packing, backend="sdpa")
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[27:], after[27:])
    assert not torch.equal(before[20:27], after[20:27])


def test_dropout_needs_no_state_and_takes_one():
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in qkv(1, 40, 2, 8))
    spec = AttentionSpec(Causal(), dropout=0.5)
    rng = RngState(torch.tensor(5), 6)
    first, again = (attention(q, k, v, spec, rng=rng, backend="reference") for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, attention(q, k, v, spec, backend="reference"))
    torch.manual_seed(1)
    one = attention(q, k, v, spec, backend="reference")
    torch.manual_seed(1)
    assert torch.equal(one, attention(q, k, v, spec, backend="reference"))


def test_resolve_backend_gives_a_reason():
    name, why = resolve_backend("auto", device="cpu", dtype=torch.float32, head_dim=64)
    assert name == "sdpa"
    assert "no NVIDIA GPU" in why
    name, why = resolve_backend("auto", device="cpu", dtype=torch.float32, head_dim=64, spec=AttentionSpec(softcap=5.0))
    assert name == "reference"
    assert "softcap" in why


BAD_SPECS = [
    ({"dropout": 1.5}, "dropout=1.5"),
    ({"dropout": 1.0}, "dropout=1.0"),
    ({"dropout": -0.1}, "dropout=-0.1"),
    ({"dropout": 0.001}, "steps of 1/256"),
    ({"dropout": 0.9999}, "steps of 1/256"),
    ({"scale": 0.0}, "scale=0.0"),
    ({"scale": float("inf")}, "scale=inf"),
    ({"softcap": -1.0}, "softcap=-1.0"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SPECS, ids=[m for _, m in BAD_SPECS])
def test_bad_specs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**fields)
    with pytest.raises(TypeError, match="mask="):
        AttentionSpec(mask="causal")


RULES = "a rule of your own is BlockSparse(pattern), Document(q_ids) or MaskFunction(kernel, twin)"


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        ("causal", "'causal'"),
        (Causal, "Causal"),
        (torch.ones(300, 300, dtype=torch.bool), "Tensor of shape (300, 300)"),
        (
            create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu"),
            "BlockMask of shape (1, 1, 256, 256)",
        ),
    ],
    ids=["name", "class", "tensor", "BlockMask"],
)
def test_what_is_no_mask_is_named_in_one_line(mask, given):
    with pytest.raises(TypeError) as caught:
        AttentionSpec(mask)
    assert str(caught.value) == f"mask={given}: must be a mask such as Full() or Causal(); {RULES}"


def test_a_setting_that_is_a_tensor_is_named_in_one_line():
    with pytest.raises(TypeError, match=r"^scale=Tensor of shape \(300, 300\): must be a number$"):
        AttentionSpec(scale=torch.ones(300, 300))


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout"])
def test_settings_that_are_not_numbers_are_refused(name):
    with pytest.raises(TypeError, match=f"{name}='a': must be a number"):
        AttentionSpec(**{name: "a"})


def test_error_names_backends_that_can_run(monkeypatch):
    """The message names ``flash`` and ``sdpa`` only if they can run the call."""
    call = {"device": "cpu", "dtype": torch.float32, "head_dim": 64}
    monkeypatch.setattr(backends, "flash_unavailable", lambda *_: None)
    monkeypatch.setattr(families, "device_unavailable", lambda *_: "it is no Hopper")
    with pytest.raises(ValueError, match="the sdpa backend .*softcap .*; flash, standard and chunked can"):
        resolve_backend("sdpa", **call, spec=AttentionSpec(softcap=3.0))
    with pytest.raises(ValueError, match="the hopper backend .*; flash, sdpa, standard and chunked can"):
        resolve_backend("hopper", **call)
    with pytest.raises(ValueError, match="the hopper backend .*; flash, standard and chunked can"):
        resolve_backend("hopper", **call, exact=True)


X = torch.randn(1, 8, 4, 16)
P = torch.randn(8, 4, 16)
DROPPED = AttentionSpec(dropout=0.5)
BAD_CALLS = [
    ((P, P, P), {}, ValueError, "must be .batch, seqlen, heads, head_dim.; packed tensors need packing"),
    ((X, X, X), {"packing": pack(8)}, ValueError, "must be .total, heads, head_dim. with packing"),
    ((X, X.half(), X), {}, TypeError, "k is torch.float16"),
    ((X, X[:, :, :3], X[:, :, :3]), {}, ValueError, "q has 4 heads and k 3"),
    ((X[:, :, :0], X, X), {}, ValueError, "q has 0 heads and k 4: q's must be a multiple of k's, and neither 0"),
    ((X[..., :0], X[..., :0], X), {}, ValueError, "q has head_dim 0 and v 16: must be 1 or more"),
    ((X, X, X[:, :4]), {}, ValueError, "k has shape"),
    ((X.int(), X.int(), X.int()), {}, TypeError, "must be a floating-point dtype"),
    ((X, X, X), {"sinks": torch.zeros(3)}, ValueError, r"sinks is torch.float32 of shape .3,.: must be .* .4,."),
    ((X, X, X), {"alibi_slopes": torch.zeros(2, 4)}, ValueError, r"alibi_slopes is .* must be .* .4,. or .1, 4."),
    ((X, X, X), {"alibi_slopes": torch.zeros(4).int()}, ValueError, "alibi_slopes is torch.int32"),
    ((X, X, X), {"spec": AttentionSpec(softcap=3.0), "backend": "sdpa"}, ValueError, "sdpa backend cannot run this"),
    ((X, X, X), {"sinks": torch.zeros(4), "backend": "sdpa"}, ValueError, "no sinks; standard and chunked"),
    ((X, X, X), {"spec": AttentionSpec(Tree([[-1, 0], [-1, 0]]))}, ValueError, "2 trees for 1 sequences"),
    ((X, X[..., :8], X[..., :8]), {}, ValueError, "head_dim 16 and k 8"),
    ((X, X.expand(2, -1, -1, -1), X.expand(2, -1, -1, -1)), {}, ValueError, "q has batch 1 and k 2"),
    ((P, P, P), {"packing": Packing(cu(8).long(), cu(8).long())}, ValueError, "cu_seqlens_q is torch.int64"),
    ((P, P, P), {"packing": Packing(cu(8), cu(4, 4))}, ValueError, "1 entries and cu_seqlens_k 2"),
    ((X, X, X), {"backend": "fastest"}, ValueError, "must be one of auto, flash"),
    (
        (X, X, X),
        {"backend": "flash"},
        ValueError,
        "on cpu; sdpa, standard and chunked can",
    ),
    ((X, X, X), {"backend": "sdpa", "return_lse": True}, ValueError, "cannot run this: it gives no log-sum-exp"),
    ((X, X, X), {"backend": "sdpa", "spec": DROPPED, "rng": RngState(1)}, ValueError, "takes no rng"),
    ((X, X, X), {"spec": Causal()}, TypeError, r"spec is Causal\(\): must be an .*such as AttentionSpec\(Causal\(\)\)"),
    ((X, X, X), {"spec": Causal(), "rng": RngState(1), "return_lse": True}, TypeError, "must be an AttentionSpec"),
    ((X, X, X), {"rng": 5}, TypeError, "rng is 5: must be an RngState"),
    ((X, X, X), {"alibi_slopes": [0.1] * 4}, TypeError, "alibi_slopes is a list: must be a tensor"),
    ((X, X, X), {"sinks": [0.1] * 4}, TypeError, "sinks is a list: must be a tensor"),
    ((P, P, P), {"packing": cu(8)}, TypeError, "packing is a Tensor: must be Packing"),
    ((X.to("meta"),) * 3, {}, ValueError, "q is on the meta device, which holds no values"),
    (([1.0], X, X), {}, TypeError, "q is a list: must be a tensor"),
    ((X, None, X), {}, TypeError, "k is a NoneType: must be a tensor"),
    ((X, X, X.to_sparse()), {}, TypeError, "v has the layout torch.sparse_coo: must be a strided tensor"),
    ((X.to(torch.float8_e5m2),) * 3, {}, TypeError, "q is torch.float8_e5m2: must be .* of 16 bits or more"),
    (
        (X, X, X),
        {"rng": RngState(1, key=2**31 - 7)},
        ValueError,
        r"RngState\(key=2147483641\) with 8 rows: must end at 2\*\*31 or before",
    ),
    (
        (P, P, P),
        {"packing": Packing(cu(8), cu(8)), "rng": RngState(1, entries=EntryOrigins([[0, 0, 0]]))},
        TypeError,
        "EntryOrigins.first is a list: must be an int32 tensor",
    ),
]


@pytest.mark.parametrize(("tensors", "options", "error", "message"), BAD_CALLS, ids=[m for *_, m in BAD_CALLS])
def test_bad_calls_are_refused(tensors, options, error, message):
    with pytest.raises(error, match=message):
        attention(*tensors, **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_autocast_leaves_numbers_that_are_not_floating_point(dtype):
    x = torch.ones(1, 4, 2, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"q is {dtype}: must be a floating"):
        attention(x, x, x)


@pytest.mark.parametrize("value", [-1, 2**31, 1.5])
def test_bad_origins_are_refused(value):
    with pytest.raises(ValueError, match="query="):
        RngState(1, query=value)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "standard", "chunked", "reference"])
@pytest.mark.parametrize("shape, packing", [((0, 30, 4, 16), None), ((0, 4, 16), Packing(cu(0), cu(0)))])
def test_an_empty_batch_has_gradients(backend, shape, packing):
    tensors = qkv(*shape, dtype=torch.float32)
    out = attention(*tensors, CAUSAL, packing=packing, backend=backend)
    assert out.shape == shape
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in tensors)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_states_have_64_bits(value):
    RngState(2**64 - 1), RngState(-(2**63))
    with pytest.raises(ValueError, match=rf"RngState\(seed={value}\): must fit 64 bits"):
        RngState(value)


@pytest.mark.parametrize("value", [1.5, torch.tensor(1.0), torch.tensor(True)])
def test_bad_states_are_refused(value):
    with pytest.raises(ValueError, match="offset=.*: must be an integer, or an int64 scalar"):
        RngState(1, offset=value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["auto", "standard", "chunked", "reference"])
def test_the_log_sum_exp_is_fp32_or_more(backend, dtype):
    tensors = qkv(1, 30, 4, 16, dtype=dtype)
    out, lse = attention(*tensors, CAUSAL, backend=backend, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    lse.sum().backward()
    assert tensors[0].grad.dtype == dtype and tensors[0].grad.abs().max() > 0


MISFITS = [
    ([2, 5, 8], "starts at 2: must start at 0"),
    ([0, 5, 4], "falls from 5 to 4 at entry 1: must never decrease"),
    ([0, 5, 9], "ends at 9 and {side} has 8 rows: must end within them"),
]


@pytest.mark.parametrize("side", "qk")
@pytest.mark.parametrize(("bounds", "message"), MISFITS)
def test_boundaries_that_do_not_fit_are_refused(side, bounds, message):
    misfit, message = torch.tensor(bounds, dtype=torch.int32), f"cu_seqlens_{side} {message.format(side=side)}"
    packing = Packing(misfit, cu(3, 4)) if side == "q" else Packing(cu(3, 4), misfit)
    with pytest.raises(ValueError, match=message):
        packing.check(8, 8)
    for backend in ("auto", "sdpa", "standard", "chunked", "reference"):
        with pytest.raises(ValueError, match=message):
            attention(P, P, P, packing=packing, backend=backend)


def test_check_compares_boundaries_with_rows():
    packing = Packing(cu(3, 0, 4), cu(3, 0, 5))
    packing.check()
    packing.check(7, 8)
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 8 and k has 7 rows"):
        packing.check(rows_k=7)


def test_check_compares_boundaries_with_lengths():
    Packing(cu(3, 4, 0), cu(3, 4, 0), lengths=(3, 4)).check()
    with pytest.raises(ValueError, match=r"cu_seqlens_q has entries of \[3, 4\] rows and lengths is \[4, 3\]: must be"):
        Packing(cu(3, 4), cu(3, 4), lengths=(4, 3)).check()
    Packing(cu(3, 0, 4), cu(3, 0, 4), lengths=(3, 0, 4)).check()
    for lengths in ((3, 4), (0, 3, 4)):  # the index of an entry chooses its slopes and its dropout
        with pytest.raises(
            ValueError, match=r"entries of \[3, 0, 4\] rows .* lengths may leave out empty entries at the"
        ):
            Packing(cu(3, 0, 4), cu(3, 0, 4), lengths=lengths).check()


@pytest.mark.parametrize(
    "name, value",
    [
        ("lengths", (2.0,)),
        ("lengths", (-1, 3)),
        ("lengths", "ab"),
        ("max_seqlen_q", "a"),
        ("max_seqlen_k", -4),
        ("max_seqlen_k", 5.5),
    ],
)
def test_lengths_that_are_no_integers_are_refused(name, value):
    with pytest.raises(TypeError, match=rf"Packing\({name}=.*\): must be"):
        Packing(cu(2), cu(2), **{name: value})


def test_boundaries_without_values_are_not_read():
    """Boundaries on another device (here meta), and fake ones."""
    Packing(cu(9).to("meta"), cu(9).to("meta")).validate(torch.device("meta"), 8, 8)
    with FakeTensorMode():
        x, boundaries = torch.empty(8, 4, 16), torch.empty(3, dtype=torch.int32)
        assert attention(x, x, x, packing=Packing(boundaries, boundaries, lengths=(3, 5))).shape == x.shape


def test_boundaries_must_be_tensors():
    with pytest.raises(TypeError, match=r"Packing\(cu_seqlens_k=8\): must be an int32 tensor"):
        Packing(cu(8), 8)
    with pytest.raises(TypeError, match=r"cu_seqlens_k=\[0, 8.5\]: must be integers, or an int32 tensor"):
        Packing(cu(8), [0, 8.5])


@pytest.mark.parametrize("backend", ["reference", "standard", "chunked"])
def test_gradients_reach_slopes_and_sinks_without_queries(backend):
    q, k, v = (x.detach() for x in qkv(2, 0, 4, 8))
    for name in ("alibi_slopes", "sinks"):
        learned = torch.ones(4, requires_grad=True)
        attention(q, k, v, backend=backend, **{name: learned}).sum().backward()
        assert learned.grad is not None and not learned.grad.any()


@pytest.mark.parametrize("backend", ["reference", "standard", "chunked"])
@pytest.mark.parametrize("shape", [(2, 3, 2, 8), (0, 3, 2, 8)])
def test_the_log_sum_exp_has_gradients_without_pairs(backend, shape):
    q = torch.randn(shape, requires_grad=True)
    k, learned = torch.randn(shape[0], 0, 2, 8), torch.rand(2, requires_grad=True)
    out, lse = attention(q, k, k, alibi_slopes=learned, backend=backend, return_lse=True)
    assert bool((lse == -torch.inf).all())
    (out.sum() + lse.sum()).backward()
    assert not q.grad.any() and not learned.grad.any()
    _, lse = attention(q, k, k, sinks=learned, backend=backend, return_lse=True)
    assert torch.equal(lse, learned[:, None].expand_as(lse))
    lse.sum().backward()
    assert torch.equal(learned.grad, torch.full((2,), float(shape[0] * shape[1])))


@pytest.mark.parametrize("backend", ["standard", "reference"])
@pytest.mark.parametrize("names", ["qqq", "qkk", "qqk"])
def test_one_tensor_in_several_places_compiles(backend, names):
    tensors = {name: torch.randn(1, 4, 2, 8, requires_grad=True) for name in "qk"}
    compiled = torch.compile(
        lambda x, y, z: attention(x, y, z, CAUSAL, backend=backend), fullgraph=True, backend="eager"
    )
    gradients = []
    for run in (compiled, lambda x, y, z: attention(x, y, z, CAUSAL, backend=backend)):
        out = run(*(tensors[name] for name in names)).square().sum()
        gradients.append(torch.autograd.grad(out, [tensors[name] for name in sorted(set(names))]))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_tree_in_a_compiled_program():
    q, parents = torch.randn(1, 4, 2, 8), torch.tensor([-1, 0, 0, 1])

    def run(q, parents):
        return attention(q, q, q, AttentionSpec(Tree(parents)), backend="reference")

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(q, parents), run(q, parents))


@pytest.mark.parametrize("backend", ["reference", "standard", "chunked", "sdpa"])
def test_tensors_of_inference_mode(backend):
    with torch.inference_mode():
        q, k, v = (x.detach() for x in qkv(1, 8, 2, 8))
    assert attention(q, k, v, CAUSAL, backend=backend).shape == q.shape
