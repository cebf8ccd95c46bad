"""The contract on a GPU, and tests that need a GPU."""

import contextlib
from dataclasses import replace

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Full,
    Packing,
    RngState,
    Tree,
    Window,
    attention,
    keep_mask,
)
from tests.support.attention import fuzz
from tests.support.attention.cases.named import BY_NAME, KEPT, in_dtypes, on_card
from tests.support.attention.contract import run

pytestmark = pytest.mark.gpu

FP32 = (
    "causal",
    "gqa",
    "packed-cross",
    "narrower-values",
    "window",
    "everything",
    "dropout-unaligned-shard",
    "softcap",
)
# PyTorch's own gradients of slopes overflow in fp16 at these lengths
CARD = [
    *(case for case in in_dtypes((torch.bfloat16, torch.float16)) if not (case.slopes and case.dtype == torch.float16)),
    *in_dtypes((torch.float32,), FP32),
]


@pytest.mark.parametrize("case", [*map(on_card, CARD), *KEPT], ids=str)
def test_contract(case):
    errors = run(case, "triton", "cuda")
    assert {"out", "dq", "dk", "dv"} <= {e.tensor for e in errors}
    assert all(e.ok for e in errors), errors


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_head_dims(head_dim, dropout):
    case = replace(on_card(BY_NAME["causal"]), head_dim=head_dim, dropout=dropout, dtype=torch.bfloat16)
    errors = run(case, "triton", "cuda")
    assert all(e.ok for e in errors), errors


def test_flash_fulfils_the_contract():
    """``flash`` with the kernels that it selects on this GPU."""
    for name in ("causal", "full", "packed-gqa-dropout", "gqa", "dropout"):
        errors = run(replace(on_card(BY_NAME[name]), dtype=torch.bfloat16), "flash", "cuda")
        assert all(e.ok for e in errors), (name, errors)


@pytest.mark.parametrize("group", range(4))
def test_random_cases_fulfil_the_contract(group):
    """A few draws of some variants. ``tests.support.attention.fuzz --device cuda --draws 20000`` runs more."""
    first = 100 * (1000 + group)
    for number in range(first, first + 5):
        subject = fuzz.Subject(0, "cuda")
        assert not fuzz.judge(subject, number), fuzz.draw(subject, number).source


def test_mask_is_the_reference_mask():
    """With q = 0 and V = I the output is the scaled dropout mask."""
    n, spec = 128, AttentionSpec(dropout=0.3)
    rng = RngState(11, 3)
    q = torch.zeros(2, n, 3, n, device="cuda", dtype=torch.float16)
    v = torch.eye(n, device="cuda", dtype=torch.float16)[None, :, None].expand(2, n, 3, n)
    out = attention(q, q, v, spec, rng=rng, backend="triton")
    state, rows = rng.as_tensor(q.device), torch.arange(n)
    for entry in range(2):
        for head in range(3):
            assert torch.equal(out[entry, :, head] > 0, keep_mask(state, entry, head, rows, rows, spec.keep_threshold))


