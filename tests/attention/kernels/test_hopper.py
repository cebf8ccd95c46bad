"""Hopper's kernels fulfil the contract in the Gluon emulator, without a GPU."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention import AttentionSpec, Causal, attention, flash_attn_func
from flash_train.attention.kernels.hopper import launch, tiles
from flash_train.attention.kernels.hopper.descriptors import describable
from flash_train.attention.kernels.hopper.online_softmax import WARP_EXCEEDS
from flash_train.attention.kernels.launch_cache import TensorSignature
from flash_train.attention.kernels.launch_options import launch_options
from flash_train.attention.kernels.tile_lists import list_tiles
from flash_train.attention.masks import Document, Full, Tree, Window
from tests.support.attention.cases.hopper import LISTED, MANY_HEADS, WIDE, same_lengths
from tests.support.attention.cases.named import BY_NAME, CASES
from tests.support.attention.cases.problem import Case, build
from tests.support.attention.cases.recipes import Blocks, Documents
from tests.support.attention.contract import run
from tests.support.attention.emulated import ASSEMBLY, hopper_on_cpu
from tests.support.tiers import slow_after

#: cases of the contract that these kernels do not take, and why
REFUSED = {
    "no-keys": "there are no keys",
    "head-dim-1": "TMA takes multiples of 16 bytes",
    "strided-columns": "TMA takes multiples of 16 bytes",
    "narrower-values": "TMA takes multiples of 16 bytes",
    "dropout-unaligned-shard": "no multiple of 16",
    "dropout-unaligned-pieces": "no multiple of 16",
    "all-terms": "no multiple of 16",
    **dict.fromkeys(("blocks", "blocks-gqa", "blocks-packed", "blocks-empty", "everything"), "not multiples of 128"),
}
ONE_TILE = [case for case in CASES if case.name not in REFUSED]


OURS = ["hopper_forward", "hopper_prepare", "hopper_backward", "hopper_finish"]


def kernels_of(case, repeatable=False):
    """Names of the kernels that a call runs: dQ has a separate kernel for wide heads and for some features."""
    if case.head_dim > 128:
        return [*OURS[:2], "hopper_backward_wide", "hopper_backward_dq"]
    return [*OURS[:3], "hopper_backward_dq"] if repeatable or (case.slopes and case.learns) else OURS


def check(case, seed=0, repeatable=False, **options):
    with hopper_on_cpu(seed, **options) as ran:
        errors = run(case, "hopper", "cpu")
    assert all(e.ok for e in errors), errors
    ours = [name for name in ran if name != list_tiles.__name__]  # which runs before any that follows lists
    assert ours == kernels_of(case, repeatable) * (case.layout.rows(0) > 0)


@pytest.mark.parametrize("case", ONE_TILE, ids=str)
def test_contract(case):
    check(replace(case, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["gqa", "packed-cross", "softcap", "alibi-fixed", "dropout", "tree"])
def test_contract_in_fp16(name):
    check(replace(BY_NAME[name], dtype=torch.float16), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_calls_with_several_tiles(case):
    """Also in groups of consecutive heads: of one key head, and finally of two."""
    case = replace(case, dtype=torch.bfloat16)
    check(case)
    with launch_options(heads_per_group=1):
        check(case, seed=1, programs=5)


@pytest.fixture
def again(monkeypatch):
    """Records whether weights were too large, for each check by a consumer."""
    results, exceeds = [], ASSEMBLY[WARP_EXCEEDS.value]

    def tell(sums):
        found = exceeds(sums)
        results.append(bool(found.any()))
        return found

    monkeypatch.setitem(ASSEMBLY, WARP_EXCEEDS.value, tell)
    return results


DOCUMENTS = Document(torch.tensor([150, 20, 230]).repeat_interleave(torch.tensor([150, 20, 230])).int())
MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": Window(120, 0),
    "both-sides": Window(100, 70),
    "documents": DOCUMENTS,
    "causal-documents": Causal() & DOCUMENTS,
    "tree": Causal() & Tree([-1, *(max(0, i - 1 - i % 3) for i in range(1, 60))]),
}


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_every_block_is_computed_once(mask, head_dim, again):
    """With scores of similar size no block is recomputed: the loop over keys starts at a block that the queries see."""
    q, k, v = torch.randn(3, 1, 400, 2, head_dim, generator=torch.Generator().manual_seed(0)).half()
    with hopper_on_cpu():
        attention(q, k, v, AttentionSpec(MASKS[mask]), backend="hopper")
    assert again and not any(again)


@pytest.mark.parametrize("case", [case for case in WIDE if case.name.startswith("large-scores")], ids=str)
def test_large_scores_are_recomputed(case, again):
    check(replace(case, dtype=torch.bfloat16))
    assert any(again) and not all(again)


@pytest.mark.parametrize("case", slow_after(1, MANY_HEADS), ids=str)
def test_dq_accumulators_are_converted(case, monkeypatch):
    """The backward finishes dQ of the first heads; the kernel after it finishes dQ of the last two heads."""
    launched, finish = [], launch.finish_launch
    monkeypatch.setattr(launch, "finish_launch", lambda *args: launched.append(finish(*args)) or launched[-1])
    with launch_options(heads_per_group=1):
        check(replace(case, dtype=torch.bfloat16))
    slots, heads = launched[0].arguments[-2:]
    assert launched[0].grid[0] == slots * heads * 2 // 6


@pytest.mark.parametrize("case", slow_after(4, [BY_NAME["gqa"], BY_NAME["everything"], *WIDE]), ids=str)
def test_repeatable_gradients(case):
    """With ``torch.use_deterministic_algorithms`` a separate kernel computes dQ."""
    if case.name == "everything":
        case = replace(case, terms=(Documents(20), Blocks((128, 128), 0.8)), packed=False, tail=(0, 0), slopes="")
        case = replace(case, lengths=same_lengths(150, 150))
    torch.use_deterministic_algorithms(True)
    try:
        check(replace(case, dtype=torch.bfloat16), repeatable=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tile", slow_after(1, [(3, 128, 2, 3, 3), (3, 64, 1, 2, 3), (2, 64, 2, 4, 2, False)]), ids=str)
def test_other_tiles(tile, monkeypatch):
    """Three consumers, and consumers that do not alternate."""
    monkeypatch.setitem(tiles.FORWARD, 64, tiles.ForwardTile(*tile))
    check(replace(WIDE[0], dtype=torch.bfloat16))
    check(replace(WIDE[3], dtype=torch.bfloat16), seed=1)


@pytest.mark.parametrize("case", slow_after(1, [WIDE[0], WIDE[1], WIDE[3], LISTED]), ids=str)
def test_long_calls(case):
    """With the tiles that narrow heads use for long sequences of keys."""
    with launch_options(long_walk=0):
        check(replace(case, dtype=case.dtype if case is LISTED else torch.bfloat16))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("far", ["q", "k", "v", "dout"])
def test_rows_with_offsets_above_32_bits(far, packed):
    """Row offsets inside a tile exceed 2**31 elements."""
    case = Case("far", same_lengths(140), heads=1, kv_heads=1, head_dim=64, far=far, packed=packed, dtype=torch.float16)
    check(case)


def test_rows_that_tma_cannot_reach_are_refused():
    def form(shape, stride):
        return TensorSignature(shape, stride, torch.bfloat16, 0)

    dense, rows = form((1, 9, 2, 64), (1152, 128, 64, 1)), 2**30 + 1
    assert launch._refusal(dense, dense, dense, aligned=True, blocks=None) is None
    many = form((1, rows, 2, 64), (128 * rows, 128, 64, 1))
    assert "has 1073741825 rows" in launch._refusal(dense, many, dense, aligned=True, blocks=None)
    for far in (form((1, 9, 2, 64), (2**40, 2**39, 64, 1)), form((9, 2, 64), (2**34, 64, 1))):
        assert not describable(far)
    assert describable(form((9, 2, 64), (2**34 - 8, 64, 1))) and describable(form((1, 9, 2, 64), (2**40, 2**38, 64, 1)))


def test_calls_without_queries_accept_any_strides():
    k = torch.randn(2, 20, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)[:, :0].expand(2, 0, 1, 64).requires_grad_()
    with hopper_on_cpu():
        out = attention(q, k, k, backend="hopper")
        out.sum().backward()
    assert out.shape == q.shape == q.grad.shape and not k.grad.any()


def test_deterministic_is_not_promised():
    x = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    with hopper_on_cpu() as ran, pytest.raises(ValueError, match="deterministic=True, and backend=hopper"):
        flash_attn_func(x, x, x, deterministic=True, backend="hopper")
    assert ran == []


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_refused(name):
    with hopper_on_cpu() as ran, pytest.raises(ValueError, match="the hopper backend cannot run this") as raised:
        run(replace(BY_NAME[name], dtype=torch.bfloat16), "hopper", "cpu")
    assert REFUSED[name] in str(raised.value) and str(raised.value).endswith("; flash can")
    assert ran == []


def test_other_devices_are_refused():
    x = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the hopper backend cannot run here"):
        attention(x, x, x, AttentionSpec(Causal()), backend="hopper")


@pytest.mark.parametrize("case", [WIDE[0], WIDE[6]], ids=str)
def test_output_is_bitwise_equal_for_any_schedule(case):
    """The forward is bitwise equal for any order of partitions and copies, and any number of processors."""
    problem = build(replace(case, dtype=torch.bfloat16), "cpu")
    results = []
    for seed, programs in ((0, 1), (1, 3), (2, 7)):
        with hopper_on_cpu(seed, programs):
            results.append(attention(*(problem.inputs[x] for x in "qkv"), problem.spec, backend="hopper"))
    assert all(torch.equal(out, results[0]) for out in results)


@pytest.mark.parametrize(("batch", "rows"), [(0, 40), (2, 0)])
def test_sinks_without_queries(batch, rows):
    """Nothing is launched, and the gradient of the sinks is 0."""
    q, k = (torch.randn(batch, n, 2, 64, dtype=torch.bfloat16, requires_grad=True) for n in (rows, 40))
    sinks = torch.zeros(2, requires_grad=True)
    with hopper_on_cpu(0) as ran:
        attention(q, k, k, AttentionSpec(Causal()), sinks=sinks, backend="hopper").sum().backward()
    assert not ran and sinks.grad.eq(0).all() and k.grad.eq(0).all()
