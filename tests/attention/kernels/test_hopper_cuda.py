"""Hopper's kernels on a Hopper GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_train.attention import AttentionSpec, Causal, RngState, attention
from flash_train.attention.kernels.families import HOPPER
from flash_train.attention.kernels.launch_options import launch_options
from tests.support.attention import fuzz
from tests.support.attention.cases.drawn import for_hopper
from tests.support.attention.cases.hopper import MANY_HEADS, WIDE
from tests.support.attention.cases.named import CASES, on_card
from tests.support.attention.cases.problem import Case
from tests.support.attention.cases.recipes import Blocks
from tests.support.attention.contract import run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_hopper():
    reason = HOPPER.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)


def servable(case):
    """The case with sizes for a GPU, blocks of whole tiles, and head dimensions that TMA supports."""

    def multiple(n):
        return n and -(-n // 8) * 8

    terms = tuple(replace(t, size=(128, 128), shape=None) if isinstance(t, Blocks) else t for t in case.terms)
    case = replace(on_card(case), terms=terms)
    return for_hopper(replace(case, head_dim=multiple(case.head_dim), v_head_dim=multiple(case.v_head_dim)))


SERVED = [servable(case) for case in CASES if case.name not in ("no-keys", "packed-nothing")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [*SERVED, *WIDE], ids=lambda case: case.name)
def test_contract(case, dtype):
    if case.slopes and dtype == torch.float16:
        case = replace(case, learns=False)  # PyTorch's own gradients of slopes overflow in fp16 at these lengths
    errors = run(replace(case, dtype=dtype), "hopper", "cuda")
    assert all(e.ok for e in errors), errors


@pytest.mark.parametrize("group", range(4))
def test_some_random_draws(group):
    """``python -m tests.support.attention.fuzz --backend hopper --device cuda --draws 20000`` runs more."""
    subject, first = fuzz.Subject(0, "cuda", "hopper"), 100 * (1000 + group)
    for number in range(first, first + 5):
        assert not fuzz.judge(subject, number), fuzz.draw(subject, number).source


@pytest.mark.parametrize(
    "case",
    [*MANY_HEADS, Case("more-tasks", ((700, 700),) * 12, heads=12, kv_heads=6, head_dim=128, dropout=0.1)],
    ids=lambda case: case.name,
)
def test_dq_accumulators_are_converted(case):
    """In groups of one head."""
    with launch_options(heads_per_group=1):
        errors = run(replace(case, dtype=torch.bfloat16), "hopper", "cuda")
    assert all(e.ok for e in errors), errors


def tensors(n, head_dim, heads=8, kv_heads=2):
    shapes = [(2, n, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_thousand_runs_give_the_same_output(head_dim, dropout):
    q, k, v = (x.detach() for x in tensors(1500, head_dim))
    spec, rng = AttentionSpec(Causal(), dropout=dropout), RngState(1)
    first = attention(q, k, v, spec, rng=rng, backend="hopper", return_lse=True)
    for _ in range(999):
        again = attention(q, k, v, spec, rng=rng, backend="hopper", return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_repeat_up_to_the_order_of_dq(head_dim):
    """dK and dV repeat bitwise; dQ, summed in any order, repeats up to rounding in fp32."""
    leaves, spec, rng = tensors(1500, head_dim), AttentionSpec(Causal(), dropout=0.1), RngState(1)
    out = attention(*leaves, spec, rng=rng, backend="hopper")
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(100):
        dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert torch.equal(dk, first[1]) and torch.equal(dv, first[2])
        assert (dq - first[0]).abs().max() <= 2**-8 * first[0].abs().max()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeatable_gradients(head_dim):
    leaves, spec, rng = tensors(1500, head_dim), AttentionSpec(Causal(), dropout=0.1), RngState(1)
    out = attention(*leaves, spec, rng=rng, backend="hopper")
    dout = torch.randn_like(out)
    torch.use_deterministic_algorithms(True)
    try:
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for _ in range(100):
            again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_both_kernels_drop_the_same_weights():
    """Both kernels drop the same weights, so that outputs differ only by rounding."""
    q, k, v = (x.detach() for x in tensors(900, 128))
    spec, rng = AttentionSpec(Causal(), dropout=0.3), RngState(5, 2)
    ours, portable = (attention(q, k, v, spec, rng=rng, backend=name).float() for name in ("hopper", "triton"))
    assert (ours - portable).abs().max() < 0.02 * portable.abs().max()


def test_concurrent_streams_and_graphs_give_the_same_results():
    """Launches on two streams at the same time as a graph replay: each gives the same result as alone."""
    spec = AttentionSpec(Causal())
    q = torch.randn(4, 2048, 8, 128, device="cuda", dtype=torch.bfloat16)

    def call():
        return attention(q, q, q, spec, backend="hopper")

    with torch.no_grad():
        alone = call()
        torch.cuda.synchronize()
        graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
        with torch.cuda.graph(graph):
            replayed = call()
        found = []
        for _ in range(50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(call())
            graph.replay()
            found.append(replayed.clone())
        torch.cuda.synchronize()
    assert all(torch.equal(out, alone) for out in found)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_on_streams_and_by_graphs(dropout):
    """The same for backwards, whose programs wait for each other's tasks."""
    spec, rng = AttentionSpec(Causal(), dropout=dropout), RngState(1)

    def record():
        own = [x.detach().requires_grad_() for x in leaves]  # leaves of this stream, for autograd returns to theirs
        out = attention(*own, spec, rng=rng, backend="hopper")
        return out, own, torch.ones_like(out)

    leaves = tensors(2000, 128)
    alone = torch.autograd.grad(*record())
    torch.cuda.synchronize()
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.graph(graph):
        replayed = torch.autograd.grad(*record())
    recorded = []
    for stream in streams:
        with torch.cuda.stream(stream):
            recorded.append(record())
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, made in zip(streams, recorded, strict=True):
            with torch.cuda.stream(stream):
                found.append(torch.autograd.grad(*made, retain_graph=True))
        graph.replay()
        found.append([x.clone() for x in replayed])
    torch.cuda.synchronize()
    for dq, dk, dv in found:
        assert torch.equal(dk, alone[1]) and torch.equal(dv, alone[2])
        assert (dq - alone[0]).abs().max() <= 2**-8 * alone[0].abs().max()


