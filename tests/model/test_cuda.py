"""On the card: the fused operations compared with fp64 and with PyTorch in the same precision; and their limits.

The rule: the error against fp64 is at most 2 times the error of PyTorch in the same precision, for gradients 3 times,
plus one rounding of the dtype at the result's largest magnitude, since PyTorch may happen to be exact.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train.model import ModelConfig, Transformer, ops
from flash_train.model.rope import rope_tables
from tests.support.model.tiny import packing_of, positions_of, random_batch, tiny_config, tiny_model

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def results(function, inputs, grads_of, upstream) -> list[torch.Tensor]:
    """Outputs and gradients of `function` on copies of `inputs`, in fp64."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    # Rotary overwrites its inputs, which leaves may not be.
    outs = function(*(x * 1 for x in inputs))
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [g.to(o.dtype).clone() for o, g in zip(outs, upstream, strict=True)])
    return [o.detach().double() for o in outs], [inputs[i].grad.double() for i in grads_of]


def check(fused, plain, inputs, upstream) -> None:
    everything = range(len(inputs))
    exact = results(plain, [x.double() for x in inputs], everything, upstream)
    got, peer = (results(f, inputs, everything, upstream) for f in (fused, plain))
    dtype = inputs[0].dtype
    for factor, ours, theirs, reference in zip((2, 3), got, peer, exact, strict=True):
        for a, b, r in zip(ours, theirs, reference, strict=True):
            allowed = factor * (b - r).abs().max() + torch.finfo(dtype).eps * r.abs().max()
            assert (a - r).abs().max() <= allowed


def plain_norm(x, weight, eps=1e-5):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (scaled * weight).to(x.dtype)


def plain_rotary(q, k, cos, sin):
    def rotate(x):
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)

    return rotate(q), rotate(k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1000, 2048), (333, 768), (999, 16, 128), (40_000, 4, 32)])
def test_rms_norm(shape, dtype):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1).abs() + 0.5
    check(lambda x, w: ops.rms_norm(x, w, 1e-5), plain_norm, (x, weight), (draw(*shape, dtype=dtype, seed=2),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1000, 2048), (37, 8192), (333, 768), (999, 16, 128), (2, 20_000)])
@pytest.mark.parametrize(("added", "uses"), [(True, 2), (False, 3), (True, 1)])
def test_add_rms_norm(shape, dtype, added, uses):
    x, update, *upstream = (draw(*shape, dtype=dtype, seed=seed) for seed in range(6))
    weight = draw(shape[-1], dtype=dtype, seed=7).abs() + 0.5

    def plain(x, weight, update=None):
        x = x if update is None else x + update
        return x * 1, *[plain_norm(x, weight)] * uses

    inputs = (x, weight, update) if added else (x, weight)
    check(lambda x, w, u=None: ops.add_rms_norm(x, u, w, 1e-5, uses), plain, inputs, upstream[: 1 + uses])


def test_either_result_of_add_rms_norm_may_be_unused():
    x, update = (draw(64, 256, dtype=torch.float32, seed=seed).requires_grad_() for seed in (0, 1))
    weight = torch.ones(256, device="cuda").requires_grad_()
    stream, _, normed = ops.add_rms_norm(x, update, weight, 1e-5, 2)
    (given,) = torch.autograd.grad(stream, x, torch.ones_like(x), retain_graph=True)
    assert torch.equal(given, torch.ones_like(x))
    got = torch.autograd.grad(normed, (x, update, weight), torch.ones_like(x))
    exact = torch.autograd.grad(
        plain_norm((x + update).double(), weight), (x, update, weight), torch.ones_like(x).double()
    )
    for ours, reference in zip(got, exact, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_rms_norm_does_not_change_its_upstream_gradient_and_mixes_dtypes():
    x, weight = draw(64, 256, dtype=torch.bfloat16).requires_grad_(), torch.ones(256, device="cuda").requires_grad_()
    upstream = draw(64, 256, dtype=torch.bfloat16, seed=3)
    before = upstream.clone()
    out = ops.rms_norm(x, weight, 1e-5)
    out.backward(upstream)
    assert out.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    assert torch.equal(upstream, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [352, 5632])
def test_swiglu_linear(width, dtype):
    gate, up = draw(500, width, dtype=dtype), draw(500, width, dtype=dtype, seed=1)
    weight = draw(200, width, dtype=dtype, seed=2) / width**0.5
    upstream = (draw(500, 200, dtype=dtype, seed=3),)
    check(ops.swiglu_linear, lambda g, u, w: F.linear(F.silu(g) * u, w), (gate, up, weight), upstream)


def test_swiglu_linear_keeps_no_product_and_runs_backward_once():
    gate, up = (draw(512, 4096, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (0, 1))
    weight = draw(64, 4096, dtype=torch.bfloat16, seed=2).requires_grad_()
    inputs = gate * 1, up * 1
    ops.swiglu_linear(*inputs, weight)  # the first matrix product takes a workspace
    before = torch.cuda.memory_allocated()
    out = ops.swiglu_linear(*inputs, weight)
    assert torch.cuda.memory_allocated() - before == out.numel() * 2
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (2, 1, 32), (3, 1, 80)])
def test_rotary_with_positions_that_restart(n_heads, n_kv_heads, head_dim, dtype):
    lengths = (300, 1, 77, 134)
    total = sum(lengths)
    positions = positions_of(lengths, (total,), "cuda")
    cos, sin = rope_tables(tiny_config(head_dim=head_dim, n_heads=n_heads, n_kv_heads=n_kv_heads), positions)
    q, k = draw(total, n_heads, head_dim, dtype=dtype), draw(total, n_kv_heads, head_dim, dtype=dtype, seed=1)
    upstream = (torch.randn_like(q), torch.randn_like(k))
    check(lambda q, k: ops.apply_rotary(q, k, cos, sin), lambda q, k: plain_rotary(q, k, cos, sin), (q, k), upstream)


