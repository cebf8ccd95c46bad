"""A mask term that this file adds runs everywhere: dense backends, kernels, compiler, FLOP counts, copies."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
import triton.language as tl

from flash_train.attention import AttentionSpec, Causal, Document, Full, Mask, Packing, attention, cached_attention
from flash_train.attention.flops import attended_pairs, attention_flops
from flash_train.attention.masks import TermParts
from flash_train.attention.masks.parts import mask_from_parts, mask_to_parts
from flash_train.attention.packing import Entry
from tests.support.attention.devices import on_devices

HEADS, N = 4, 40


@triton.jit
def dilated(entry, head, q, k, dilation):
    distance = q - k + (entry.len_k - entry.len_q)
    return distance % tl.load(dilation + head) == 0


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A query attends to keys at multiples of its head's dilation, int32 (heads,), from its own position."""

    kind = "tests.dilated"
    dilation: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.dilation,)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        distance = q - k + (entry.len_k - entry.len_q)
        return distance % self.dilation[:, None, None] == 0

    @classmethod
    def device_term(cls, tensors: Iterator[Tensor]) -> tuple[object, tuple[Tensor]]:
        return dilated, (next(tensors),)

    def to_parts(self) -> TermParts:
        return TermParts((), (self.dilation,))

    @classmethod
    def from_parts(cls, integers: Iterator[int], tensors: Iterator[Tensor]) -> Mask:
        return cls(next(tensors))


def term(device="cpu"):
    return Dilated(torch.tensor([1, 2, 3, 7], dtype=torch.int32, device=device))


def masks(device="cpu"):
    ids = (torch.arange(N, device=device) // 17).int()
    return [term(device), Causal() & term(device), Causal() & term(device) & Document(ids)]


def tensors(device="cpu", packed=False, dtype=torch.float32):
    torch.manual_seed(0)
    shape = (N,) if packed else (2, N)
    return [torch.randn(*shape, heads, 16, device=device, dtype=dtype, requires_grad=True) for heads in (HEADS, 2, 2)]


def by_hand(q, k, v, mask):
    """Softmax over the rule itself, written out."""
    k, v = (x.repeat_interleave(HEADS // 2, 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    logits = logits.masked_fill(~mask.dense(Entry.of_lengths(N, N), HEADS), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v)


def check_same(found, right, inputs):
    # dP - D cancels in rows with a single key: fp32 then leaves the rounding of dP, which is near 30
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if found.dtype == torch.float64 else {"rtol": 1e-4, "atol": 5e-5}
    torch.testing.assert_close(found, right, **tolerance)
    grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (found, right)]
    torch.testing.assert_close(*grads, **tolerance)


@pytest.mark.parametrize("backend", ["sdpa", "standard", "chunked", "reference"])
def test_custom_term_in_dense_backends(backend):
    for mask in masks():
        q, k, v = tensors(dtype=torch.float64)
        check_same(attention(q, k, v, AttentionSpec(mask), backend=backend), by_hand(q, k, v, mask), (q, k, v))


@on_devices
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_custom_term_in_the_kernels(device, compiled):
    torch._dynamo.reset()

    def call(q, k, v, spec):
        return attention(q, k, v, spec, backend="triton")

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for mask in masks(device):
        q, k, v = tensors(device)
        check_same(run(q, k, v, AttentionSpec(mask)), by_hand(q, k, v, mask), (q, k, v))


@on_devices
def test_custom_term_with_packed_sequences_and_a_cache(device):
    q, k, v = tensors(device, packed=True)
    packing = Packing([0, 15, N], [0, 15, N])
    packing = Packing(packing.cu_seqlens_q.to(device), packing.cu_seqlens_k.to(device))
    spec = AttentionSpec(Causal() & term(device))
    found, right = (attention(q, k, v, spec, packing=packing, backend=name) for name in ("triton", "reference"))
    check_same(found, right, (q, k, v))
    q, k, v = (x.detach() for x in tensors(device))
    found, right = (
        cached_attention(q[:, -3:], k, v, [N, N - 5], spec, backend=name)[0] for name in ("triton", "reference")
    )
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@on_devices
def test_flops_of_a_call_equal_the_flops_of_its_band(device):
    """The operator's count does not read the rule: it is an upper bound."""
    q, k, v = (x.detach() for x in tensors(device))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, AttentionSpec(Causal() & term(device)), backend="triton")
    assert counter.get_total_flops() == attention_flops(2 * N * (N + 1) // 2, HEADS, 16)


def test_attended_pairs_are_counted_exactly():
    expected = sum(len(range(0, position + 1, dilation)) for dilation in (1, 2, 3, 7) for position in range(N))
    assert attended_pairs([N], Causal() & term(), n_heads=HEADS) == expected


@pytest.mark.parametrize("backend", ["standard", "chunked", "reference"])
def test_traced_programs_store_the_parts_of_the_term(backend):
    """Boundaries on a device are not read while a program is traced, so that the backend becomes one operator."""
    torch._dynamo.reset()
    spec = AttentionSpec(Causal() & term())

    def call(q, k, v, cu):
        return attention(q, k, v, spec, packing=Packing(cu, cu), backend=backend)

    inputs, cu = tensors(packed=True), torch.tensor([0, 15, N], dtype=torch.int32)
    check_same(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, cu), call(*inputs, cu), inputs)


def test_parts_make_an_equal_mask():
    for mask in masks():
        again, entry = mask_from_parts(*mask_to_parts(mask)), Entry.of_lengths(N, N)
        assert torch.equal(again.dense(entry, HEADS), mask.dense(entry, HEADS))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_custom_term_can_be_copied(duplicate):
    spec = AttentionSpec(Causal() & term())
    entry = Entry.of_lengths(N, N)
    assert torch.equal(duplicate(spec).mask.dense(entry, HEADS), spec.mask.dense(entry, HEADS))


def test_a_kind_belongs_to_one_class():
    with pytest.raises(ValueError, match=r"Other.kind='tests.dilated': must differ from the kind of Dilated"):
        type("Other", (Mask,), {"kind": "tests.dilated"})
    with pytest.raises(ValueError, match=r"Comma.kind='a,b': must have no comma"):
        type("Comma", (Mask,), {"kind": "a,b"})
    with pytest.raises(ValueError, match="mask term 'tests.unknown': must be one of band, blocks, document, tree"):
        mask_from_parts("tests.unknown", [1], [])


class Diagonal(Mask):
    """A term with the rule alone: no kernel, no parts."""

    kind = "tests.diagonal"

    def attends(self, entry, q, k, n_heads):
        return (q == k)[None]


def test_a_term_without_parts_runs_eagerly_and_not_as_an_operator():
    q, k, v = tensors()
    out = attention(q, k, v, AttentionSpec(Full() & Diagonal()), backend="standard")
    torch.testing.assert_close(out, v.repeat_interleave(2, 2))
    with pytest.raises(ValueError, match="mask=Diagonal: must be a term that defines to_parts and from_parts"):
        mask_to_parts(Diagonal())


@on_devices
def test_a_term_without_a_device_function_is_refused_by_the_kernels(device):
    q, k, v = (x.detach() for x in tensors(device))
    with pytest.raises(ValueError, match="mask=Diagonal: must be a term that defines device_term"):
        attention(q, k, v, AttentionSpec(Diagonal()), backend="triton")
