"""Decoding in compiled programs: one graph, caches written in place, and the same numbers as in eager mode."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Full,
    MaskFunction,
    RngState,
    Tree,
    Window,
    cached_attention,
    flash_attn_with_kvcache,
)
from flash_train.attention.decoding import operator as decoding
from tests.support.attention.devices import INTERPRETING, on_devices

DENSE = ("reference", "standard", "chunked")
CAPACITY = 24


class Decoder(torch.nn.Module):
    """One decoding layer: rotary embedding, a contiguous or paged cache, and lengths that grow on the device."""

    def __init__(self, device, backend, paged=False, head_dim=16, dtype=torch.float32):
        super().__init__()
        shape = (9, 8) if paged else (3, CAPACITY)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(*shape, 2, head_dim, device=device, dtype=dtype))
        table = torch.tensor([[0, 5, 2], [3, 1, 4], [-1, -1, -1]], dtype=torch.int32, device=device)
        angles = torch.arange(CAPACITY + 4, device=device)[:, None] * torch.tensor([1.0, 0.1, 0.01], device=device)
        self.register_buffer("table", table if paged else None)
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))
        self.register_buffer("lengths", torch.tensor([0, 7, -1], dtype=torch.int32, device=device))
        self.backend = backend

    def forward(self, q, k, v):
        out, lse = flash_attn_with_kvcache(
            q, self.k_cache, self.v_cache, k, v, self.cos, self.sin, self.lengths, block_table=self.table, causal=True,
            backend=self.backend, return_softmax_lse=True,
        )  # fmt: skip
        self.lengths.add_((self.lengths >= 0).int() * k.shape[1])
        return out, lse


def compare_loops(device, backend, paged, compiler, mode=None, steps=6, dtype=torch.float32, head_dim=16):
    """Compare a loop over a compiled step, token by token, with the same loop in eager mode."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager, compiled = (Decoder(device, backend, paged, head_dim, dtype) for _ in "ec")
    step = torch.compile(compiled, fullgraph=True, backend=compiler, mode=mode)
    with torch.no_grad():
        for _ in range(steps):
            tokens = [torch.randn(3, 1, h, head_dim, device=device, dtype=dtype) for h in (4, 2, 2)]
            found, right = [x.clone() for x in step(*tokens)], eager(*tokens)
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
            assert (found[0][2] == 0).all() and (found[0][:2] != 0).any()
    for name, buffer in eager.named_buffers():
        assert torch.equal(compiled.get_buffer(name), buffer), name
    assert eager.lengths.tolist() == [steps, 7 + steps, -1]


@on_devices
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_loop_is_one_graph_with_the_decode_kernel(device, paged):
    counter = CompileCounterWithBackend("aot_eager")
    compare_loops(device, "triton", paged, counter)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_decoding_loop_with_inductor_and_in_a_cuda_graph(paged, mode):
    """There are enough steps to record and replay the graph, and nothing prevents recording."""
    from torch._dynamo.utils import counters

    counters.clear()
    compare_loops("cuda", "flash", paged, "inductor", mode, steps=10, dtype=torch.bfloat16, head_dim=64)
    assert counters["inductor"]["cudagraph_skips"] == 0


def mistaken_loop(device, backend):
    """A compiled step on a cache without room raises the same error as in eager mode."""
    torch._dynamo.reset()
    decoder = Decoder(device, backend)
    decoder.lengths.fill_(CAPACITY)
    tokens = [torch.randn(3, 1, h, 16, device=device) for h in (4, 2, 2)]
    with pytest.raises(ValueError, match="position in the cache is 24: must be between 0 and 23"):
        torch.compile(decoder.forward, fullgraph=True, backend="aot_eager")(*tokens)


class Recorder(TorchDispatchMode):
    """Records the arguments of the package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("flash_train."):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def check_operators(device, backend, name, monkeypatch):
    """Run PyTorch's opcheck on the operators of a traced program: shapes, strides, and mutated arguments."""
    monkeypatch.setattr(decoding, "has_no_values", lambda x: True)
    decoder = Decoder(device, backend, paged=True)
    with Recorder() as recorder:
        decoder(*(torch.randn(3, 1, h, 16, device=device) for h in (4, 2, 2)))
    assert [str(func) for func, *_ in recorder.calls] == ["flash_train.append_to_cache.default", name]
    for func, args, kwargs in recorder.calls:
        torch.library.opcheck(func, args, kwargs)


