"""A step of AdamW as one kernel over many weights of a CUDA device.

The step is memory-bound. This kernel reads and writes every number once, 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flash_train.attention.dropout import PHILOX_ROUNDS
from flash_train.optim.formats import CODE_BLOCK, DECADES, DRAW_BLOCK, decade_bounds, top_bound

BLOCK = DRAW_BLOCK  # elements per program
PLANE = BLOCK // 4  # elements that a program updates at a time; each thread moves 16 bytes of a bf16 weight
ROUNDS = tl.constexpr(PHILOX_ROUNDS)
CODES = tl.constexpr(CODE_BLOCK)
LAST_DECADE = tl.constexpr(DECADES - 1)
SIGNED_BOUNDS = tl.constexpr(decade_bounds(True))
UNSIGNED_BOUNDS = tl.constexpr(decade_bounds(False))
SIGNED_TOP = tl.constexpr(top_bound(True))
UNSIGNED_TOP = tl.constexpr(top_bound(False))
LOG2_10 = tl.constexpr(3.321928094887362)
NAN = tl.constexpr(0x7FC0)  # as bf16
# bf16 numbers are int16 here, since Triton's interpreter computes bf16 wrongly
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.int16, torch.float16: tl.float16, torch.uint8: tl.uint8}


@triton.jit(do_not_specialize=["count", "step", "seed_low", "seed_high", "stream"])
def adamw_kernel(
    addresses, count, sizes, numbers, block_tensor, block_start, grad_scale, decay, step_size, beta1, beta2, unbias2,
    eps, step, seed_low, seed_high, stream,
    WEIGHT: tl.constexpr, MOMENT: tl.constexpr, MASTER: tl.constexpr, ALIGNED: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    """Update one block of one weight.

    addresses: int64 (7 · count,), of the weights, their gradients, the averages of the gradients and of their squares,
        the scales of both averages (of 8-bit ones), and the lower halves of the weights (of exact ones).
    sizes: int64 (count,), elements of each weight.
    numbers: int32 (count,), by which a weight's random numbers differ from another's.
    block_tensor, block_start: int32 (programs,), the weight that a program updates and the index of its block in it.
    grad_scale: fp32 scalar that divides every gradient, or None.
    decay = lr · weight_decay, step_size = lr / (1 − beta1^step), unbias2 = 1 / √(1 − beta2^step).
    step, seed_low, seed_high, stream: what the random numbers depend on, as in `formats.random_words`; a sharded
        weight has two streams for each part.
    """
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    index = tl.load(block_start + block)
    start = index.to(tl.int64) * (4 * PLANE)
    left = tl.load(sizes + tensor) - start
    number = tl.load(numbers + tensor)
    factor = 1.0
    if grad_scale is not None:
        factor = 1.0 / tl.load(grad_scale)
    weight = _pointer(addresses + tensor, WEIGHT, ALIGNED) + start
    gradient = _pointer(addresses + count + tensor, WEIGHT, ALIGNED) + start
    average = _pointer(addresses + 2 * count + tensor, MOMENT, ALIGNED) + start
    square = _pointer(addresses + 3 * count + tensor, MOMENT, ALIGNED) + start
    average_scale = average
    square_scale = square
    lower = weight
    if MOMENT == tl.uint8:
        average_scale = _pointer(addresses + 4 * count + tensor, tl.float32, False) + start // CODES
        square_scale = _pointer(addresses + 5 * count + tensor, tl.float32, False) + start // CODES
    if MASTER == "exact":
        lower = _pointer(addresses + 6 * count + tensor, tl.int16, ALIGNED) + start
    if left >= 4 * PLANE:  # a whole block needs no mask, so its loads can be vectorised
        _update(
            weight, gradient, average, square, average_scale, square_scale, lower, 4 * PLANE, index, number, factor,
            decay, step_size, beta1, beta2, unbias2, eps, step, seed_low, seed_high, stream,
            WEIGHT, MOMENT, MASTER, False, PLANE,
        )  # fmt: skip
    else:
        _update(
            weight, gradient, average, square, average_scale, square_scale, lower, left, index, number, factor,
            decay, step_size, beta1, beta2, unbias2, eps, step, seed_low, seed_high, stream,
            WEIGHT, MOMENT, MASTER, True, PLANE,
        )  # fmt: skip


@triton.jit
def _update(
    weight, gradient, average, square, average_scale, square_scale, lower, left, index, number, factor,
    decay, step_size, beta1, beta2, unbias2, eps, step, seed_low, seed_high, stream,
    WEIGHT: tl.constexpr, MOMENT: tl.constexpr, MASTER: tl.constexpr, MASKED: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    if MOMENT == tl.int16:
        a0, a1, a2, a3 = _draw(index, number, step, stream, seed_low, seed_high, PLANE)
    if MASTER == "stochastic":
        b0, b1, b2, b3 = _draw(index, number, step, stream + 1, seed_low, seed_high, PLANE)
    for plane in tl.static_range(4):
        at = plane * PLANE + tl.arange(0, PLANE)
        mask = at < left if MASKED else None
        lower_bits = tl.zeros([PLANE], tl.int32)
        if MASTER == "exact":
            lower_bits = tl.load(lower + at, mask=mask).to(tl.int32)
        w = _load(weight + at, mask, lower_bits, WEIGHT)
        g = _load(gradient + at, mask, tl.zeros([PLANE], tl.int32), WEIGHT) * factor
        if MOMENT == tl.uint8:
            m = _load_codes(average + at, average_scale + plane * (PLANE // CODES), mask, left, plane, True, PLANE)
            v = _load_codes(square + at, square_scale + plane * (PLANE // CODES), mask, left, plane, False, PLANE)
        else:
            m = _load(average + at, mask, tl.zeros([PLANE], tl.int32), MOMENT)
            v = _load(square + at, mask, tl.zeros([PLANE], tl.int32), MOMENT)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w -= decay * w + step_size * m / (tl.sqrt(v) * unbias2 + eps)  # 1 - decay would round away a small decay

        bits = w.to(tl.int32, bitcast=True)
        if MASTER == "exact":
            is_number = w == w
            tl.store(weight + at, tl.where(is_number, (bits + 0x8000) >> 16, NAN).to(tl.int16), mask=mask)
            tl.store(lower + at, tl.where(is_number, bits, 0).to(tl.int16), mask=mask)
        elif MASTER == "stochastic":
            word = _of_plane(b0, b1, b2, b3, plane)
            tl.store(weight + at, _round(w, (word & 0xFFFF).to(tl.int32)), mask=mask)
        elif WEIGHT == tl.int16:
            tl.store(weight + at, _round(w, 0x7FFF + (bits >> 16 & 1)), mask=mask)
        else:
            tl.store(weight + at, w.to(WEIGHT), mask=mask)
        if MOMENT == tl.uint8:
            _store_codes(average + at, average_scale + plane * (PLANE // CODES), m, mask, left, plane, True, PLANE)
            _store_codes(square + at, square_scale + plane * (PLANE // CODES), v, mask, left, plane, False, PLANE)
        elif MOMENT == tl.int16:
            word = _of_plane(a0, a1, a2, a3, plane)
            tl.store(average + at, _round(m, (word & 0xFFFF).to(tl.int32)), mask=mask)
            tl.store(square + at, _round(v, (word >> 16).to(tl.int32)), mask=mask)
        else:
            tl.store(average + at, m.to(MOMENT), mask=mask)
            tl.store(square + at, v.to(MOMENT), mask=mask)


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _draw(index, number, step, stream, seed_low, seed_high, PLANE: tl.constexpr):
    zero = tl.zeros([PLANE], tl.uint32)
    return tl.philox_impl(
        (index * PLANE + tl.arange(0, PLANE)).to(tl.uint32),
        zero + number.to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + stream.to(tl.uint32),
        (number * 0).to(tl.uint32) + seed_low.to(tl.uint32),
        (number * 0).to(tl.uint32) + seed_high.to(tl.uint32),
        ROUNDS,
    )


@triton.jit
def _of_plane(word0, word1, word2, word3, plane: tl.constexpr):
    """The word of each Philox call that serves a plane."""
    word = word0
    if plane == 1:
        word = word1
    elif plane == 2:
        word = word2
    elif plane == 3:
        word = word3
    return word


@triton.jit
def _load(pointers, mask, lower, TYPE: tl.constexpr):
    """Load numbers as fp32; ``lower`` is added to the bits of bf16 numbers."""
    stored = tl.load(pointers, mask=mask)
    if TYPE == tl.int16:
        x = ((stored.to(tl.int32) << 16) + lower).to(tl.float32, bitcast=True)
    else:
        x = stored.to(tl.float32)
    return x


@triton.jit
def _round(x, add):
    """The upper half of fp32 numbers plus ``add``, int16: bf16 numbers. NaN stays NaN."""
    upper = (x.to(tl.int32, bitcast=True) + add) >> 16
    return tl.where(x == x, upper, NAN).to(tl.int16)


@triton.jit
def _scales(pointer, left, plane: tl.constexpr, PLANE: tl.constexpr):
    """Pointers to the scales of a plane, and which of them exist."""
    block = tl.arange(0, PLANE // CODES)
    return pointer + block, plane * PLANE + block * CODES < left


@triton.jit
def _load_codes(pointers, scale, mask, left, plane: tl.constexpr, SIGNED: tl.constexpr, PLANE: tl.constexpr):
    code = tl.load(pointers, mask=mask).to(tl.int32)
    number = code
    if SIGNED:
        number = tl.where(code < 127, 127 - code, code - 127)
    place = number
    if not SIGNED:
        place = number + 1
    decade = (place.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of 2^decade values, or twice as many
    values = ((127 - decade) << 23).to(tl.float32, bitcast=True)  # 2^-decade
    first = decade
    if not SIGNED:
        first = decade - 1
    fraction = place.to(tl.float32) * values - 1.0 + 0.5 * values
    x = tl.exp2((first - LAST_DECADE).to(tl.float32) * LOG2_10) * (0.1 + 0.9 * fraction)
    if SIGNED:
        x = tl.where(code == 255, 1.0, tl.where(code < 127, -x, x))
    else:
        x = tl.where(code == 255, 1.0, x)
    x = tl.where(number == 0, 0.0, x)
    scales, exist = _scales(scale, left, plane, PLANE)
    scale_values = tl.load(scales, mask=exist, other=0.0)
    blocks = tl.reshape(x, [PLANE // CODES, CODES]) * scale_values[:, None]
    return tl.reshape(blocks, [PLANE])


@triton.jit
def _store_codes(pointers, scale, x, mask, left, plane: tl.constexpr, SIGNED: tl.constexpr, PLANE: tl.constexpr):
    if mask is not None:
        x = tl.where(mask, x, 0.0)
    blocks = tl.reshape(x, [PLANE // CODES, CODES])
    largest = tl.max(tl.abs(blocks), 1)
    y = tl.reshape(blocks * (1 / tl.maximum(largest, 1.1754943508222875e-38))[:, None], [PLANE])
    magnitude = tl.abs(y)
    decade = tl.zeros([PLANE], tl.int32)
    for i in tl.static_range(LAST_DECADE):
        if SIGNED:
            decade += (magnitude > SIGNED_BOUNDS[i]).to(tl.int32)
        else:
            decade += (magnitude > UNSIGNED_BOUNDS[i]).to(tl.int32)
    count = 1 << decade
    if not SIGNED:
        count = count * 2
    up = tl.exp2((decade - LAST_DECADE).to(tl.float32) * -LOG2_10)
    place = tl.floor((magnitude * up - 0.1) * (count.to(tl.float32) * (1 / 0.9))).to(tl.int32)
    number = count + tl.minimum(tl.maximum(place, 0), count - 1)
    if SIGNED:
        number = tl.where(magnitude < 0.275e-6, 0, number)
        code = tl.where(y < 0, 127 - number, tl.where(y > SIGNED_TOP, 255, 127 + number))
    else:
        code = tl.where(y > UNSIGNED_TOP, 255, tl.where(magnitude == 0, 0, number - 1))
    tl.store(pointers, code.to(tl.uint8), mask=mask)
    scales, exist = _scales(scale, left, plane, PLANE)
    tl.store(scales, largest, mask=exist)