def random_tensors(*rows, heads=8, kv_heads=2, head_dim=128):
    return [
        torch.randn(*rows, h, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    ]


def boundaries(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "spec", [AttentionSpec(Causal()), AttentionSpec(Window(300, 0), dropout=0.1)], ids=["plain", "window-dropout"]
)
def test_gradients_repeat_bitwise(spec):
    torch.manual_seed(0)
    lengths = torch.randint(1, 900, (12,)).tolist()
    cu = boundaries(*lengths)
    leaves = random_tensors(sum(lengths))
    slopes, sinks = (torch.rand(8, device="cuda", requires_grad=True) for _ in "ab")
    rng, dout = RngState(1), torch.randn_like(leaves[0])

    def gradients():
        out = attention(
            *leaves, spec, packing=Packing(cu, cu), rng=rng, alibi_slopes=slopes, sinks=sinks, backend="triton"
        )
        return (out.detach(), *torch.autograd.grad(out, (*leaves, slopes, sinks), dout))

    with deterministic():
        first = gradients()
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_more_entries_than_the_second_grid_axis_allows():
    """The limit is 65,535; the last entries give the same result as alone."""
    q, k, v, dout = (torch.randn(70_000, 5, 1, 16, device="cuda", dtype=torch.float16) for _ in range(4))

    def gradients(*tensors, do):
        tensors = [x.clone().requires_grad_() for x in tensors]
        out = attention(*tensors, AttentionSpec(Causal()), backend="triton")
        return out, *torch.autograd.grad(out, tensors, do)

    for whole, last in zip(gradients(q, k, v, do=dout), gradients(q[-9:], k[-9:], v[-9:], do=dout[-9:]), strict=True):
        assert torch.equal(whole[-9:], last) and last.abs().max() > 0


def test_more_than_2_to_the_31_elements():
    n, heads, d = 131_072, 140, 128  # 2.35e9 elements a tensor
    q = torch.randn(n, heads, d, device="cuda", dtype=torch.bfloat16)
    cu = torch.arange(0, n + 1, 512, dtype=torch.int32, device="cuda")
    out = attention(q, q, q, AttentionSpec(Causal()), packing=Packing(cu, cu), backend="triton")
    last = q[-512:, -2:]
    ref = attention(
        last[None].float(), last[None].float(), last[None].float(), AttentionSpec(Causal()), backend="reference"
    )
    assert (out[-512:, -2:].float() - ref[0]).abs().max() < 0.03


def padded_call(spec, **options):
    q, k, v = random_tensors(2, 700)
    return lambda: attention(q, k, v, spec(), backend="triton", **options).sum().backward()


def packed_call(spec, **options):
    q, k, v = random_tensors(900)
    cu = boundaries(400, 0, 333)
    packing = Packing(cu, cu)
    return lambda: attention(q, k, v, spec(), packing=packing, backend="triton", **options).sum().backward()


def _ids(*shape):
    return torch.randint(0, 5, shape, device="cuda").sort(-1)[0].int()


CALLS = {
    "padded": lambda: padded_call(lambda: AttentionSpec(Causal())),
    "packed": lambda: packed_call(lambda: AttentionSpec(Causal())),
    "window": lambda: packed_call(lambda: AttentionSpec(Window(100, 5), softcap=3.0)),
    "dropout": lambda: padded_call(lambda: AttentionSpec(Causal(), dropout=0.1)),
    "dropout-state": lambda: packed_call(
        lambda: AttentionSpec(Causal(), dropout=0.1), rng=RngState(torch.tensor(3, device="cuda"), 1)
    ),
    "documents": lambda: _with_ids(padded_call, 2, 700),
    "documents-packed": lambda: _with_ids(packed_call, 900),
    "blocks": lambda: _with_blocks(128),
    "blocks-as-a-term": lambda: _with_blocks(100),
    "tree": lambda: _with_tree(),
    "scores": lambda: packed_call(
        lambda: AttentionSpec(Causal()),
        alibi_slopes=torch.rand(3, 8, device="cuda", requires_grad=True),
        sinks=torch.rand(8, device="cuda", requires_grad=True),
    ),
}


def _with_ids(call, *shape):
    ids = _ids(*shape)
    return call(lambda: AttentionSpec(Causal() & Document(ids)))


def _with_blocks(size):
    pattern = torch.rand(8, 7, 7, device="cuda") < 0.5
    return padded_call(lambda: AttentionSpec(Causal() & BlockSparse(pattern, size)))


def _with_tree():
    parents = torch.tensor([-1, 0, 0, 1, 1, 2], device="cuda")
    return padded_call(lambda: AttentionSpec(Full() & Tree(parents)))


@pytest.mark.parametrize("name", CALLS)
def test_calls_do_not_synchronise(name):
    """Forward and backward, including the construction of the mask."""
    call = CALLS[name]()
    call()  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_check_detects_a_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_stream():
    """The kernels run on the current stream, after earlier work there, and do not block other streams."""
    q, k, v = (x.detach() for x in random_tensors(1, 2048))
    expected = attention(q, k, v, AttentionSpec(Causal()), backend="triton")
    torch.cuda.synchronize()
    stream, late = torch.cuda.Stream(), torch.zeros_like(q)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 30 ms: a launch on the default stream would read zeros
        late.copy_(q)
        late.requires_grad_()
        out = attention(late, k, v, AttentionSpec(Causal()), backend="triton")
        out.sum().backward()
    stream.synchronize()
    assert torch.equal(out, expected)
    assert late.grad.isfinite().all() and late.grad.abs().sum() > 0


def test_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    leaves = random_tensors(1, 300)
    for device in ("cuda:0", "cuda:1"):
        assert torch.cuda.current_device() == 0
        moved = [x.detach().to(device).requires_grad_() for x in leaves]
        ids = (torch.arange(300) // 70).int().to(device)
        spec = AttentionSpec(Causal() & Document(ids), dropout=0.2)
        out = attention(*moved, spec, rng=RngState(5), backend="triton")
        assert str(out.device) == device
        results.append([out.cpu(), *(x.cpu() for x in torch.autograd.grad(out.square().sum(), moved))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.cuda.current_device() == 0


def test_graph_replay_draws_a_new_mask():
    """With q = 0 and V = I the output is the mask, and the gradient of V is the mask that the backward used."""
    n = 128
    q = torch.zeros(1, n, 1, n, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(n, device="cuda", dtype=torch.bfloat16)[None, :, None].clone().requires_grad_()
    spec, dout = AttentionSpec(dropout=0.5), v.detach().clone()

    def step():
        out = attention(q, q, v, spec, backend="triton")
        return out, torch.autograd.grad(out, v, dout)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    masks = []
    for _ in range(3):
        graph.replay()
        kept = out[0, :, 0] > 0
        assert torch.equal(dv[0, :, 0].t() > 0, kept)
        assert 0.4 < kept.float().mean() < 0.6
        masks.append(kept)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("mask", [None, BlockSparse, Document], ids=["causal", "blocks", "documents"])
def test_compiles_with_inductor(mask):
    q, k, v = random_tensors(1, 256, heads=4, kv_heads=4, head_dim=64)
    rng, dout = RngState(4), torch.randn_like(q)
    given = torch.arange(256, device=q.device).int() // 40 if mask is Document else torch.eye(2, device=q.device).bool()

    def call(q, k, v, given):
        rule = Causal() if mask is None else Causal() & mask(given)
        return attention(q, k, v, AttentionSpec(rule, dropout=0.2), rng=rng, backend="triton")

    eager = torch.autograd.grad(call(q, k, v, given), (q, k, v), dout)
    compiled = torch.autograd.grad(torch.compile(call, fullgraph=True)(q, k, v, given), (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
