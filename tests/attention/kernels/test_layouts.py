"""Tensors with any memory layout: strided inputs of the backward, and rows whose offsets exceed 32 bits."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

from flash_train.attention import AttentionSpec, Causal
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels.families import HOPPER
from flash_train.attention.kernels.hopper import launch as hopper
from flash_train.attention.kernels.portable import launch
from tests.support.attention.cases.named import BY_NAME, on_card
from tests.support.attention.cases.problem import STRIDED, Case, restride, spread_rows
from tests.support.attention.contract import run
from tests.support.attention.devices import on_devices


def at_size(case, device):
    """The case for the interpreter; on a GPU with sizes that cross several tiles, in bf16."""
    return replace(on_card(case), dtype=torch.bfloat16) if device == "cuda" else case


@on_devices
@pytest.mark.parametrize("strided", STRIDED)
def test_backward_of_strided_inputs(strided, device):
    case = at_size(replace(BY_NAME["strided-packed"], strided=strided, dout=strided), device)
    errors = run(case, "triton", device)
    assert all(e.ok for e in errors), errors


@on_devices
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("far", ["q", "k", "v", "dout"])
def test_rows_with_offsets_above_32_bits(far, packed, device):
    n = 150 if device == "cuda" else 20
    case = Case("far", ((n, n),), far=far, packed=packed, dtype=torch.float16)
    errors = run(case, "triton", device)
    assert all(e.ok for e in errors), errors


def kernel_families(device):
    yield launch
    if device == "cuda" and HOPPER.unavailable(torch.device("cuda", 0)) is None:
        yield hopper


@on_devices
@pytest.mark.parametrize("layout", [*STRIDED, "far"])
def test_backward_of_strided_out_and_lse(layout, device):
    """The backward operator, called with the strides that a compiler may choose for its own tensors."""
    torch.manual_seed(0)
    n = 140 if device == "cuda" else 40
    q, k, v, dout = (torch.randn(1, n, 2, 64, device=device, dtype=torch.float16) for _ in range(4))
    call = launch.Call(*operands_of(q, k, AttentionSpec(Causal()), None, None, (0, 0, 0, 0), None, None))

    def place(x):
        return spread_rows(x) if layout == "far" else restride(x, layout)

    for family in kernel_families(device):
        out, lse = family.forward(q, k, v, call)
        right = family.backward(dout, None, q, k, v, out, lse, call)[:3]
        columns = torch.full((1, 2, n, 3), float("nan"), device=device)[..., 1]
        columns.copy_(lse)
        got = family.backward(dout, torch.zeros_like(columns), q, k, v, place(out), columns, call)[:3]
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@on_devices
def test_results_are_written_into_given_tensors(device):
    """An output may be a slice of the heads, and a gradient a contiguous slice; their neighbours stay as they were."""
    torch.manual_seed(0)
    n = 140 if device == "cuda" else 40
    q, k, v, dout = (torch.randn(1, n, 2, 64, device=device, dtype=torch.float16) for _ in range(4))
    call = launch.Call(*operands_of(q, k, AttentionSpec(Causal()), None, None, (0, 0, 0, 0), None, None))
    for family in kernel_families(device):
        right, lse = family.forward(q, k, v, call)
        heads = torch.full((1, n, 4, 64), float("nan"), device=device, dtype=torch.float16)
        out, again = family.forward(q, k, v, call, heads[:, :, 1:3])
        assert torch.equal(heads[:, :, 1:3], right) and torch.equal(out, right) and torch.equal(again, lse)
        assert heads[:, :, [0, 3]].isnan().all()
        rows = [torch.full((3, n, 2, 64), float("nan"), device=device, dtype=torch.float16) for _ in range(2)]
        expected = family.backward(dout, None, q, k, v, right, lse, call)[:3]
        got = family.backward(dout, None, q, k, v, out, lse, call, False, (rows[0][1:2], None, rows[1][1:2]))[:3]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        for whole, a in ((rows[0], got[0]), (rows[1], got[2])):
            assert torch.equal(whole[1:2], a) and whole[[0, 2]].isnan().all()


@on_devices
@pytest.mark.parametrize("entries", [((0, 40), (5, 5), (0, 7)), ((3, 20), (0, 33))], ids=["no-queries", "few-queries"])
def test_entries_with_fewer_queries_than_a_tile(entries, device):
    """Grouped heads, and loops without a step: no step may be loaded ahead."""
    case = Case("short", entries, heads=4, kv_heads=1, packed=True, band=BY_NAME["full"].band)
    errors = run(at_size(case, device), "triton", device)
    assert all(e.ok for e in errors), errors
