"""A cached launch gets the same arguments as a new launch."""

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

from flash_train.attention import AttentionSpec, Causal, Full, Packing, RngState, Window, attention
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels import launch_cache
from flash_train.attention.kernels.call import Bounds, Call
from flash_train.attention.kernels.families import HOPPER
from flash_train.attention.kernels.hopper import launch as hopper
from flash_train.attention.kernels.launch import Launch
from flash_train.attention.kernels.launch_options import launch_options
from flash_train.attention.kernels.portable import launch
from flash_train.attention.kernels.portable.tiles import Tiles
from flash_train.attention.kernels.results import lse_shape
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.attention.masks import BlockSparse, Document, MaskFunction, Tree
from tests.support.attention.cases.rules import budget, budget_twin, parity, parity_twin
from tests.support.attention.on_cuda import OnCuda

TILES = Tiles(*3 * [Tile(64, 64, 4, 2)])
APART = Tiles(*4 * [Tile(64, 32, 4, 2)])

CASES = {
    "dense": {},
    "window": {"mask": lambda: Window(10, 3), "n_kv_heads": 1},
    "softcap": {"mask": Full, "softcap": 20.0, "gradient_of_lse": True},
    "dropout": {"dropout": 0.1},
    "sinks": {"sinks": True},
    "slopes": {"slopes": (4,), "needs_slopes": True},
    "slopes of entries": {"slopes": (2, 4)},
    "packed": {"packed": "with one tensor"},
    "packed apart": {"packed": "with two", "dropout": 0.5, "sinks": True},
    "apart": {"tiles": APART, "ordered": True},
    "documents": {"mask": lambda: Causal() & Document(torch.randint(3, (2, 80), dtype=torch.int32))},
    "blocks": {"mask": lambda: Window(50, 0) & _blocks() & _documents(), "tiles": APART, "ordered": True},
    "tree": {"mask": lambda: Tree(torch.tensor([[-1, 0, 0], [-1, -1, 1]]))},
    "function": {"mask": lambda: Causal() & MaskFunction(parity, parity_twin) & _budget() & _documents()},
    "packed documents": {"mask": lambda: Causal() & Document(torch.arange(160).int() // 30), "packed": "with two"},
}


def _blocks():
    return BlockSparse(torch.rand(4, 2, 2) < 0.8)


def _documents():
    return Document(torch.randint(3, (80,), dtype=torch.int32), torch.randint(3, (2, 80), dtype=torch.int32))


def _budget():
    return MaskFunction(budget, budget_twin, (torch.randint(80, (160,)), torch.tensor([9, 80])))


class Operands:
    """New random tensors of a case."""

    def __init__(
        self, mask=Causal, n_kv_heads=2, softcap=0.0, dropout=0.0, sinks=False, slopes=None, packed=None, tiles=TILES,
        gradient_of_lse=False, needs_slopes=False, ordered=False,
    ):  # fmt: skip
        lead = (2, 80) if packed is None else (160,)
        self.q, self.out, self.dout, self.dq = (torch.randn(*lead, 4, 64, dtype=torch.bfloat16) for _ in range(4))
        self.k, self.v, self.dk, self.dv = (torch.randn(*lead, n_kv_heads, 64, dtype=torch.bfloat16) for _ in range(4))
        shape = lse_shape(self.q)
        self.lse, self.delta, self.lse2 = (torch.randn(shape) for _ in range(3))
        self.dlse = torch.randn(shape) if gradient_of_lse else None
        self.dslope = torch.zeros(shape) if needs_slopes else None
        self.counter = torch.zeros(1, dtype=torch.int32)
        cu = torch.tensor([0, 50, 160], dtype=torch.int32)
        packing = None if packed is None else Packing(cu, cu if packed == "with one tensor" else cu.clone())
        self.call = Call(
            *operands_of(
                self.q, self.k, AttentionSpec(mask(), softcap=softcap, dropout=dropout), packing,
                torch.tensor([1, 2]) if dropout else None, (0, 0, 0, 0), torch.rand(slopes) if slopes else None,
                torch.randn(4) if sinks else None,
            )
        )  # fmt: skip
        self.sums = hopper.make_backward_buffers(self.q, self.call, with_dq=not ordered and not needs_slopes)
        self.tiles = tiles

    def all(self):
        """(build, tensors, options) of each direction and each kind of kernels."""
        forward = (self.q, self.k, self.v, self.out, self.lse)
        begin = (self.q, self.k, self.v, self.out, self.dout, self.lse, self.dlse)
        end = (self.dq, self.dk, self.dv, self.dslope)
        sums = (self.sums.delta, self.sums.lse2, self.sums.dq, self.sums.counters)
        yield launch._forward_launches, forward, (self.tiles.forward,)
        yield launch._backward_launches, (*begin, self.delta, self.lse2, *end), (self.tiles,)
        yield hopper._forward_launches, (*forward, self.counter), ()
        yield hopper._backward_launches, (*begin, *sums, *end), ()

    def given(self, tensors):
        return (*tensors, *self.call.tensors)


def test_the_accumulator_of_dq_has_the_rows_that_its_memory_is_predicted_with():
    accumulator = Operands(packed="with one tensor").sums.dq
    assert accumulator is not None and accumulator.shape[1] == HOPPER.accumulated_rows(160, entries=2) == 4 * 128


def same(a, b):
    """Tensors are compared by identity, descriptors by their fields."""
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "base"):
        return vars(a).keys() == vars(b).keys() and all(same(value, vars(b)[name]) for name, value in vars(a).items())
    return type(a) is type(b) and a == b


@pytest.fixture
def absent_gpu(monkeypatch):
    monkeypatch.setattr(launch_cache, "CompiledKernel", str)
    with launch_options(processors=132):
        yield


@pytest.fixture
def empty_cache():
    launch_cache.clear_plans()
    yield
    launch_cache.clear_plans()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_cached_launch_takes_other_tensors(case, absent_gpu):
    first, second = Operands(**case), Operands(**case)
    for (build, tensors, options), (_, others, _) in zip(first.all(), second.all(), strict=True):
        launched = [
            (found, "compiled") for found in launch_cache._in_launch_order(build(*tensors, first.call, *options))
        ]
        found_plans = launch_cache._make_call_plan(launched, first.given(tensors))
        assert found_plans is not None and len(found_plans.plans) == len(launched)
        again = list(launch_cache._in_launch_order(build(*others, second.call, *options)))
        made = [x for found in again for x in found.made]
        assert found_plans.made == tuple((x.shape, x.dtype) for x in made)
        for plan, found in zip(found_plans.plans, again, strict=True):
            kernel = found.kernel
            assert len(plan.arguments.parts) == len(kernel.arg_names) and not holds_tensors(plan.arguments)
            tail = kernel.arg_names[len(found.arguments) :]
            fresh = (*found.arguments, *(found.constants[name] for name in tail))
            assert same(fresh, tuple(launch_cache._fill_arguments(plan, (*second.given(others), *made)))), (
                kernel.__name__
            )
            assert plan.grid == (*found.grid, 1, 1)[:3] and plan.compiled == "compiled"


def holds_tensors(group):
    return launch_cache._has_tensor(tuple(group.parts)) or any(holds_tensors(inner) for _, inner in group.groups)


def test_calls_that_are_not_cached(absent_gpu):
    """Strided slopes, which are copied for every call; and a kernel that was not compiled."""
    operands = Operands()
    given = (operands.q, operands.k, operands.v, operands.out, operands.lse)
    for slopes, compiled in ((torch.rand(8)[::2], "compiled"), (torch.rand(4), None)):
        call = operands.call._replace(alibi_slopes=slopes)
        made = [(found, compiled) for found in launch._forward_launches(*given, call, TILES.forward)]
        assert launch_cache._make_call_plan(made, (*given, None, None, None, None, slopes, None)) is None


def test_numbers_of_a_call_have_one_type():
    """1 and 1.0 must give the same key."""
    q = torch.randn(1, 16, 4, 64)
    call = Call(*operands_of(q, q, AttentionSpec(scale=1, softcap=2), None, None, (0, 0, 0, 0), None, None))
    assert type(call.scale) is type(call.softcap) is float


def test_keys_differ_for_different_launches():
    call = Operands().call
    a, b, c = OnCuda(), OnCuda(), OnCuda()

    def key(*inputs, call=call, options=(), made=()):
        return launch_cache._key(launch._forward_launches, inputs, made, call, options)

    assert key(a, b, c) == key(b, c, a) == key(b, c, c) and hash(key(a, b, None)) == hash(key(b, c, None))
    others = [
        key(a, b, c), key(a, b, None), key(a, b, c, made=(a,)), key(a, b, c, made=(None,)),
        key(OnCuda(shape=(2, 79, 4, 64)), b, c), key(OnCuda(stride=(20480, 64, 5120, 1)), b, c),
        key(OnCuda(dtype=torch.float16), b, c), key(a, b, OnCuda(address=4104)), key(a, b, c, options=(TILES.forward,)),
        key(a, b, c, call=call._replace(scale=0.5)), key(a, b, c, call=call._replace(softcap=1.0)),
        key(a, b, c, call=call._replace(bounds=Bounds(3, 0, -1, -1, -1))),
        key(a, b, c, call=call._replace(origin=(0, 0, 16, 0))), key(a, b, c, call=call._replace(keep_threshold=230)),
        key(a, b, c, call=call._replace(block_map=a)), key(a, b, c, call=call._replace(block_map=OnCuda(shape=(1,)))),
        key(a, b, c, call=call._replace(term_tensors=[a])), key(a, b, c, call=call._replace(term_tensors=[a, b])),
        key(a, b, c, call=call._replace(term_tensors=[OnCuda(shape=(1,))])),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    assert key(torch.empty(1), b, c) is None


def test_the_cache_has_a_limit(empty_cache):
    made = []

    def build(q, call):
        made.append(q.shape[1])
        return ()

    call = Operands().call
    with launch_options(cached_plans=3):
        for rows in (1, 2, 3, 3, 4, 4, 1):
            launch_cache.launch_all(build, (OnCuda(shape=(1, rows, 4, 64)),), (), call)
    assert made == [1, 2, 3, 4, 1]


def test_same_tensor_for_two_arguments_is_cached_like_two_tensors(monkeypatch, absent_gpu, empty_cache):
    """The next call with this key may have two different tensors."""
    monkeypatch.setattr(launch_cache, "_key", lambda *_: "a key")
    ran = []

    class Compiled(str):
        def __getitem__(self, grid):
            return lambda *arguments: ran.append(arguments)

    monkeypatch.setattr(launch_cache.Launch, "start", lambda self: Compiled())
    first, second = Operands(packed="with one tensor"), Operands(packed="with two")
    for operands, k, v in ((first, first.k, first.k), (second, second.k, second.v)):
        inputs, made = (operands.q, k, v), (operands.out, operands.lse)
        launch_cache.launch_all(launch._forward_launches, inputs, made, operands.call, TILES.forward)
    (arguments,) = ran
    assert arguments[1][0] is second.k and arguments[2][0] is second.v
    assert arguments[5] is second.call.cu_seqlens_q and arguments[6] is second.call.cu_seqlens_k


MASKS = {
    "documents": lambda draw: Causal() & Document(draw(3, (2, 300))),
    "blocks": lambda draw: BlockSparse(draw(3, (4, 3, 3)) > 0) & Window(200, 0),
    "tree": lambda draw: Tree(draw(9, (2, 9)) % torch.arange(1, 10, device="cuda") - 1),
    "function": lambda draw: MaskFunction(budget, budget_twin, (draw(300, (600,)), draw(1, (2,)) + 9)) & _own(draw),
}


def _own(draw):
    return Document(draw(3, (300,)), draw(3, (2, 300)))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_call_computes_with_the_tensors_of_its_mask(backend, mask, monkeypatch):
    _needs(backend)
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(stop, shape, generator=generator):
            return torch.randint(stop, shape, dtype=torch.int32, device="cuda", generator=generator)

        q, k, v, dout = (torch.randn(2, 300, 4, 64, device="cuda", generator=generator) for _ in range(4))
        spec = AttentionSpec(MASKS[mask](draw))
        found = {}
        for name, dtype in ((backend, torch.bfloat16), ("reference", torch.float32)):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, spec, backend=name)
            found[name] = [x.float() for x in (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))]
        _plan_no_more(monkeypatch)
        for ours, expected in zip(found[backend], found["reference"], strict=True):
            assert (ours - expected).norm() < 0.02 * expected.norm()


