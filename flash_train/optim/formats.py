"""How weights and their moments are stored in 16 and 8 bits, in plain PyTorch. `kernel.py` does the same on a GPU.

**Exact master.** A bf16 weight and 16 further bits are one fp32 number: the weight is this number rounded to the
nearest bf16 (ties away from zero), and the further bits are its lower half. As integers,
``master = (weight << 16) + lower``, with a signed ``lower``.

**Stochastic rounding.** An fp32 number lies between two neighbouring bf16 numbers, and takes the upper one with the
probability that makes its mean exact: 16 random bits are added to its lower half, which is then cut off. The bits come
from Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), and depend only on
the seed, the step, the weight's number and the place in the weight.

**8-bit moments.** A block of 256 numbers has a scale, its largest magnitude, and each number has one of 256 values
between -1 and 1, or 0 and 1: the dynamic map of Dettmers et al., "8-bit optimizers via block-wise quantization"
(arXiv:2110.02861). It divides each of seven decades evenly, into twice as many values as the decade below.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flash_train.attention.dropout import philox

CODE_BLOCK = 256  # numbers that share a scale
DRAW_BLOCK = 2048  # numbers that share a row of Philox calls; each call serves four
DECADES = 7

# -- fp32 as bf16 and 16 further bits


def join_master(weight: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 number of a bf16 weight and its lower half, int16, both of any shape."""
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return (upper + lower.to(torch.int32)).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 weight and the lower half, int16, of an fp32 number. NaN stays NaN."""
    bits = master.view(torch.int32)
    upper = ((bits + 0x8000) >> 16).to(torch.int16)
    lower = (bits << 16 >> 16).to(torch.int16)
    is_nan = master.isnan()
    upper = torch.where(is_nan, torch.full_like(upper, 0x7FC0), upper)
    return upper.view(torch.bfloat16), lower.masked_fill(is_nan, 0)


# -- stochastic rounding


def round_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to bf16 with 16 random bits for each number, int32 from 0 to 65535. NaN stays NaN."""
    upper = ((x.view(torch.int32) + random) >> 16).to(torch.int16)
    return torch.where(x.isnan(), torch.full_like(upper, 0x7FC0), upper).view(torch.bfloat16)


def random_words(
    count: int, *, seed: int, step: int, number: int, stream: int, device: torch.device, block: int = 0
) -> Tensor:
    """Return a random 32-bit word for each of `count` numbers, int64.

    Numbers come in blocks of `DRAW_BLOCK`. Call i of block b serves the numbers i, i + 512, i + 1024 and i + 1536 of
    the block, with the counter ``(512 b + i, number, step, stream)``.

    Args:
        seed: the key, 64 bits.
        step: of the optimizer.
        number: of the weight.
        stream: tells draws for different purposes, and parts of a sharded weight, apart.
        block: of the first of these numbers.
    """
    calls = DRAW_BLOCK // 4
    blocks = -(-count // DRAW_BLOCK)
    index = torch.arange(block * calls, (block + blocks) * calls, device=device)
    number_, step_, stream_ = (torch.full_like(index, value) for value in (number, step, stream))
    low, high = (torch.tensor(word, device=device) for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    drawn = philox((index, number_, step_, stream_), (low, high))
    return torch.stack([numbers.view(blocks, calls) for numbers in drawn], 1).flatten()[:count]


# -- 8 bits


@cache
def dynamic_map(signed: bool) -> Tensor:
    """Return the 256 values of the codes, fp32, in ascending order."""
    values = [1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        values += [10.0 ** (decade - 6) * (0.1 + width * (i + 0.5)) for i in range(count)]
    values += [-value for value in values[1:]] if signed else []
    return torch.tensor(sorted([0.0, *values]), dtype=torch.float32)


def decade_bounds(signed: bool) -> tuple[float, ...]:
    """Return the bounds between decades: half way between the last value of one and the first of the next."""
    return tuple(10.0 ** (i - 7) * (1 + 1.8 / 2 ** (i if signed else i + 1)) for i in range(1, DECADES))


def top_bound(signed: bool) -> float:
    """Return the bound above which a number takes the value 1: half way from the value below, 1 - 0.45 / count."""
    return 1 - 0.225 / 2 ** (DECADES - 1 if signed else DECADES)


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 in the shape of x, and the scales of the blocks, fp32 (..., n / 256).

    A positive number of an unsigned block never becomes 0: it is the square of a gradient, and a divisor.

    Args:
        x: fp32 (..., n), where `CODE_BLOCK` divides n.
    """
    blocks = x.unflatten(-1, (-1, CODE_BLOCK))
    scale = blocks.abs().amax(-1)
    y = blocks * scale.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()[..., None]
    magnitude = y.abs()
    decade = sum((magnitude > bound).to(torch.int32) for bound in decade_bounds(signed))
    count = 2 ** (decade if signed else decade + 1)
    power = 10.0 ** (DECADES - 1 - decade).float()
    place = ((magnitude * power - 0.1) * (count.float() / 0.9)).floor().to(torch.int32)
    number = count + torch.minimum(place.clamp(min=0), count - 1) - (0 if signed else 1)
    if signed:
        number = torch.where(magnitude < 0.275e-6, 0, number)  # half of the smallest value
        code = torch.where(y < 0, 127 - number, torch.where(y > top_bound(True), 255, 127 + number))
    else:
        code = torch.where(y > top_bound(False), 255, torch.where(magnitude == 0, 0, number))
    return code.to(torch.uint8).view(x.shape), scale


def decode(code: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers of codes and scales, fp32 in the shape of `code`."""
    values = dynamic_map(signed).to(code.device)[code.to(torch.int32)]
    return (values.unflatten(-1, (-1, CODE_BLOCK)) * scale[..., None]).flatten(-2)
