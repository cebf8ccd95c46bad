"""The contract on the card, and what only a card can show."""

from dataclasses import replace

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, Packing, RngState, attention, keep_mask
from tests.attention.contract import CASES, on_card, run

pytestmark = pytest.mark.gpu

CARD = [
    replace(on_card(case), dtype=dtype)
    for case in CASES
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if dtype != torch.float32 or case.name in ("causal", "gqa", "packed-cross")
]


@pytest.mark.parametrize("case", CARD, ids=str)
def test_contract(case):
    errors = run(case, "flash", "cuda")
    assert all(e.ok for e in errors), errors


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
def test_head_dims(head_dim):
    for dropout in (0.0, 0.2):
        case = replace(on_card(CASES[0]), head_dim=head_dim, dropout=dropout, dtype=torch.bfloat16)
        errors = run(case, "flash", "cuda")
        assert all(e.ok for e in errors), errors


def test_mask_is_the_reference_mask():
    """With q = 0 and V = I the output is the mask itself, scaled."""
    n, spec = 128, AttentionSpec(dropout=0.3)
    rng = RngState(11, 3)
    q = torch.zeros(2, n, 3, n, device="cuda", dtype=torch.float16)
    v = torch.eye(n, device="cuda", dtype=torch.float16)[None, :, None].expand(2, n, 3, n)
    out = attention(q, q, v, spec, rng=rng, backend="flash")
    state, rows = rng.as_tensor(q.device), torch.arange(n)
    for entry in range(2):
        for head in range(3):
            assert torch.equal(out[entry, :, head] > 0, keep_mask(state, entry, head, rows, rows, spec.keep_threshold))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_repeat_bitwise(dropout):
    torch.manual_seed(0)
    lengths = torch.randint(1, 900, (12,)).tolist()
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    q = torch.randn(sum(lengths), 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(sum(lengths), 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    spec, rng = AttentionSpec(Causal(), dropout=dropout), RngState(1)
    dout = torch.randn_like(q)

    def gradients():
        out = attention(q, k, v, spec, packing=Packing(cu, cu), rng=rng, backend="flash")
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_more_than_2_to_the_31_elements():
    n, heads, d = 131_072, 140, 128  # 2.35e9 elements a tensor
    q = torch.randn(n, heads, d, device="cuda", dtype=torch.bfloat16)
    cu = torch.arange(0, n + 1, 512, dtype=torch.int32, device="cuda")
    out = attention(q, q, q, AttentionSpec(Causal()), packing=Packing(cu, cu), backend="flash")
    last = q[-512:, -2:]
    ref = attention(
        last[None].float(), last[None].float(), last[None].float(), AttentionSpec(Causal()), backend="reference"
    )
    assert (out[-512:, -2:].float() - ref[0]).abs().max() < 0.03


def test_graph_replay_draws_a_new_mask():
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    spec = AttentionSpec(dropout=0.5)
    attention(q, q, q, spec, backend="flash")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, q, q, spec, backend="flash")
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_compiles_fullgraph_with_dropout():
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    spec, rng, dout = AttentionSpec(Causal(), dropout=0.2), RngState(4), torch.randn_like(q)

    def call(q, k, v):
        return attention(q, k, v, spec, rng=rng, backend="flash")

    eager = torch.autograd.grad(call(q, k, v), (q, k, v), dout)
    compiled = torch.autograd.grad(torch.compile(call, fullgraph=True)(q, k, v), (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
