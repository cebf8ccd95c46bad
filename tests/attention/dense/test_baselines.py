"""The backends sdpa, standard and chunked: results compared with the reference, memory, and refusals."""

import weakref
import zlib
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_train.attention.dense.chunked import chunked_attention
from flash_train.attention.dense.reference import reference_attention
from flash_train.attention.dense.sdpa import sdpa_attention
from flash_train.attention.dense.standard import standard_attention
from flash_train.attention.masks import (
    BlockSparse,
    Causal,
    Document,
    Full,
    MaskFunction,
    Tree,
    Window,
)
from flash_train.attention.packing import Packing
from flash_train.attention.spec import AttentionSpec

HEADS = 4
LENGTHS_Q, LENGTHS_K = (5, 0, 17, 1, 3), (9, 2, 13, 0, 3)  #: of packed entries; two rows belong to none
PADDED = (2, 17, 13)  #: batch, queries, keys
IMPLEMENTATIONS = {
    "standard": standard_attention,
    "chunked": partial(chunked_attention, query_chunk=4, key_chunk=5),
    "one-chunk": chunked_attention,
}


def ids(*shape):
    return torch.randint(3, shape, dtype=torch.int32)


MASKS = {
    "full": lambda packed: Full(),
    "causal": lambda packed: Causal(),
    "window": lambda packed: Window(5, 3),
    "causal-window": lambda packed: Causal() & Window(4),
    "blocks": lambda packed: BlockSparse(torch.rand(5, 4) < 0.5, (4, 8)),
    "blocks-of-heads": lambda packed: Causal() & BlockSparse(torch.rand(HEADS, 5, 5) < 0.5, 4),
    "documents": lambda packed: (
        Window(9, 6) & Document(ids(28), ids(29)) if packed else Document(ids(2, 17), ids(2, 13))
    ),
    "tree": lambda packed: Tree([-1, 0, 1, 1, 2]) if packed else Tree([[-1, 0, 1, 1, 2], [-1, 0, 0, 0, 2]]),
    "function": lambda packed: Causal() & MaskFunction(None, lambda entry, h, q, k: (q + k + h + entry.index) % 3 != 0),
}


@dataclass(frozen=True)
class Features:
    """Features of a call apart from the mask. ``slopes`` is their number of dimensions."""

    kv_heads: int = HEADS
    v_head_dim: int = 6
    softcap: float = 0.0
    slopes: int = 0
    sinks: bool = False
    dropout: float = 0.0
    scale: float | None = None


FEATURES = {
    "plain": Features(),
    "gqa-v-head-dim": Features(kv_heads=2, v_head_dim=9),
    "softcap": Features(softcap=1.5, scale=0.9),
    "alibi": Features(slopes=1),
    "sinks": Features(sinks=True),
    "dropout": Features(dropout=0.3),
    "all": Features(kv_heads=1, v_head_dim=3, softcap=2.0, slopes=2, sinks=True, dropout=0.2),
}


class Call:
    """Random arguments of one call, and the gradients of its outputs."""

    def __init__(self, name, mask, packed, features, dtype=torch.float64):
        torch.manual_seed(zlib.crc32(name.encode()))
        kv = features.kv_heads
        if packed:
            bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K)]
            self.packing, entries = Packing(*bounds), len(LENGTHS_Q)
            rows_q, rows_k = (sum(LENGTHS_Q) + 2,), (sum(LENGTHS_K) + 2,)
        else:
            self.packing, entries = None, PADDED[0]
            rows_q, rows_k = PADDED[:2], PADDED[::2]
        shapes = (*rows_q, HEADS, 6), (*rows_k, kv, 6), (*rows_k, kv, features.v_head_dim)
        self.q, self.k, self.v = (torch.randn(shape).to(dtype) for shape in shapes)
        if packed:
            for x in (self.q, self.k, self.v):
                x[-2:] = float("nan")
        slopes = [None, torch.rand(HEADS), torch.rand(entries, HEADS)][features.slopes]
        self.options = {"alibi_slopes": slopes, "sinks": torch.randn(HEADS) if features.sinks else None}
        self.rng = torch.randint(2**62, (2,)) if features.dropout else None
        self.origin = (1, 2, 37, 16)
        self.spec = AttentionSpec(MASKS[mask](packed), features.scale, features.softcap, features.dropout)
        self.dout, self.dlse = torch.randn(*rows_q, HEADS, features.v_head_dim), torch.randn(99, 99, 99)

    def run(self, implementation, dtype=None, **options):
        """All results by name: out, lse and all gradients."""
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}
        extra = {n: None if x is None else x.clone().requires_grad_() for n, x in self.options.items()}
        out, lse = implementation(
            *leaves.values(), self.spec, self.packing, self.rng, origin=self.origin, **extra, **options
        )
        leaves |= {name: x for name, x in extra.items() if x is not None}
        dlse = self.dlse.flatten()[: lse.numel()].view(lse.shape).where(torch.isfinite(lse), torch.zeros(()))
        grads = torch.autograd.grad((out, lse), leaves.values(), (self.dout.to(out.dtype), dlse.to(lse.dtype)))
        return {"out": out, "lse": lse} | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("mask", MASKS)
