"""A step of AdamW in PyTorch's operations, on any device; it computes in fp32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from flash_train.optim import formats
from flash_train.optim.state import AVERAGES, LOWER, SCALES, SIGNED
from flash_train.optim.update import Update

CHUNK = 2**16  # elements that are updated at a time, a multiple of `formats.DRAW_BLOCK`


def update_by_operations(update: Update) -> None:
    """Update the weights and their states, a chunk at a time."""
    update.check()
    if update.storage.on_host and update.weights[0].device.type != "cpu":
        raise ValueError(f"offload=True on {update.weights[0].device}: needs an NVIDIA GPU and Triton")
    for weight, gradient, state, number in zip(
        update.weights, update.gradients, update.states, update.numbers, strict=True
    ):
        tensors = {"weight": weight, "gradient": gradient, **state}
        draws = Draws(update.seed, update.step, number, 2 * update.part)
        for start in range(0, weight.numel(), CHUNK):
            chunk = {name: _chunk(tensor, start, name in SCALES.values()) for name, tensor in tensors.items()}
            _update_chunk(chunk, update, draws._replace(block=start // formats.DRAW_BLOCK))


class Draws(NamedTuple):
    """Random bits of a weight's step, from some block of the weight on."""

    seed: int
    step: int
    number: int
    first_stream: int
    block: int = 0

    def words(self, like: Tensor, *, stream: int) -> Tensor:
        """Return a random 32-bit word for each element of a vector, int64."""
        return formats.random_words(
            len(like), seed=self.seed, step=self.step, number=self.number, stream=self.first_stream + stream,
            block=self.block, device=like.device,
        )  # fmt: skip


def _update_chunk(chunk: dict[str, Tensor], update: Update, draws: Draws) -> None:
    storage, weight, gradient = update.storage, chunk["weight"], chunk["gradient"].float()
    master = formats.join_master(weight, chunk[LOWER]) if storage.master == "exact" else weight.float()
    if update.grad_scale is not None:
        gradient = gradient / update.grad_scale.to(gradient)
    averages = [_moment(chunk, name) for name in AVERAGES]
    before = torch.tensor(update.step - 1, dtype=torch.float32)
    adamw(
        [master], [gradient], [averages[0]], [averages[1]], [], [before],
        fused=weight.device.type == "cpu", amsgrad=False, maximize=False, beta1=update.betas[0], beta2=update.betas[1],
        lr=update.lr, weight_decay=update.weight_decay, eps=update.eps,
    )  # fmt: skip
    if storage.master == "exact":
        rounded, lower = formats.split_master(master)
        weight.copy_(rounded)
        chunk[LOWER].copy_(lower)
    elif storage.master == "stochastic":
        weight.copy_(formats.round_stochastic(master, _bits(draws.words(master, stream=1), 0)))
    else:
        weight.copy_(master)
    words = draws.words(master, stream=0) if storage.moment == torch.bfloat16 else None
    for shift, name, average in zip((0, 16), AVERAGES, averages, strict=True):
        if storage.moment == torch.uint8:
            codes, scale = formats.encode(average, signed=SIGNED[name])
            chunk[name].copy_(codes)
            chunk[SCALES[name]].copy_(scale)
        elif words is not None:
            chunk[name].copy_(formats.round_stochastic(average, _bits(words, shift)))
        else:
            chunk[name].copy_(average)


def _bits(words: Tensor, shift: int) -> Tensor:
    """Return 16 bits of each word, int32."""
    return (words >> shift & 0xFFFF).to(torch.int32)


def _moment(chunk: dict[str, Tensor], name: str) -> Tensor:
    """Return a moment in fp32; a new tensor, unless it is stored in fp32."""
    if SCALES[name] in chunk:
        return formats.decode(chunk[name], chunk[SCALES[name]], signed=SIGNED[name])
    return chunk[name].float()


def _chunk(tensor: Tensor, start: int, is_scale: bool) -> Tensor:
    """Return the part of a contiguous tensor that belongs to the elements from `start` on, as a vector."""
    per = formats.CODE_BLOCK if is_scale else 1
    return tensor.view(-1)[start // per : (start + CHUNK) // per]
