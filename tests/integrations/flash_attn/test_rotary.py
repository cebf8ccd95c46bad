"""flash-attn's rotary functions compute what products of complex numbers do."""

import subprocess
import sys

import pytest
import torch

from flash_train.integrations.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from tests.support.integrations.rotary_reference import BOUNDARIES, rotations, turned
from tests.support.pages import ROOT

STEPS = torch.arange(5).expand(2, 5)


def tables(rows, half=4):
    return torch.randn(rows, half, dtype=torch.float64), torch.randn(rows, half, dtype=torch.float64)


def angles(rows, dim, base=10000.0):
    return torch.arange(rows, dtype=torch.float64)[:, None] * base ** -(torch.arange(0, dim, 2).double() / dim)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotation_and_gradient(interleaved, inplace):
    for case in rotations(torch.float64, interleaved):
        results = []
        for ours in (True, False):
            given = case.x.clone().requires_grad_()
            x = given * 1
            if ours:
                out = apply_rotary_emb(x, case.cos, case.sin, inplace=inplace, **case.options)
                assert (out is x) == inplace and torch.equal(x, given) != inplace
            else:
                out = turned(x, case.cos, case.sin, case.positions, interleaved)
            (out * torch.linspace(0, 1, out.numel()).view_as(out)).sum().backward()
            results.append((out, given.grad))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


def test_16_bits_round_once():
    for case in rotations(torch.bfloat16, False):
        exact = turned(case.x.double(), case.cos.double(), case.sin.double(), case.positions, False)
        plain = turned(case.x.float(), case.cos.float(), case.sin.float(), case.positions, False).bfloat16()
        found = apply_rotary_emb(case.x, case.cos, case.sin, **case.options)
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).norm() <= 1.01 * (plain.double() - exact).norm()


