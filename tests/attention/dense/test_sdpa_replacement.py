"""Programs that replace PyTorch's attention by this operator, and tensors in the layout of PyTorch's attention."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from flash_train.attention import AttentionSpec, Causal, Full, attention


def replacement(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    """A typical replacement, which transposes because the layouts differ."""
    spec = AttentionSpec(Causal() if is_causal else Full(), dropout=dropout_p)
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), spec).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_function_replaced_by_ours(monkeypatch, causal):
    """On a CPU ``auto`` runs PyTorch's attention: it must call the original, not the replacement."""
    q, k, v = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    ours = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(ours, right)
    compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal), backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), right)


def test_a_pytorch_module_runs_our_operator(monkeypatch):
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    right, _ = layer(x, x, x, need_weights=False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], right)


def test_error_for_transposed_tensors_names_the_other_layout():
    q, k = torch.randn(1, 8, 50, 16), torch.randn(1, 2, 33, 16)
    with pytest.raises(
        ValueError, match="q has 50 heads and k 33: .*as for scaled_dot_product_attention, needs transp"
    ):
        attention(q, k, k)
    with pytest.raises(ValueError, match="q has 50 heads and k 33: q's must be a multiple of k's, and neither 0$"):
        attention(q[:, :7], k, k)


def test_more_heads_than_any_model_has():
    x = torch.randn(1, 4, 300, 16)
    with pytest.warns(
        UserWarning, match=r"q has 300 heads and 4 rows: the layout is \(batch, seqlen, heads, head_dim\)"
    ):
        attention(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*(x.transpose(1, 2),) * 3)
        decoding = torch.randn(1, 1, 128, 16)
        attention(decoding, decoding, decoding)