def test_all_results_equal_the_reference(mask, packed, features):
    call = Call(f"{mask}-{packed}-{features}", mask, packed, FEATURES[features])
    expected = call.run(reference_attention)
    if packed:  # rows that belong to no entry are NaN
        assert (expected["out"][-2:] == 0).all()
        assert (expected["dk"][-2:] == 0).all()
    for name, implementation in IMPLEMENTATIONS.items():
        for tensor, ours in call.run(implementation).items():
            torch.testing.assert_close(ours, expected[tensor], msg=lambda m, n=name, t=tensor: f"{n}, {t}: {m}")


@pytest.mark.parametrize("features", ["plain", "gqa-v-head-dim", "alibi", "alibi-per-entry"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_equals_the_reference(mask, packed, features):
    call = Call(f"{mask}-{packed}-{features}", mask, packed, FEATURES.get(features, Features(kv_heads=2, slopes=2)))

    def sdpa(q, k, v, spec, packing, rng, *, origin, alibi_slopes, sinks):
        out = sdpa_attention(q, k, v, spec, packing, alibi_slopes=alibi_slopes)
        return out, out.new_zeros(1).requires_grad_()  # sdpa returns no log-sum-exp

    def reference(*tensors, **options):
        out, _ = reference_attention(*tensors, **options)
        return out, out.new_zeros(1).requires_grad_()

    ours, expected = call.run(sdpa), call.run(reference)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("features", ["plain", "sinks", "softcap", "alibi", "dropout"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_accuracy_in_16_bits_equals_the_reference_in_16_bits(name, dtype, features):
    """FlashAttention's rule: at most twice (gradients: three times) PyTorch's error in the same precision."""
    call = Call(f"{dtype}-{features}", "causal-window", False, FEATURES[features], dtype)
    exact = call.run(reference_attention, torch.float64)
    plain, ours = call.run(reference_attention), call.run(IMPLEMENTATIONS[name])
    assert ours["out"].dtype == dtype
    assert ours["lse"].dtype == torch.float32
    for tensor, value in exact.items():
        finite = torch.isfinite(value)
        errors = [(x[tensor].double() - value)[finite].abs().max().item() for x in (ours, plain)]
        rounding = 2 * (value[finite].abs().max() * torch.finfo(dtype).eps / 2).item()
        assert errors[0] <= (3 if tensor.startswith("d") else 2) * errors[1] + rounding, (tensor, errors)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_without_keys_pass_no_gradient_on(name):
    """The gradient of a log-sum-exp of -inf may be NaN: no other gradient depends on it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 8, requires_grad=True) for n in (9, 4, 4))
    out, lse = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(Causal()))
    assert (out[:, :5] == 0).all()
    assert torch.isneginf(lse[..., :5]).all()
    assert torch.isfinite(lse[..., 5:]).all()
    dlse = torch.where(torch.isfinite(lse), 1.0, float("nan"))
    for gradient in torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), dlse)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "sdpa"])
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_calls_without_queries_or_keys(name, lengths, sinks):
    if name == "sdpa" and sinks:
        pytest.skip("sdpa has no sinks")
    q, k, v = (
        torch.randn(2, n, 4, d, requires_grad=True) for n, d in zip((*lengths, lengths[1]), (8, 8, 5), strict=True)
    )
    sink = torch.randn(4, requires_grad=True) if sinks else None
    leaves = [q, k, v] if sink is None else [q, k, v, sink]
    if name == "sdpa":
        out, lse = sdpa_attention(q, k, v, AttentionSpec()), torch.full((2, 4, lengths[0]), float("-inf"))
    else:
        out, lse = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(), sinks=sink)
    assert out.shape == (2, lengths[0], 4, 5)
    assert (out == 0).all()
    assert torch.equal(lse, sink[:, None].expand(2, 4, lengths[0]) if sinks else torch.full_like(lse, float("-inf")))
    grads = torch.autograd.grad(out.sum() + (lse.sum() if sinks else 0), leaves)
    assert all((x == 0).all() for x in grads[:3])
    if sinks:
        assert torch.equal(grads[3], torch.full((4,), 2.0 * lengths[0]))


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "sdpa"])
def test_calls_without_sequences(name):
    q, k = torch.randn(0, 3, 2, 8), torch.randn(0, 4, 2, 8)
    run = sdpa_attention if name == "sdpa" else IMPLEMENTATIONS[name]
    empty = run(q, k, k, AttentionSpec(Document(ids(0, 3), ids(0, 4))))
    assert (empty if name == "sdpa" else empty[0]).shape == q.shape
    cu = torch.zeros(3, dtype=torch.int32)
    packed = run(torch.randn(3, 2, 8), k[0:0, 0], k[0:0, 0], AttentionSpec(), Packing(cu, cu))
    assert torch.equal(packed if name == "sdpa" else packed[0], torch.zeros(3, 2, 8))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("boundaries", [(0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_packed_calls_without_queries_give_gradients_of_zero(name, boundaries, rows):
    q, k, v = (torch.randn(n, h, 8, requires_grad=True) for n, h in ((rows, 4), (5, 2), (5, 2)))
    sinks = torch.randn(4, requires_grad=True)
    cu = torch.tensor(boundaries, dtype=torch.int32)
    out, _ = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(Causal()), Packing(cu, cu), sinks=sinks)
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v, sinks)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_sink_of_minus_infinity_has_no_effect(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (6, 4, 4))
    sinks = torch.tensor([float("-inf"), 0.3], requires_grad=True)
    out, lse = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(Causal()), sinks=sinks)
    plain, plain_lse = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(Causal()))
    torch.testing.assert_close(out[:, :, 0], plain[:, :, 0])
    torch.testing.assert_close(lse[:, 0], plain_lse[:, 0])
    assert not torch.equal(out[:, :, 1], plain[:, :, 1])
    for gradient in torch.autograd.grad(out.sum() + lse[:, :, 2:].sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_dropout_from_the_generator(name, packed):
    call = Call("generator", "causal", packed, FEATURES["dropout"])
    call.rng = None
    torch.manual_seed(7)
    one = call.run(IMPLEMENTATIONS[name])
    torch.manual_seed(7)
    again = call.run(IMPLEMENTATIONS[name])
    other = call.run(IMPLEMENTATIONS[name])
    for tensor, value in one.items():
        torch.testing.assert_close(value, again[tensor], rtol=0, atol=0)
    assert not torch.equal(one["out"], other["out"])
    # the output is linear in v: backward and forward drew the same mask only if <dv, v> = <dout, out>
    torch.testing.assert_close((one["dv"] * call.v.nan_to_num()).sum(), (call.dout.double() * one["out"]).sum())


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_dropout_from_the_generator_is_unbiased(name):
    torch.manual_seed(0)
    q, k = (torch.zeros(1, n, 1, 4) for n in (200, 300))
    out, lse = IMPLEMENTATIONS[name](q, k, torch.ones(1, 300, 1, 1), AttentionSpec(dropout=0.25))
    assert abs(out.mean().item() - 1) < 5 * (0.25 / 0.75 / (200 * 300)) ** 0.5  # mean of 60,000 Bernoulli / 0.75
    assert out.std() > 0.01
    torch.testing.assert_close(lse, torch.full_like(lse, 300.0).log())


class Memory(TorchDispatchMode):
    """Records the largest new tensor, the peak of live bytes of new tensors, and how often each operation ran."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.calls, self.known = {}, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket] = self.calls.get(func.overloadpacket, 0) + 1
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage)
                weakref.finalize(storage, self._free, storage.nbytes())
                self.now += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes() // x.element_size())
                self.peak = max(self.peak, self.now)
        return out

    def _free(self, n_bytes):
        self.now -= n_bytes


def memory(implementation, length, spec, packed=False, **options):
    q, k, v = (torch.randn(1, length, 2, 8, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, length], dtype=torch.int32)
    with Memory() as used:
        tensors = [x[0] for x in (q, k, v)] if packed else (q, k, v)
        out, lse = implementation(*tensors, spec, Packing(cu, cu) if packed else None, **options)
        (out.sum() + lse.sum()).backward()
    return used


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("mask", ["full", "causal", "function"])
def test_chunked_is_linear_in_memory(mask, packed):
    function = MaskFunction(None, lambda entry, h, q, k: (q + k + h) % 3 != 0)
    spec = AttentionSpec({"full": Full(), "causal": Causal(), "function": Causal() & function}[mask])
    chunks = partial(chunked_attention, query_chunk=32, key_chunk=64)
    short, long = (memory(chunks, n, spec, packed) for n in (256, 512))
    heads = 2
    assert long.largest <= heads * max(512 * 8, 32 * 64)
    assert long.peak < 2.2 * short.peak
    square = memory(standard_attention, 256, spec, packed)  # the same measurement detects quadratic memory
    assert square.largest >= heads * 256**2
    assert square.peak > 4 * short.peak


def test_standard_saves_only_the_weights():
    """Between the passes four bytes per pair and head for P; inside them twice as much, and the mask of one head."""
    used = memory(standard_attention, 512, AttentionSpec(Causal()))
    pairs = 2 * 512**2
    assert used.peak < (4 + 4 + 2) * pairs
    dropped = memory(standard_attention, 512, AttentionSpec(Causal(), dropout=0.5))
    assert dropped.peak < (4 + 4 + 4 + 1 + 1) * pairs


@pytest.mark.parametrize("mask", [Causal(), Document(ids(3, 32)), Tree([[-1, 0], [-1, -1], [-1, 0]])])
def test_standard_batches_its_products(mask):
    q, k, v = (torch.randn(3, 32, 2, 8) for _ in range(3))
    with Memory() as used:
        standard_attention(q, k, v, AttentionSpec(mask))
    assert used.calls[torch.ops.aten._softmax] == 1


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_chunked_skips_what_the_band_excludes(packed):
    """Keys outside the band may be NaN: they are not read, since a masked weight times NaN would show."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 96, 2, 8) for _ in range(3))
    spec, chunks = AttentionSpec(Window(8, 3)), partial(chunked_attention, query_chunk=16, key_chunk=16)
    expected, _ = reference_attention(q, k, v, spec)
    for x in (k, v):
        x[:, :16] = x[:, 80:] = float("nan")
    tensors, cu = ([x[0] for x in (q, k, v)], torch.tensor([0, 96]).int()) if packed else ((q, k, v), None)
    out = chunks(*tensors, spec, Packing(cu, cu) if packed else None)[0].view(96, 2, 8)
    torch.testing.assert_close(out[32:64], expected[0, 32:64])
    assert torch.isnan(out[:16]).all()
    assert torch.isnan(out[80:]).all()


def test_chunk_sizes_must_be_positive():
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="query_chunk=0, key_chunk=4: must be 1 or more"):
        chunked_attention(x, x, x, AttentionSpec(), query_chunk=0, key_chunk=4)


class CudaAutocast(TorchFunctionMode):
    """Emulates one rule of autocast on CUDA that the CPU lacks: softmax returns fp32 unless a dtype is given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        widened = {"dtype": torch.float32} if func in (torch.softmax, torch.Tensor.softmax) else {}
        return func(*args, **widened | (kwargs or {}))


@pytest.mark.parametrize("name", ["standard", "chunked"])
def test_cuda_autocast_changes_nothing(name):
    q, k, v = (torch.randn(2, 9, HEADS, 8, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    expected, _ = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(Causal(), dropout=0.0))
    with CudaAutocast():
        assert torch.zeros(3, dtype=torch.bfloat16).softmax(0).dtype == torch.float32
        out, _ = IMPLEMENTATIONS[name](q, k, v, AttentionSpec(Causal(), dropout=0.0))
    assert torch.equal(out, expected)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


@pytest.mark.parametrize(
    ("implementation", "bytes_per_pair"),
    [(standard_attention, 4 + 4 + 1), (sdpa_attention, 4 + 1)],  # scores, weights and mask; mask in fp32 and as bool
    ids=["standard", "sdpa"],
)
def test_a_forward_holds_the_mask_once(implementation, bytes_per_pair):
    length = 512
    q, k, v = (torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3))
    with Memory() as used:
        implementation(q, k, v, AttentionSpec(Window(100)))
    assert bytes_per_pair <= used.peak / length**2 < bytes_per_pair + 0.5