def _needs(backend):
    reason = HOPPER.unavailable(torch.device("cuda"))
    if backend == "hopper" and reason is not None:
        pytest.skip(reason)


def _plan_no_more(monkeypatch):
    names = ("forward", "backward", "rows", "prepare", "dkdv", "dq", "finish")
    for launches in (launch, hopper):
        for name in names:
            monkeypatch.setattr(launches, f"{name}_launch", None, raising=False)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "k is v"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("more", [False, True], ids=["plain", "more"])
def test_every_call_computes_with_its_own_tensors(backend, shared, packed, more, monkeypatch):
    """The first call with a key caches its launches; later calls only fill in their tensors."""
    _needs(backend)
    lead = (400,) if packed else (2, 200)
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        q, k, v, dout = (torch.randn(*lead, 4, 64, device="cuda", generator=generator) for _ in range(4))
        cu = torch.tensor([0, 100 + seed, 400], dtype=torch.int32, device="cuda")
        packing = Packing(cu, cu) if packed else None
        rng, sinks = (RngState(seed), torch.rand(4, device="cuda", generator=generator)) if more else (None, None)
        spec = AttentionSpec(Causal(), dropout=0.25 if more else 0.0)
        found = {}
        for name, dtype in ((backend, torch.bfloat16), ("reference", torch.float32)):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            operands = (leaves[0], leaves[1], leaves[1]) if shared else leaves
            out = attention(*operands, spec, packing=packing, rng=rng, sinks=sinks, backend=name)
            grads = torch.autograd.grad(out, leaves[: 2 if shared else 3], dout.to(dtype))
            found[name] = [x.float() for x in (out, *grads)]
        _plan_no_more(monkeypatch)
        for ours, expected in zip(found[backend], found["reference"], strict=True):
            assert (ours - expected).norm() < 0.02 * expected.norm()


class Recorder:
    """Replaces a kernel and records its arguments."""

    __name__ = "recorder"

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


def test_tracing_launches_nothing():
    """Under torch.compile a launch runs after a graph break, with real tensors and numbers, or not at all."""
    kernel = Recorder()

    def call(x):
        Launch(kernel, (x.shape[0],), (x * 2, x.shape[1]), {"N": 3}).start()
        return x + 1

    x = torch.ones(4, 5)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(call, backend="eager", fullgraph=True, dynamic=True)(x)
    assert kernel.launched == []
    torch._dynamo.reset()
    torch.compile(call, backend="eager", dynamic=True)(x)
    ((grid, (doubled, columns), constants),) = kernel.launched
    assert (grid, columns, constants) == ((4,), 5, {"enable_fp_fusion": True, "N": 3})
    assert type(doubled) is torch.Tensor and torch.equal(doubled, 2 * x)
