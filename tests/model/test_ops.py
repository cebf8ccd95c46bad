"""The PyTorch path of the fused operations: compared with fp64, in chunks and whole, and with bounded memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train.model import ops
from flash_train.model.rope import rope_tables
from tests.support.model.tiny import tiny_config
from tests.support.pages import ROOT


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def linear_problem(tokens: int, width: int, vocab_size: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, width, generator=generator) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    labels[::7] = ops.IGNORE_INDEX
    return hidden, weight, labels


@pytest.mark.parametrize("tokens", [1, 100, 128, 300])
def test_chunked_cross_entropy_equals_the_whole_with_gradients(monkeypatch, tokens):
    monkeypatch.setattr(ops, "CHUNK_TOKENS", 128)
    hidden, weight, labels = linear_problem(tokens, 32, 50)
    loss = ops.linear_cross_entropy(hidden, weight, labels) / 123.0  # the caller's scale reaches the backward
    got = torch.autograd.grad(loss, (hidden, weight))
    whole = F.cross_entropy(hidden @ weight.T, labels, ignore_index=ops.IGNORE_INDEX, reduction="sum") / 123.0
    expected = torch.autograd.grad(whole, (hidden, weight))
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not got[0][labels == ops.IGNORE_INDEX].any()


def test_cross_entropy_without_labels_is_zero_with_zero_gradients():
    hidden, weight, labels = linear_problem(10, 8, 20)
    loss = ops.linear_cross_entropy(hidden, weight, torch.full_like(labels, ops.IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(("autocast", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_cross_entropy_in_bf16_sums_in_fp32(autocast, dtype):
    hidden, weight, labels = linear_problem(3000, 32, 50, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = ops.linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    exact = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum")
    assert loss.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == dtype
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)


def test_full_logits_of_a_long_batch_are_never_allocated():
    tokens, vocab_size = 8 * ops.CHUNK_TOKENS, 259
    hidden, weight, labels = linear_problem(tokens, 16, vocab_size)
    with LargestTensor() as seen:
        ops.linear_cross_entropy(hidden, weight, labels).backward()
    assert seen.numel == ops.CHUNK_TOKENS * vocab_size
    with LargestTensor() as seen:  # and the measure would see them
        F.cross_entropy(hidden @ weight.T, labels)
    assert seen.numel == tokens * vocab_size


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_norm_and_swiglu_agree_with_fp64(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, 64, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.rand(64, generator=generator) + 0.5).to(dtype)
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    matrix = torch.randn(8, 64, generator=generator).to(dtype) / 8
    exact = F.linear(F.silu(x.double()) * y.double(), matrix.double())
    torch.testing.assert_close(ops.swiglu_linear(x, y, matrix).double(), exact, rtol=tolerance, atol=tolerance)


def test_a_norm_keeps_the_dtype_of_its_input_under_fp32_weights():
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    assert ops.rms_norm(x, torch.ones(8), 1e-5).dtype == torch.bfloat16


def test_rotary_equals_the_complex_rotation():
    torch.manual_seed(0)
    config = tiny_config(head_dim=16)
    q, k = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    positions = torch.tensor([0, 1, 2, 0, 1, 0])  # three documents
    cos, sin = rope_tables(config, positions)
    turn = torch.complex(cos, sin)[:, None]
    for got, x in zip(ops.apply_rotary(q, k, cos, sin), (q, k), strict=True):
        first, second = x.chunk(2, -1)
        expected = torch.complex(first, second) * turn
        torch.testing.assert_close(got, torch.cat((expected.real, expected.imag), -1))
    torch.testing.assert_close(ops.apply_rotary(q, k, cos, sin)[0][[0, 3, 5]], q[[0, 3, 5]])


def test_the_compute_dtype_follows_autocast():
    x = torch.zeros(1)
    assert ops.compute_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.compute_dtype(x) == torch.bfloat16


def test_model_kernels_in_the_interpreter():
    """Residual addition with its norm, and the linear cross entropy: as exact as PyTorch in fp32 and fp16."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    command = [sys.executable, "-m", "tests.support.model.interpreted_kernels"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("added", [True, False])
def test_add_rms_norm(added):
    draw = torch.Generator().manual_seed(0)
    x, update = (torch.randn(7, 12, generator=draw) for _ in range(2))
    weight = torch.rand(12, generator=draw)
    stream, *normed = ops.add_rms_norm(x, update if added else None, weight, 1e-5, uses=3)
    assert torch.equal(stream, x + update if added else x)
    assert len(normed) == 3
    for each in normed:
        torch.testing.assert_close(each, torch.nn.functional.rms_norm(stream, (12,), weight, 1e-5))
