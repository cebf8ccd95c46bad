"""Values have Triton's dtypes and promotion; device functions run as Python, however they are called."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.support.gluon import OutOfBounds, launch

ROWS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


LIMIT = gl.constexpr(5)


class State(NamedTuple):
    base: Any
    rules: Any
    nothing: Any


@triton.jit
def below(x, limit):
    return x < limit


@triton.jit
def odd(x):
    return x % 2 == 1


@triton.jit
def apply(state, x, N: tl.constexpr):
    """Bits of the rules that hold, and the smallest power of two that is at least N."""
    tl.static_assert(len(state.rules) == 2)
    found = x * 0
    for i in tl.static_range(len(state.rules)):
        found += tl.where(state.rules[i][0](x, *state.rules[i][1]), 1 << i, 0)
    power = tl.full([], 1, tl.int32)
    while power < N:
        power *= 2
    return found, power


@gluon.jit
def language(out, state, count, N: gl.constexpr):
    if gl.program_id(0) >= count:
        return
    x = gl.arange(0, 16, ROWS)
    found, power = apply(state, x, N)
    if state.nothing is None:
        found += power * 100
    for i in range(1, count, 2):
        found += min(i, LIMIT) * 10000
    gl.store(state.base + gl.program_id(0) * 16 + x, found)


def test_language():
    out = torch.zeros(3, 16, dtype=torch.int32)
    state = State(out, ((below, (6,)), (odd, ())), None)
    launch(language, 3, out, state, 2, 9)
    x = torch.arange(16)
    assert torch.equal(out[0].long(), (x < 6) + 2 * (x % 2) + 1600 + 10000)
    assert torch.equal(out[1], out[0]) and out[2].eq(0).all()
    with pytest.raises(OutOfBounds, match=r"16 of 16 elements lie outside state.*language, test_values.py:\d+"):
        launch(language, 3, out, state._replace(base=out[:2]), 3, 9)


@gluon.jit
def integers(out, a, b):
    a = gl.load(a + gl.arange(0, 8, ROWS))
    b = gl.load(b + gl.arange(0, 8, ROWS))
    unsigned = a.to(gl.uint32)
    gl.static_assert((unsigned * b).dtype == gl.uint32)
    gl.static_assert((a + 2**20).dtype == gl.int32)
    gl.static_assert((a / b).dtype == gl.float32)
    values = (
        a * b,
        a // b,
        a % b,
        a >> 3,
        unsigned >> 3,
        gl.umulhi(unsigned, b.to(gl.uint32)),
        a.to(gl.int8),
        a // b * b,
    )
    for i in gl.static_range(len(values)):
        gl.store(out + i * 8 + gl.arange(0, 8, ROWS), values[i].to(gl.int64))


def test_integers():
    a = torch.tensor([7, -7, 2**31 - 1, -(2**31), 123456789, -5, 300, 1], dtype=torch.int32)
    b = torch.tensor([2, 2, 3, 7, -98765, -3, -7, 2**31 - 1], dtype=torch.int32)
    out = torch.zeros(8, 8, dtype=torch.int64)
    launch(integers, 1, out, a, b)
    wide, other = a.long(), b.long()
    quotient = wide.div(other, rounding_mode="trunc")
    high = [(int(x) % 2**32) * (int(y) % 2**32) >> 32 for x, y in zip(a, b, strict=True)]
    wanted = [(wide * other).int(), quotient, wide - quotient * other, wide >> 3, (wide % 2**32) >> 3, high]
    wanted += [a.to(torch.int8), quotient * other]
    for row, expected in zip(out, wanted, strict=True):
        assert row.tolist() == list(map(int, expected))


@gluon.jit
def floats(out, x, y):
    i = gl.arange(0, 1024, ROWS)
    a = gl.load(x + i)
    b = gl.load(y + i)
    gl.static_assert((a * 2.0).dtype == gl.bfloat16)
    gl.static_assert((a * b.to(gl.float32)).dtype == gl.float32)
    values = (a + b, a * b, a * b.to(gl.float32), a / b, gl.exp2(a.to(gl.float32)).to(gl.bfloat16))
    for k in gl.static_range(len(values)):
        gl.store(out + k * 1024 + i, values[k].to(gl.float32))


def test_bfloat16_is_rounded():
    x, y, out = randn(2048)[:1024], randn(2048)[1024:], torch.zeros(5, 1024)
    launch(floats, 1, out, x, y)
    exact = x.float() * y.float()
    assert torch.equal(out[0], (x + y).float()) and torch.equal(out[1], exact.bfloat16().float())
    assert torch.equal(out[2], exact) and torch.equal(out[3], x.float() / y.float())
    torch.testing.assert_close(out[4], x.float().exp2(), rtol=2**-8, atol=0)


@gluon.jit
def shapes(out, x):
    tile = gl.load(x + gl.arange(0, 8, gl.SliceLayout(1, TILE))[:, None] * 4 + gl.arange(0, 4, ROWS)[None, :])
    both = gl.join(tile, -tile)
    again, negated = gl.split(both)
    gl.store(out + gl.arange(0, 32, ROWS), gl.reshape(gl.permute(tile, (1, 0)), [32]))
    gl.store(out + 32 + gl.arange(0, 8, ROWS), gl.max(tile, 1) + gl.sum(negated, 1) + gl.min(again, axis=1))
    masked = gl.load(x + gl.arange(0, 8, ROWS), mask=gl.arange(0, 8, ROWS) < 4, other=3.0)
    gl.store(out + 40 + gl.arange(0, 8, ROWS), masked)
    gl.atomic_add(out + gl.arange(0, 8, ROWS) // 4 + 48, masked)
    gl.atomic_max(out + 50, gl.max(masked, 0))


def test_shapes():
    x, out = randn(8, 4, dtype=torch.float32), torch.zeros(51)
    launch(shapes, 1, out, x)
    assert torch.equal(out[:32], x.T.reshape(-1))
    torch.testing.assert_close(out[32:40], x.amax(1) - x.sum(1) + x.amin(1))
    assert torch.equal(out[40:44], x[0]) and out[44:48].eq(3).all()
    torch.testing.assert_close(out[48:], torch.stack([x[0].sum(), torch.tensor(12.0), torch.tensor(3.0)]))


@gluon.jit
def random_bits(out, key):
    counter = gl.arange(0, 64, ROWS).to(gl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(counter, counter * 0, counter * 0, counter * 0, key.to(gl.uint32), 0, 7)
    gl.store(out + gl.arange(0, 64, ROWS), (w0 ^ w1 ^ w2 ^ w3).to(gl.int64))
    shifted = gl.inline_asm_elementwise("shr.u32 $0, $1, 9;", "=r,r", [w0], dtype=gl.uint32, is_pure=True, pack=1)
    gl.store(out + 64 + gl.arange(0, 64, ROWS), (shifted - (w0 >> 9)).to(gl.int64))


def philox(counter, key, rounds):
    words, keys, top = [counter, 0, 0, 0], [key, 0], 2**32
    for _ in range(rounds):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b // top ^ words[1] ^ keys[0], b % top, a // top ^ words[3] ^ keys[1], a % top]
        keys = [(keys[0] + 0x9E3779B9) % top, (keys[1] + 0xBB67AE85) % top]
    return words


def test_philox_and_assembly():
    out = torch.ones(2, 64, dtype=torch.int64)
    launch(random_bits, 1, out, 1234, assembly={"shr.u32  $0, $1, 9;": lambda x: x >> np.uint32(9)})
    assert out[0].tolist() == [int(np.bitwise_xor.reduce(philox(i, 1234, 7))) for i in range(64)]
    assert out[1].eq(0).all()
    with pytest.raises(NotImplementedError, match="no Python function for: shr.u32"):
        launch(random_bits, 1, out, 1234)


@gluon.jit
def unknown(x):
    gl.histogram(gl.arange(0, 8, ROWS), 8)


def test_unsupported_features_raise():
    with pytest.raises(NotImplementedError, match="histogram"):
        launch(unknown, 1, torch.zeros(1))