@gluon.jit
def _occupy(flag, places, turns):
    """Occupies a processor's shared memory until the flag is set, or for a number of iterations."""
    SIZE: gl.constexpr = 32768
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(gl.int32, [SIZE], FLAT)
    tile.store(gl.arange(0, SIZE, THREADS))
    turn = 0
    while (gl.load(flag, volatile=True) == 0) & (turn < turns):
        turn += 1
    gl.store(places + gl.program_id(0), gl.max(tile.load(THREADS), 0))


def test_gradients_while_most_processors_are_occupied():
    """No task may wait for a task whose program has not started."""
    leaves, spec = tensors(2000, 128), AttentionSpec(Causal())
    out = attention(*leaves, spec, backend="hopper")
    dout = torch.randn_like(out)
    alone = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    flag, others = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    places = torch.zeros(count, dtype=torch.int32, device="cuda")
    with torch.cuda.stream(others):
        _occupy[(1,)](flag, places, 1)  # compiled before anything waits
    torch.cuda.synchronize()
    with torch.cuda.stream(others):
        _occupy[(count - 20,)](flag, places, 1 << 22)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.current_stream().synchronize()
    assert not others.query(), "the others ended too early for this to show anything"
    flag.fill_(1)
    torch.cuda.synchronize()
    assert torch.equal(dk, alone[1]) and torch.equal(dv, alone[2])
    assert (dq - alone[0]).abs().max() <= 2**-8 * alone[0].abs().max()


def test_cuda_graphs_of_torch_compile():
    """Their warm-up runs allocate from a pool that must be empty afterwards."""
    q, k, v = (x.detach() for x in tensors(900, 128))

    def call(q, k, v):
        return attention(q, k, v, AttentionSpec(Causal()), backend="hopper")

    compiled, alone = torch.compile(call, mode="reduce-overhead"), call(q, k, v)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k, v), alone)
    assert torch.equal(call(q, k, v), alone)
