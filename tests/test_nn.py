"""`MultiheadAttention` gives the results of PyTorch's, whose weights it loads."""

import pytest
import torch
from torch import nn

from flash_train import nn as ours
from flash_train.nn import MultiheadAttention

CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)


def pair(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, **options)
    own = MultiheadAttention(32, 4, **options)
    assert own.state_dict().keys() == theirs.state_dict().keys()
    own.load_state_dict(theirs.state_dict())
    return own, theirs


def same(own, theirs, *inputs, **options):
    """Compare outputs, and gradients of all inputs and weights."""
    results = []
    for module in (own, theirs):
        module.zero_grad()
        given = [x.clone().requires_grad_() for x in inputs]
        out, weights = module(*given, **options)
        (out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, weights, *(x.grad for x in given), *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["full", "causal", "padding", "causal padding", "mask", "weights", "cross"])
def test_results_and_gradients(batch_first, bias, kind):
    own, theirs = pair(batch_first=batch_first, bias=bias)
    x = torch.randn(3, 9, 32)
    key = torch.randn(3, 7, 32) if kind == "cross" else x
    inputs = [t if batch_first else t.transpose(0, 1) for t in (x, key, key)]
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = padding[2, :3] = True
    options = {
        "full": {}, "cross": {}, "causal": {"attn_mask": CAUSAL, "is_causal": True},
        "padding": {"key_padding_mask": padding}, "mask": {"attn_mask": torch.randn(9, 9)},
        "causal padding": {"key_padding_mask": padding[:2].repeat(2, 1)[:3] & False, "attn_mask": CAUSAL},
        "weights": {"need_weights": True},
    }[kind]  # fmt: skip
    same(own, theirs, *inputs, **{"need_weights": False, **options})


@pytest.mark.parametrize("options", [{"kdim": 12, "vdim": 20}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_other_projections(options):
    own, theirs = pair(batch_first=True, **options)
    sizes = (32, options.get("kdim", 32), options.get("vdim", 32))
    same(own, theirs, *(torch.randn(2, 9, size) for size in sizes), need_weights=False)


def test_without_a_batch():
    same(*pair(), *(torch.randn(9, 32) for _ in range(3)), need_weights=False)
    ignored = torch.tensor([False] * 6 + [True] * 3)
    same(*pair(), *(torch.randn(9, 32) for _ in range(3)), need_weights=False, key_padding_mask=ignored)


def test_the_operator_runs_what_needs_no_matrix(monkeypatch):
    calls = []
    plain = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *a, **o: calls.append(a[3]) or plain(*a, **o))
    own, _ = pair(batch_first=True, dropout=0.1)
    x = torch.randn(2, 9, 32)
    own(x, x, x, need_weights=False)
    own(x, x, x, need_weights=False, attn_mask=CAUSAL, is_causal=True)
    own.eval()(x, x, x, need_weights=False, key_padding_mask=torch.zeros(2, 9, dtype=torch.bool))
    assert [(type(spec.mask).__name__, spec.dropout) for spec in calls] == [("Full", 0.1), ("Causal", 0.1), ("Full", 0)]
    own(x, x, x)
    assert len(calls) == 3
    same(*pair(batch_first=True), x, x, x, need_weights=False, key_padding_mask=torch.randn(2, 9))
    assert len(calls) == 3  # any numbers: added to the logits, by PyTorch


def test_an_encoder_layer_with_padding_runs_the_operator(monkeypatch):
    """It passes the mask on in floating point."""
    calls = []
    plain = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *a, **o: calls.append(o["packing"]) or plain(*a, **o))
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    layer.self_attn = MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = True
    layer(torch.randn(3, 9, 32), src_key_padding_mask=padding)
    assert [packing.cu_seqlens_k.tolist() for packing in calls] == [[0, 9, 14, 23]]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_transformer_encoder_layer_uses_it(mode):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    own = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    own.self_attn = MultiheadAttention(32, 4, dropout=0.0, batch_first=True)
    own.load_state_dict(theirs.state_dict())
    x, padding = torch.randn(3, 9, 32), torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = True
    for options in ({}, {"src_key_padding_mask": padding}, {"src_mask": CAUSAL, "is_causal": True}):
        found, expected = (getattr(layer, mode)()(x, **options) for layer in (own, theirs))
        torch.testing.assert_close(found[:1], expected[:1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1, :5], expected[1, :5], rtol=1e-4, atol=1e-5)


PADDING = torch.zeros(3, 9, dtype=torch.bool)
PADDING[1, 5:] = True


def test_padding_in_compiled_programs_and_transforms():
    own, _ = pair(batch_first=True)
    x = torch.randn(3, 9, 32)

    def run(x):
        return own(x, x, x, key_padding_mask=PADDING, need_weights=False)[0]

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    layer.self_attn = own
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, src_key_padding_mask=PADDING), layer(x, src_key_padding_mask=PADDING))
    own.backend = "reference"
    out, tangent = torch.func.jvp(run, (x,), (x,))
    torch.testing.assert_close(out, run(x))
    step = 1e-3
    torch.testing.assert_close(tangent, (run(x * (1 + step)) - run(x * (1 - step))) / (2 * step), rtol=1e-2, atol=1e-3)


def test_no_queries_or_no_batch_with_padding():
    own, theirs = pair(batch_first=True)
    x = torch.randn(3, 9, 32)
    options = {"key_padding_mask": PADDING, "need_weights": False}
    assert own(x[:, :0], x, x, **options)[0].shape == theirs(x[:, :0], x, x, **options)[0].shape == (3, 0, 32)
    assert own(x[:0], x[:0], x[:0], key_padding_mask=PADDING[:0], need_weights=False)[0].shape == (0, 9, 32)


def test_nested_tensors_run_in_pytorch():
    own, theirs = (module.eval() for module in pair(batch_first=True))
    x = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)])
    with torch.no_grad():
        found, expected = (module(x, x, x, need_weights=False)[0] for module in (own, theirs))
    torch.testing.assert_close(found.to_padded_tensor(0.0), expected.to_padded_tensor(0.0))


def test_mistakes():
    own, _ = pair()
    y = torch.randn(9, 2, 32)
    for inputs, padding, says in (
        ((y, y, y), torch.zeros(9, 2, dtype=torch.bool), r"key_padding_mask has shape \(9, 2\): must be \(2, 9\)"),
        ((y[None], y, y), None, r"query has shape \(1, 9, 2, 32\): must have two or three dimensions, the last 32"),
        ((y, y, y[..., :8]), None, r"value has shape \(9, 2, 8\): must have two or three dimensions, the last 32"),
        ((y[0], y, y), None, "key has 3 dimensions and query 2: must be equal"),
    ):
        with pytest.raises(ValueError, match=says):
            own(*inputs, key_padding_mask=padding, need_weights=False)
    with pytest.raises(ValueError, match="dropout=0.001: attention dropout comes in steps of 1/256"):
        MultiheadAttention(32, 4, dropout=0.001)
    x = torch.randn(9, 2, 32)
    with pytest.raises(ValueError, match="is_causal=True without attn_mask"):
        own(x, x, x, need_weights=False, is_causal=True)
    with pytest.raises(ValueError, match="backend='fast': must be one of"):
        MultiheadAttention(32, 4, backend="fast")