@on_devices
def test_operators_with_the_decode_kernel(device, monkeypatch):
    check_operators(device, "triton", "flash_train.cached_attention_flash.default", monkeypatch)


def two_widths(device, backend, dynamic):
    """Models with several head dimensions share the code that was traced for the first one."""
    torch._dynamo.reset()

    def call(q, cache, lengths):
        return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)
    for capacity, head_dim in ((10, 16), (20, 32), (24, 24)):
        q, cache = (torch.randn(2, n, 2, head_dim, device=device) for n in (1, capacity))
        assert torch.equal(compiled(q, cache, lengths), call(q, cache, lengths))


@on_devices
@pytest.mark.parametrize("dynamic", [None, True])
def test_several_head_dimensions_with_the_decode_kernel(device, dynamic):
    two_widths(device, "triton", dynamic)


def check_fake(backend, device="cpu"):
    with FakeTensorMode():
        q, k, v = (torch.randn(2, 3, h, 16, device=device, dtype=torch.float16) for h in (4, 2, 2))
        cache, lengths = (torch.zeros(2, 20, 2, 16, device=device, dtype=torch.float16) for _ in "kv"), [4, 9]
        out, lse = flash_attn_with_kvcache(
            q, *cache, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device), backend=backend,
            return_softmax_lse=True,
        )  # fmt: skip
    assert (out.shape, out.dtype) == ((2, 3, 4, 16), torch.float16)
    assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)


@on_devices
def test_fake_tensors_with_the_decode_kernel(device):
    check_fake("triton", device)


