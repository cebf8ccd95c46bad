"""NumPy numbers, tensors and lists are accepted wherever a Python number or an int32 tensor is."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Packing,
    RngState,
    Window,
    attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_train.attention.checks import integer, integers
from flash_train.attention.patterns import local_global

PAIRS = {
    "list": [5, 2],
    "tensor": torch.tensor([5, 2]),
    "int32": torch.tensor([5, 2], dtype=torch.int32),
    "numbers of a tensor": (torch.tensor(5), torch.tensor([2])),
    "array": np.array([5, 2]),
    "numbers of an array": (np.int64(5), np.int32(2)),
}


def qkv(*shape):
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(3)]


@pytest.mark.parametrize("name", PAIRS)
def test_windows_accept_any_integer_type(name):
    q, k, v = qkv(1, 20, 2, 8)
    for causal in (False, np.bool_(True), torch.tensor(True), 1):
        right = flash_attn_func(q, k, v, causal=bool(causal), window_size=(5, 2), backend="reference")
        ours = flash_attn_func(q, k, v, causal=causal, window_size=PAIRS[name], backend="reference")
        assert torch.equal(ours, right)
    decoded = flash_attn_with_kvcache(q[:, :1], k, v, window_size=PAIRS[name], causal=True)
    assert torch.equal(decoded, flash_attn_with_kvcache(q[:, :1], k, v, window_size=(5, 2), causal=True))


def test_unbounded_windows_accept_any_integer_type():
    q, k, v = qkv(1, 20, 2, 8)
    right = flash_attn_func(q, k, v)
    for unbounded in (torch.tensor([-1, -1]), np.array([-1, -1]), [-1, np.int64(-1)]):
        assert torch.equal(flash_attn_func(q, k, v, window_size=unbounded), right)


WRONG = [3, (1, None), (1.0, 2.0), (True, False), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), (1, 2, 3), "12", {}]


@pytest.mark.parametrize("window", WRONG, ids=repr)
def test_windows_of_other_types_are_refused(window):
    with pytest.raises(ValueError, match=r"window_size=.*: must be two integers \(left, right\), -1 for no bound"):
        flash_attn_func(*qkv(1, 4, 1, 8), window_size=window)


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, lambda x: torch.tensor([x])])
def test_numbers_of_any_type_are_accepted(kind):
    q, k, v = qkv(1, 20, 2, 8)
    ours = flash_attn_func(q, k, v, kind(0.25), kind(0.5), softcap=kind(3.0), rng=RngState(1), backend="reference")
    right = flash_attn_func(q, k, v, 0.25, 0.5, softcap=3.0, rng=RngState(1), backend="reference")
    assert torch.equal(ours, right)
    spec = AttentionSpec(Causal(), scale=kind(0.5), softcap=kind(3.0), dropout=kind(0.25))
    assert spec == AttentionSpec(Causal(), 0.5, 3.0, 0.25)
    assert [type(x) for x in (spec.scale, spec.softcap, spec.dropout)] == [float] * 3


def test_numbers_of_other_types_are_refused():
    for wrong in (torch.tensor([1.0, 2.0]), torch.tensor(1j), "a", np.array([1.0, 2.0])):
        with pytest.raises(TypeError, match=r"scale=.*: must be a number"):
            AttentionSpec(scale=wrong)


def test_a_number_that_requires_a_gradient_is_refused():
    for name in ("scale", "softcap"):
        with pytest.raises(TypeError, match=rf"{name}=.*: must be a number, or a tensor without gradient; to learn"):
            AttentionSpec(**{name: torch.tensor(0.5, requires_grad=True)})


def test_dropout_states_accept_any_integer_type():
    expected = RngState(2**40 + 1, 3, 1, 2, 48, 16)
    for kind in (np.int64, np.uint64, lambda x: np.array(x)[()]):
        state = RngState(*(kind(x) for x in (2**40 + 1, 3, 1, 2, 48, 16)))
        assert state == expected
        assert all(type(getattr(state, name)) is int for name in vars(state) if name != "entries")
    device = torch.device("cpu")
    state = RngState(torch.tensor(2**40 + 1), torch.tensor([3]), *map(torch.tensor, (1, 2, 48, 16)))
    assert torch.equal(state.as_tensor(device), expected.as_tensor(device)) and state.origin == expected.origin
    assert RngState(np.uint64(2**64 - 1)).as_tensor(device).tolist() == [-1, 0]
    for wrong in (np.float32(1.0), "1", torch.tensor([1, 2]), True):
        with pytest.raises(ValueError, match="RngState.seed=.*: must be an integer, or an int64 scalar"):
            RngState(wrong)
    for wrong in (np.int64(-1), torch.tensor(1.0), True):
        with pytest.raises(ValueError, match=r"RngState.entry=.*: must be an integer in \[0, 2\*\*31\)"):
            RngState(1, entry=wrong)


def test_masks_accept_any_integer_type():
    assert Window(np.int64(5), torch.tensor(2)) == Window(5, 2)
    assert type(Window(np.int64(5)).left) is int
    assert Window(np.int64(2**40)) == Window(None)
    pattern = torch.ones(2, 2, dtype=torch.bool)
    for block in (np.int64(64), torch.tensor(64), [64, 64], (np.int32(64), 64), torch.tensor([64, 64])):
        assert BlockSparse(pattern, block).block_sizes == (64, 64)
    for block in (True, 0, 1.5, (64,), (64, -1), "64"):
        with pytest.raises(ValueError, match=r"BlockSparse.block=.*: must be a positive integer or two"):
            BlockSparse(pattern, block)
    assert torch.equal(local_global(np.int64(4), torch.tensor(4), 1, 1), local_global(4, 4, 1, 1))


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda x: np.array(x, np.int32), lambda x: [*map(np.int64, x)]]
)
def test_boundaries_accept_any_integer_type(kind):
    q, k, v = qkv(9, 2, 8)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    right = flash_attn_varlen_func(q, k, v, bounds, bounds, 5, 5)
    ours = flash_attn_varlen_func(q, k, v, kind([0, 4, 9]), kind([0, 4, 9]), np.int64(5), torch.tensor(5))
    assert torch.equal(ours, right)
    packed = flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), kind([0, 4, 9]), 5)
    assert torch.equal(packed, right)
    packing = Packing(kind([0, 4, 9]), kind([0, 4, 9]))
    assert torch.equal(attention(q, k, v, packing=packing), right)


def test_boundaries_of_other_types_are_refused():
    q, k, v = qkv(9, 2, 8)
    for wrong in ([0.0, 9.0], ["a"], [True, False], np.array([0.5, 9.0])):
        with pytest.raises(TypeError, match="cu_seqlens_q=.*: must be integers, or an int32 tensor"):
            flash_attn_varlen_func(q, k, v, wrong, [0, 9], 9, 9)


@pytest.mark.parametrize("kind", [list, np.array, lambda x: torch.tensor(x)])
def test_indices_beyond_int32_are_refused(kind):
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(3, 12, 2, 8)
    with pytest.raises(ValueError, match=r"cache_seqlens.*: must be (integers )?between -"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=kind([2**32 + 5, 9]))


@pytest.mark.parametrize("kind", [list, np.array])
def test_boundaries_beyond_int32_are_refused(kind):
    with pytest.raises(ValueError, match=r"cu_seqlens_q=.*: must be integers between -2\*\*31 and 2\*\*31 - 1"):
        Packing(kind([0, 2**32 + 9]), kind([0, 9]))


def test_boundaries_as_a_list_compile_as_one_graph():
    q, k, v = qkv(9, 2, 8)

    def call(q, k, v):
        return attention(q, k, v, packing=Packing([0, 4, 9], [0, 4, 9]), backend="standard")

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))


def test_indices_as_a_list_under_fake_tensors():
    with FakeTensorMode():
        q, cache = torch.randn(2, 1, 2, 8), torch.randn(3, 12, 2, 8)
        assert flash_attn_with_kvcache(q, cache, cache, cache_seqlens=[5, 9]).shape == q.shape


@pytest.mark.parametrize("kind", [list, np.array])
def test_cache_indices_accept_any_integer_type(kind):
    torch.manual_seed(0)
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(3, 12, 2, 8)
    right = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=torch.tensor([5, 9], dtype=torch.int32),
        cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32), cache_leftpad=torch.tensor([1, 0], dtype=torch.int32),
    )  # fmt: skip
    ours = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=kind([5, 9]), cache_batch_idx=kind([2, 0]), cache_leftpad=kind([1, 0]),
        num_splits=np.int64(1),
    )  # fmt: skip
    assert torch.equal(ours, right)
    one = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=np.int64(5))
    assert torch.equal(one, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5))
    pages = cache.view(9, 4, 2, 8)
    table = [[0, 2, 1], [4, 3, 8]]
    paged = flash_attn_with_kvcache(q, pages, pages, cache_seqlens=kind([5, 9]), block_table=kind(table))
    right = flash_attn_with_kvcache(
        q, pages, pages, cache_seqlens=torch.tensor([5, 9], dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(paged, right)


def test_which_values_count_as_integers():
    for value in (3, np.int8(3), np.uint64(3), torch.tensor(3), torch.tensor([3], dtype=torch.uint8)):
        assert integer(value) == 3 and type(integer(value)) is int
    for value in (True, np.bool_(True), torch.tensor(True), 3.0, torch.tensor(3.0), torch.tensor([3, 4]), None, "3"):
        assert integer(value) is None
    assert integers(np.array([1, 2])) == integers(torch.tensor([1, 2])) == integers((1, 2)) == [1, 2]
    assert integers(5) is integers("12") is integers(torch.tensor([[1, 2]])) is integers([1, None]) is None