def plain_loss(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=ops.IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "vocab_size"), [(100, 64, 320), (9000, 128, 64), (5000, 256, 32_768)])
def test_linear_cross_entropy_with_an_upstream_gradient_other_than_one(tokens, width, vocab_size, dtype):
    hidden, weight = draw(tokens, width, dtype=dtype), draw(vocab_size, width, dtype=dtype, seed=1) / width**0.5
    labels = torch.randint(vocab_size, (tokens,), device="cuda")
    labels[::7] = ops.IGNORE_INDEX
    upstream = (torch.tensor(3.0 / tokens, device="cuda"),)
    check(
        lambda h, w: ops.linear_cross_entropy(h, w, labels),
        lambda h, w: plain_loss(h, w, labels),
        (hidden, weight),
        upstream,
    )
    loss = ops.linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32 and loss.dim() == 0


def test_linear_cross_entropy_under_autocast_and_with_either_input_frozen():
    hidden, weight = draw(3000, 256, dtype=torch.float32), draw(4096, 256, dtype=torch.float32, seed=1) / 16
    labels = torch.randint(4096, (3000,), device="cuda")
    grads = {}
    for trained in ("both", "hidden", "weight"):
        h = hidden.clone().requires_grad_(trained != "weight")
        w = weight.clone().requires_grad_(trained != "hidden")
        with torch.autocast("cuda", torch.bfloat16):
            loss = ops.linear_cross_entropy(h, w, labels)
        (loss / 3000).backward()
        grads[trained] = (h.grad, w.grad)
    assert grads["both"][0].dtype == grads["both"][1].dtype == torch.float32
    assert torch.equal(grads["both"][0], grads["hidden"][0]) and grads["hidden"][1] is None
    assert torch.equal(grads["both"][1], grads["weight"][1]) and grads["weight"][0] is None
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    (plain_loss(*exact, labels) / 3000).backward()
    for got, reference in zip(grads["both"], exact, strict=True):
        assert (got - reference.grad).norm() <= 2e-2 * reference.grad.norm()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(ops.linear_cross_entropy(hidden, weight, labels), loss)


def test_second_backward_through_the_loss_raises():
    hidden, weight = (
        draw(64, 32, dtype=torch.float32).requires_grad_(),
        draw(96, 32, dtype=torch.float32).requires_grad_(),
    )
    loss = ops.linear_cross_entropy(hidden, weight, torch.zeros(64, dtype=torch.int64, device="cuda")) * 2
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LENGTHS = (700, 1, 323, 1024)
SHAPE = (2, 1024)


def on_card(model_dtype=torch.float32, autocast=None, **options):
    """Logits and gradients of a small model, in fp64."""
    model = tiny_model(**({"width": 128, "head_dim": 32, "n_layers": 3} | options)).to("cuda", model_dtype)
    tokens, labels = (t.cuda() for t in random_batch(SHAPE, 96))
    arguments = {"positions": positions_of(LENGTHS, SHAPE, "cuda"), "packing": packing_of(LENGTHS, device="cuda")}
    torch.manual_seed(3)
    with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
        logits = model.eval()(tokens, **arguments).detach().double()
        loss, count = model.train().loss(tokens, labels, **arguments)
    (loss / count).backward()
    return logits, torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_fused_model_is_as_accurate_as_plain_pytorch(dtype, autocast, qk_norm, monkeypatch):
    assert torch.get_float32_matmul_precision() == "highest"  # no TF32
    fused = on_card(dtype, autocast, qk_norm=qk_norm)
    exact = on_card(torch.float64, qk_norm=qk_norm, attention="standard")
    monkeypatch.setattr(ops, "_kernels_run", lambda x: False)
    monkeypatch.setattr(ops, "_fused_linear_cross_entropy", plain_loss)
    plain = on_card(dtype, autocast, qk_norm=qk_norm)
    for factor, got, peer, reference in zip((2, 3), fused, plain, exact, strict=True):
        assert (got - reference).norm() <= factor * (peer - reference).norm()
        assert (got - reference).abs().max() <= 1.5 * factor * (peer - reference).abs().max()  # one outlier's luck