@pytest.mark.parametrize("own_keys", [False, True])
def test_queries_and_keys_in_one_tensor(own_keys):
    """Three layouts: five dimensions, grouped heads, and packed."""
    cos, sin, cos_k, sin_k = *tables(6), *tables(6)
    keys = (cos_k, sin_k) if own_keys else (cos, sin)
    given = (cos_k, sin_k) if own_keys else (None, None)
    qkv = torch.randn(2, 5, 7, 8, dtype=torch.float64)
    expected = torch.cat(
        [turned(qkv[:, :, :3], cos, sin, STEPS, False), turned(qkv[:, :, 3:5], *keys, STEPS, False), qkv[:, :, 5:]], 2
    )
    found = qkv.clone()
    assert apply_rotary_emb_qkv_(found, cos, sin, *given, num_heads_q=3) is found
    torch.testing.assert_close(found, expected)
    boundaries = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = apply_rotary_emb_qkv_(qkv.flatten(0, 1).clone(), cos, sin, *given, num_heads_q=3, cu_seqlens=boundaries)
    torch.testing.assert_close(packed, expected.flatten(0, 1))

    stacked = torch.randn(2, 5, 3, 2, 8, dtype=torch.float64)
    q, k, v = stacked.unbind(2)
    expected = torch.stack([turned(q, cos, sin, STEPS + 1, False), turned(k, *keys, STEPS + 1, False), v], 2)
    found = stacked.clone()
    assert apply_rotary_emb_qkv_(found, cos, sin, *given, seqlen_offsets=1, num_heads_q=2) is found
    torch.testing.assert_close(found, expected)
    kv = stacked[:, :, 1:].clone()
    assert apply_rotary_emb_kv_(kv, *keys, seqlen_offsets=torch.tensor([1, 1])) is kv
    torch.testing.assert_close(kv, expected[:, :, 1:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_turns_by_its_frequencies(interleaved):
    module = RotaryEmbedding(6, base=100.0, interleaved=interleaved)
    assert not module.state_dict() and module.inv_freq.dtype == torch.float32
    angle = angles(20, 6, 100.0)
    call = (angle.cos(), angle.sin(), torch.arange(2, 7).expand(2, 5), interleaved)
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64)
    expected = [turned(q, *call), turned(k, *call), v]
    close = {"rtol": 1e-5, "atol": 1e-5}  # the tables are computed in fp32
    torch.testing.assert_close(module(torch.stack([q, k, v], 2), seqlen_offset=2), torch.stack(expected, 2), **close)
    offsets = torch.tensor([2, 2], dtype=torch.int32)
    found_q, found_kv = module(q.clone(), torch.stack([k, v], 2), seqlen_offset=offsets, max_seqlen=7)
    torch.testing.assert_close(found_q, expected[0], **close)
    torch.testing.assert_close(found_kv, torch.stack(expected[1:], 2), **close)


def test_xpos_scales_queries_up_and_keys_down():
    module = RotaryEmbedding(8, scale_base=16)
    q, k = torch.randn(2, 1, 9, 1, 8, dtype=torch.float64)
    kv = torch.stack([k, k], 2)
    found_q, found_kv = module(q.clone(), kv, max_seqlen=30)
    scores = torch.einsum("bqhd,bkhd->qk", found_q, found_kv[:, :, 0])
    angle = angles(9, 8)
    base = (torch.arange(0, 8, 2).double() + 0.4 * 8) / (1.4 * 8)
    growth = base ** (torch.arange(9)[:, None] / 16)
    exact_q = turned(q, angle.cos() * growth, angle.sin() * growth, torch.arange(9)[None], False)
    exact_k = turned(k, angle.cos() / growth, angle.sin() / growth, torch.arange(9)[None], False)
    torch.testing.assert_close(scores, torch.einsum("bqhd,bkhd->qk", exact_q, exact_k), rtol=1e-4, atol=1e-4)
    norms = (module._cos_cached.square() + module._sin_cached.square()).sqrt()
    torch.testing.assert_close(norms, base ** ((torch.arange(30)[:, None] - 15) / 16), rtol=1e-4, atol=1e-4)


def test_tables_are_exact_after_a_cast_and_usable_after_inference():
    module, never_cast = RotaryEmbedding(8).to(torch.bfloat16), RotaryEmbedding(8)
    x = torch.randn(1, 300, 3, 2, 8)
    with torch.inference_mode():
        assert torch.equal(module(x.clone()), never_cast(x.clone()))
    assert module._cos_cached.is_inference()
    module(x[:, :3].clone())
    assert not module._cos_cached.is_inference()  # a backward could not save it
    assert torch.equal(module(x.clone()), never_cast(x.clone()))  # longer tables
    assert module(x[:, :3].bfloat16()).dtype == module._cos_cached.dtype == torch.bfloat16


def test_the_kernel_in_the_interpreter():
    command = [sys.executable, "-m", "tests.support.integrations.interpreted_rotary"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_the_kernel_on_the_card(interleaved, inplace):
    for case in rotations(torch.bfloat16, interleaved):
        call = (case.positions, interleaved)
        results = []
        for dtype, device in ((torch.float64, "cpu"), (torch.float32, "cpu"), (torch.bfloat16, "cuda")):
            given, cos, sin = (x.to(device, dtype) for x in (case.x, case.cos, case.sin))
            given.requires_grad_()
            if device == "cpu":
                out = turned(given, cos, sin, *call)
            else:
                options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in case.options.items()}
                out = apply_rotary_emb(given * 1, cos, sin, inplace=inplace, **options)
            out.sum().backward()
            results.append([x.detach().bfloat16().cpu().double() for x in (out, given.grad)])
            if dtype == torch.float64:
                results[0] = [x.detach() for x in (out, given.grad)]
        for exact, plain, found in zip(*results, strict=True):
            assert (found - exact).norm() <= 1.1 * (plain - exact).norm()


X = torch.randn(2, 5, 3, 8)
TABLES = (torch.randn(6, 4), torch.randn(6, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply_rotary_emb(X[0], *TABLES), r"x has shape \(5, 3, 8\): must be \(batch, seqlen, heads, head"),
        (lambda: apply_rotary_emb(X[..., :6], *TABLES), r"rotary_dim up to head_dim, 6"),
        (lambda: apply_rotary_emb(X, *(t.int() for t in TABLES)), "cos is torch.int32 on cpu"),
        (lambda: apply_rotary_emb(X, *TABLES, seqlen_offsets=2), r"cos has 6 rows: must have 7, seqlen_offsets \+"),
        (lambda: apply_rotary_emb(X, *TABLES, seqlen_offsets=torch.tensor([0, 2])), "position in rotary_cos"),
        (
            lambda: apply_rotary_emb(X, *TABLES, seqlen_offsets=torch.tensor([0.5, 1])),
            "seqlen_offsets is torch.float32",
        ),
        (lambda: apply_rotary_emb(X[0], *TABLES, cu_seqlens=BOUNDARIES), "cu_seqlens_q ends at 11"),
        (lambda: apply_rotary_emb_qkv_(X, *TABLES), r"qkv has shape \(2, 5, 3, 8\): must be \(batch, seqlen, 3, heads"),
        (lambda: apply_rotary_emb_qkv_(X, *TABLES, num_heads_q=2), "num_heads_q=2 and qkv has shape"),
        (lambda: apply_rotary_emb_kv_(X, *TABLES), r"must be \(batch, seqlen, 2, kv_heads, head_dim\)"),
        (lambda: RotaryEmbedding(8)(X, seqlen_offset=torch.zeros(2)), "max_seqlen=None: must be the number"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