if not INTERPRETING:

    @pytest.mark.parametrize("backend", DENSE)
    @pytest.mark.parametrize("paged", [False, True])
    def test_decoding_loop_is_one_graph_with_dense_backends(backend, paged):
        counter = CompileCounterWithBackend("aot_eager")
        compare_loops("cpu", backend, paged, counter)
        assert counter.frame_count == 1

    @pytest.mark.slow
    def test_inductor_copies_no_cache_in_a_decoding_loop():
        """Neither cache is cloned for the operator that writes into it."""
        from torch._inductor.utils import run_and_get_code

        torch._dynamo.reset()
        decoder = Decoder("cpu", "reference")
        tokens = [torch.randn(3, 1, h, 16) for h in (4, 2, 2)]
        with torch.no_grad():
            _, (code,) = run_and_get_code(torch.compile(decoder.forward, fullgraph=True), *tokens)
        assert "flash_train.append_to_cache" in code
        assert f"empty_strided_cpu((3, {CAPACITY}, 2, 16)" not in code

    @pytest.mark.parametrize("backend", DENSE)
    def test_compiled_step_refuses_a_full_cache(backend):
        mistaken_loop("cpu", backend)

    @pytest.mark.parametrize("backend", DENSE)
    def test_operators_with_dense_backends(backend, monkeypatch):
        check_operators("cpu", backend, "flash_train.cached_attention_dense.default", monkeypatch)

    def test_a_mask_function_runs_under_a_dispatch_mode():
        mask = MaskFunction(None, lambda entry, head, q, k: k % 2 == 0)
        given = (torch.randn(1, 1, 2, 16), *2 * [torch.randn(1, 8, 2, 16)], 3, AttentionSpec(mask))
        with FlopCounterMode(display=False):
            found, _ = cached_attention(*given)
        assert torch.equal(found, cached_attention(*given)[0])

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["auto", *DENSE])
    @pytest.mark.parametrize("dynamic", [None, True])
    def test_several_head_dimensions_with_dense_backends(backend, dynamic):
        two_widths("cpu", backend, dynamic)

    @pytest.mark.parametrize("backend", ["auto", *DENSE])
    def test_fake_tensors_with_dense_backends(backend):
        check_fake(backend)

    def test_integer_lengths_do_not_recompile():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        caches = [torch.zeros(2, 9, 2, 16) for _ in range(4)]

        def step(q, k, v, k_cache, v_cache, n):
            return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=n, causal=True)

        compiled = torch.compile(step, fullgraph=True, backend=counter)
        for n in range(6):
            tokens = [torch.randn(2, 1, h, 16) for h in (4, 2, 2)]
            assert torch.equal(compiled(*tokens, *caches[:2], n), step(*tokens, *caches[2:], n))
        assert all(torch.equal(a, b) for a, b in zip(caches[:2], caches[2:], strict=True))
        assert counter.frame_count <= 3  # 0, 1, and all other lengths

    def test_keys_and_values_interleaved_in_one_cache():
        torch._dynamo.reset()
        caches = [torch.zeros(2, 9, 2, 2, 16) for _ in range(2)]
        lengths = torch.tensor([0, 4], dtype=torch.int32)

        def step(q, k, v, cache):
            return flash_attn_with_kvcache(q, *cache.unbind(2), k, v, cache_seqlens=lengths)

        tokens = [torch.randn(2, 3, h, 16) for h in (4, 2, 2)]
        found, right = (
            run(*tokens, cache)
            for run, cache in zip((torch.compile(step, fullgraph=True, backend="aot_eager"), step), caches, strict=True)
        )
        assert torch.equal(found, right) and torch.equal(*caches) and caches[0].any()

    IDS = (torch.arange(2 * 64) // 9).int().view(2, 64)
    MASKS = {
        "full": Full(),
        "window": Window(5, 1),
        "documents": Document(IDS[:, 30:32].contiguous(), IDS),
        "tree": Tree([[-1, 0], [-1, -1]]),
        "blocks": Causal() & BlockSparse(torch.tensor([[True, False, True, True]]), 16),
        "all of them": Window(40, 0)
        & BlockSparse(torch.tensor([[[True, False, True, True]]] * 4), (32, 16))
        & Document(IDS[:, 30:32].contiguous(), IDS),
    }

    @pytest.mark.parametrize("mask", MASKS)
    def test_masks_dropout_and_biases_pass_through_the_operator(mask):
        torch.manual_seed(0)
        torch._dynamo.reset()
        q, cache = torch.randn(2, 2, 4, 16), torch.randn(2, 64, 2, 16)
        lengths, left = (torch.tensor(x, dtype=torch.int32) for x in ([40, 50], [0, 3]))
        slopes, sinks = torch.rand(2, 4), torch.rand(4)
        spec = AttentionSpec(MASKS[mask], 0.4, 3.0, 0.3)

        def call(q):
            return cached_attention(
                q, cache, cache, lengths, spec, rng=RngState(3, 4, 1, 2, 3, 4), sinks=sinks, alibi_slopes=slopes,
                cache_leftpad=left, backend="standard",
            )  # fmt: skip

        found, right = torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))

    def test_dropout_without_a_state_draws_once_per_compiled_call():
        torch._dynamo.reset()
        q, cache = torch.randn(2, 2, 4, 16), torch.randn(2, 64, 2, 16)

        def call(q):
            return cached_attention(q, cache, cache, spec=AttentionSpec(dropout=0.5))[0]

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        draws = []
        for run, seed in ((compiled, 0), (call, 0), (compiled, 1)):
            torch.manual_seed(seed)
            draws.append(run(q))
        assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])

    def test_mask_function_is_refused_under_fake_tensors():
        mask = MaskFunction(None, lambda entry, head, q, k: k % 2 == 0)
        with (
            FakeTensorMode(),
            pytest.raises(ValueError, match="mask=MaskFunction: must .* or use backend=flash"),
        ):
            cached_attention(torch.randn(1, 1, 2, 16), *2 * [torch.randn(1, 8, 2, 16)], 3, AttentionSpec(mask))

    def test_decoder_is_exported_for_any_number_of_new_tokens():
        decoder, exported = Decoder("cpu", "auto"), Decoder("cpu", "auto")
        n = torch.export.Dim("n", min=1, max=CAPACITY)

        def tokens(n):
            return tuple(torch.randn(3, n, h, 16) for h in (4, 2, 2))

        with torch.no_grad():
            program = torch.export.export(exported, tokens(3), dynamic_shapes=3 * ({1: n},)).module()
            for length in (5, 2):
                given = tokens(length)
                found, right = program(*given), decoder(*given)
                assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        assert torch.equal(program.k_cache, decoder.k_cache) and decoder.k_cache.any()