@pytest.mark.parametrize("attention", ["flash", "sdpa", "standard", "chunked"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("memory", ["selective", "checkpoint"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_modes_have_the_gradients_of_memory_none(memory, dropout, autocast, attention):
    """The MLP overwrites saved tensors. The recomputation must not read them, and must draw the same random numbers."""
    options = {
        "attention": attention,
        "attention_dropout": dropout,
        "residual_dropout": dropout,
        "model_dtype": torch.float32 if autocast else torch.bfloat16,
        "autocast": autocast,
    }
    torch.use_deterministic_algorithms(attention == "flash", warn_only=True)  # Hopper's add up dQ in any order, else
    try:
        (_, kept), (_, got) = on_card(**options), on_card(memory=memory, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    if attention == "flash":
        assert torch.equal(got, kept)
    else:  # PyTorch's fused backward adds in any order: roundings to bf16 may fall the other way
        assert (got - kept).norm() <= torch.finfo(torch.bfloat16).eps * kept.norm()


@pytest.mark.parametrize(("memory", "runs"), [("none", 1), ("selective", 1), ("checkpoint", 2)])
def test_number_of_runs_of_the_flash_kernel_by_memory_mode(memory, runs):
    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Calls.count += func.name() == "flash_train::attention_forward"
            return func(*args, **(kwargs or {}))

    model = tiny_model(attention="flash", memory=memory).to("cuda", torch.bfloat16)
    tokens, labels = (t.cuda() for t in random_batch(SHAPE, 96))
    with Calls():
        model.loss(tokens, labels, packing=packing_of(LENGTHS, device="cuda"))[0].backward()
    assert Calls.count == runs * model.config.n_layers


@pytest.mark.parametrize("vocab_size", [320, 32_768])
@pytest.mark.parametrize("autocast", [False, True])
def test_full_logits_are_never_allocated(vocab_size, autocast):
    """Checks the shapes of all operator results and, if the logits are large enough to show, the allocated memory."""
    tokens_count, shapes = 16_384, set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            shapes.update(tuple(t.shape) for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t))
            return out

    config = ModelConfig(
        vocab_size=vocab_size, n_layers=1, width=512, n_heads=4, n_kv_heads=4, head_dim=128, mlp_width=512
    )
    with torch.device("cuda"):
        model = Transformer(config, attention="sdpa").to(torch.float32 if autocast else torch.bfloat16)
    tokens = torch.randint(vocab_size, (1, tokens_count), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Shapes(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        model.loss(tokens, tokens)[0].backward()
    assert max(rows for rows, *columns in (s for s in shapes if s) if columns == [vocab_size]) <= 4096
    if vocab_size == 32_768:
        assert torch.cuda.max_memory_allocated() - before < tokens_count * vocab_size * 2  # bf16 logits alone


def test_loss_and_backward_do_not_wait_for_the_device():
    """In a packed step through flash."""
    model = tiny_model(attention="flash", memory="none").to("cuda", torch.bfloat16)
    tokens, labels = (t.cuda() for t in random_batch(SHAPE, 96))
    packing, positions = packing_of(LENGTHS, device="cuda"), positions_of(LENGTHS, SHAPE, "cuda")
    model.loss(tokens, labels, positions=positions, packing=packing)[0].backward()  # compile the kernels
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.loss(tokens, labels, positions=positions, packing=packing)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_changing_a_document_leaves_the_logits_of_the_others_bitwise_equal(attention):
    model = tiny_model(attention=attention).to("cuda", torch.bfloat16).eval()
    tokens = random_batch(SHAPE, 96)[0].cuda()
    changed = tokens.clone().view(-1)
    changed[701:1024] = (changed[701:1024] + 7) % 96
    with torch.no_grad():
        packing = packing_of(LENGTHS, device="cuda")
        before, after = (model(t.view(SHAPE), packing=packing).flatten(0, 1) for t in (tokens, changed))
    assert torch.equal(before[:701], after[:701]) and torch.equal(before[1024:], after[1024:])
    assert not torch.equal(before[701:1024], after[701:1024])


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_compiled_block_is_as_accurate_as_the_plain_one(attention):
    """Against fp32: both round to bf16, in different places."""
    model = tiny_model(attention=attention, width=128, head_dim=32).to("cuda", torch.bfloat16)
    x = draw(2048, 128, dtype=torch.bfloat16)
    tables = rope_tables(model.config, positions_of(LENGTHS, (2048,), "cuda"))
    rest = (*tables, packing_of(LENGTHS, device="cuda"), 2)
    plain = model.blocks[0](x, *rest).float()
    compiled = torch.compile(model.blocks[0], fullgraph=attention == "flash")(x, *rest).float()
    exact = model.blocks[0].float()(x.float(), *rest)
    assert (compiled - exact).norm() <= 1.5 * (plain - exact).norm()
    assert (plain - exact).norm() <= 0.02 * exact.norm()
