"""Packing and padding: round trips, all return values, and gradients."""

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, attention
from flash_train.attention.flash_attn import (
    flash_attn_varlen_func,
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

#: with a row without tokens, gaps inside a row, and padding on either side
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_unpadding_and_padding_is_the_identity(dtype, trailing):
    hidden = torch.randn(*MASK.shape, *trailing)
    tokens, indices, cu_seqlens, longest, used = unpad_input(hidden, MASK.to(dtype))
    assert torch.equal(tokens, hidden[MASK.bool()])
    assert torch.equal(indices, torch.tensor([0, 1, 2, 11, 13, 14, 19]))
    assert cu_seqlens.tolist() == [0, 3, 3, 6, 7]
    assert used.tolist() == [3, 0, 3, 1]
    assert longest == 3
    assert isinstance(longest, int)
    assert cu_seqlens.dtype == used.dtype == torch.int32
    padded = pad_input(tokens, indices, *MASK.shape)
    visible = MASK.bool().view(*MASK.shape, *(1 for _ in trailing))
    assert torch.equal(padded, torch.where(visible, hidden, 0.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unused_tokens_are_packed_and_not_counted(dtype):
    unused = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    hidden = torch.randn(*MASK.shape, 2)
    tokens, indices, cu_seqlens, longest, used = unpad_input(hidden, MASK.to(dtype), unused.to(dtype))
    assert torch.equal(tokens, hidden[(MASK + unused).bool()])
    assert torch.equal(indices, (MASK + unused).flatten().nonzero()[:, 0])
    assert cu_seqlens.tolist() == [0, 4, 5, 8, 13]
    assert used.tolist() == [3, 0, 3, 1]
    assert longest == 5


def test_empty_batches():
    tokens, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 4), torch.zeros(2, 3))
    assert tokens.shape == (0, 4)
    assert cu_seqlens.tolist() == [0, 0, 0]
    assert longest == 0
    assert torch.equal(pad_input(tokens, indices, 2, 3), torch.zeros(2, 3, 4))
    assert unpad_input(torch.randn(0, 3, 4), torch.zeros(0, 3))[2].tolist() == [0]
    assert used.tolist() == [0, 0]


def test_gradients_pass_through_padding():
    hidden = torch.randn(*MASK.shape, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(hidden)
    tokens, indices, *_ = unpad_input(hidden, MASK)
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, MASK)[0], hidden)
    assert torch.autograd.gradcheck(lambda x: pad_input(x, indices, *MASK.shape), tokens.detach().requires_grad_())
    (grad,) = torch.autograd.grad((pad_input(tokens, indices, *MASK.shape) * weight).sum(), hidden)
    assert torch.equal(grad, torch.where(MASK.bool()[..., None], weight, 0.0))


ROWS = torch.tensor([4, 0, 5])  # distinct, in any order


def test_rows_are_taken_and_put():
    x, values = torch.randn(6, 2, 3), torch.randn(3, 2, 3)
    assert torch.equal(index_first_axis(x, ROWS), x[ROWS])
    put = index_put_first_axis(values, ROWS.int(), 6)
    assert torch.equal(put[ROWS], values) and not put[[1, 2, 3]].any()
    assert torch.equal(index_first_axis(x, torch.tensor([1, 1])), x[[1, 1]])


def test_gradients_of_taken_and_put_rows():
    x, values = (torch.randn(rows, 2, dtype=torch.float64, requires_grad=True) for rows in (6, 3))
    functions = ((lambda x: index_first_axis(x, ROWS), x), (lambda x: index_put_first_axis(x, ROWS, 6), values))
    for function, leaf in functions:
        assert torch.autograd.gradcheck(function, leaf)
        assert torch.autograd.gradgradcheck(function, leaf)
        assert torch.equal(torch.func.grad(lambda x, f=function: f(x).sum())(leaf.detach()).sum(), leaf.new_tensor(6.0))


def test_a_gradient_of_distinct_rows_adds_nothing_up():
    """Adding would take atomics on a GPU."""
    x = torch.randn(6, 2, requires_grad=True)
    with torch.profiler.profile() as profile:
        index_first_axis(x, ROWS).sum().backward()
        unpad_input(x[None], torch.ones(1, 6))[0].sum().backward()
    called = {event.name for event in profile.events()}
    assert "aten::index_copy" in called
    assert not any("index_add" in name or "scatter_add" in name or "index_put" in name for name in called)


def test_taken_rows_compile_to_one_graph():
    x, weight = torch.randn(6, 2, requires_grad=True), torch.randn(3, 2)
    compiled = torch.compile(lambda x: index_first_axis(x, ROWS) * weight, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert torch.equal(x.grad, index_put_first_axis(weight, ROWS, 6))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_with_several_sequences(dtype):
    lengths = torch.tensor(
        [[2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 3, 0, 2, 0, 0], [6, 0, 0, 0, 0, 0]], dtype=dtype
    )
    hidden = torch.randn(4, 6, 2, dtype=torch.float64, requires_grad=True)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    used = torch.arange(6) < torch.tensor([5, 0, 5, 6])[:, None]
    assert torch.equal(tokens, hidden[used])
    assert torch.equal(indices, used.flatten().nonzero()[:, 0])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert longest == 6 and isinstance(longest, int)
    tokens.sum().backward()
    assert torch.equal(hidden.grad, used[..., None].expand(4, 6, 2).double())
    empty = unpad_input_for_concatenated_sequences(hidden, torch.zeros_like(lengths))
    assert (empty[0].shape, empty[2].tolist(), empty[3]) == ((0, 2), [0], 0)


def test_packed_attention_equals_each_row_alone():
    """Padding on the left and on the right; unpad, attend, and pad again."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]])
    q, k, v = (torch.randn(3, 7, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    packed_q, indices, cu_seqlens, longest, _ = unpad_input(q, mask)
    packed_k, packed_v = unpad_input(k, mask)[0], unpad_input(v, mask)[0]
    packed = flash_attn_varlen_func(
        packed_q, packed_k, packed_v, cu_seqlens, cu_seqlens, longest, longest, causal=True, backend="reference"
    )
    out = pad_input(packed, indices, 3, 7)
    for row, tokens in enumerate(mask.bool()):
        alone = attention(*(x[row, None, tokens] for x in (q, k, v)), AttentionSpec(Causal()), backend="reference")
        torch.testing.assert_close(out[row, tokens], alone[0])
        assert (out[row, ~tokens] == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unpad_input(torch.randn(2, 3, 4), torch.ones(3, 2)), r"attention_mask has shape \(3, 2\)"),
        (lambda: unpad_input(torch.randn(2, 3, 4), torch.ones(2, 3), torch.ones(2)), r"unused_mask has shape \(2,\)"),
        (lambda: pad_input(torch.randn(3, 4), torch.arange(2), 1, 4), r"indices have shape \(2,\)"),
        (lambda: index_first_axis(torch.randn(3, 4), torch.zeros(1, 2).long()), r"indices have shape \(1, 2\)"),
        (
            lambda: index_first_axis(torch.randn(3, 4).requires_grad_(), torch.tensor([0, 1, 0])),
            "1 of 3 indices repeat",
        ),
        (
            lambda: unpad_input_for_concatenated_sequences(torch.randn(1, 3, 4), torch.tensor([[2, 2, 0]])),
            "has 4 tokens: must be at most seqlen, 3",
        ),
        (
            lambda: unpad_input_for_concatenated_sequences(torch.randn(1, 3, 4), torch.tensor([[True, True, False]])),
            "attention_mask_in_length is torch.bool of shape",
        ),
    ],
)
def test_bad_shapes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
