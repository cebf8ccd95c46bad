"""The MLP half of a block that is recomputed, x + mlp(norm(x)), in tiles of the row.

The half saves its input only. The backward computes one tile at a time: its norm, gate and up, then its gradients. So
the MLP's activations take the memory of one tile, however long the row is (ALST does the same, arXiv:2506.13996). The
product with the last weight is not needed for the gradients and does not run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

TILE_TOKENS = 32768  # matrix products over so many tokens lose nothing to the division

Half = Callable[[Tensor, Tensor | None, bool], tuple[Tensor, Tensor]]
"""Computes a tile: half(x, mask, needs_value) returns x and its update, both (tokens, width).

Without `needs_value` the update's gradients must be right, but not its numbers.
"""


def tiled_mlp(
    half: Half, x: Tensor, mask: Tensor | None, weights: Sequence[Tensor], tile_tokens: int | None = None
) -> Tensor:
    """Return x + update, computed in tiles of at most `tile_tokens` rows, and again in the backward.

    Args:
        half: computes a tile.
        x: (tokens, width).
        mask: of the update's dropout, (tokens, width), or None.
        weights: every weight that `half` uses.
        tile_tokens: None takes `TILE_TOKENS`.
    """
    # Where nothing before the MLP is trained, x needs no gradient, but `_Held` must be in the graph.
    held = _Held.apply(x, mask, None if x.requires_grad else x.new_empty(0).requires_grad_())
    return _TiledMLP.apply(held, mask, half, tile_tokens, *weights)


def tile_size(tokens: int, tile_tokens: int | None = None) -> int:
    """Return the rows of a tile: the fewest tiles of about equal size. Tiles begin at multiples of 128 rows."""
    tile_tokens = tile_tokens or TILE_TOKENS
    count = max(1, math.ceil(tokens / tile_tokens))
    return tokens if count == 1 else min(tile_tokens, math.ceil(tokens / count / 128) * 128)


class _Held(torch.autograd.Function):
    """Saves the tensors that `_TiledMLP` needs. In a recomputed block nothing after this is saved, so
    `torch.utils.checkpoint` stops the recomputation here, and does not run the MLP's forward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx, None, None


class _TiledMLP(torch.autograd.Function):
    """Weights are attributes of the context: a saved tensor would let the recomputation run up to here."""

    @staticmethod
    def forward(
        ctx: Any, held: Tensor, mask: Tensor | None, half: Half, tile_tokens: int | None, *weights: Tensor
    ) -> Tensor:
        out = torch.empty_like(held)
        for rows in _tiles(held, tile_tokens):
            x, update = half(held[rows], None if mask is None else mask[rows], True)
            torch.add(x, update, out=out[rows])
            del x, update
        device = held.device.type
        ctx.source, ctx.half, ctx.tile_tokens, ctx.weights = held.grad_fn, half, tile_tokens, weights
        ctx.autocast = {
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, mask = ctx.source.saved_tensors  # runs the block again up to `_Held`
        learned = [weight for weight in ctx.weights if weight.requires_grad]
        sums = _Sums(learned)
        dx = None
        for rows in _tiles(x, ctx.tile_tokens):
            with torch.enable_grad(), torch.autocast(x.device.type, **ctx.autocast):
                tile = x[rows].detach().requires_grad_()
                results = ctx.half(tile, None if mask is None else mask[rows], False)
            dtile, *dweights = torch.autograd.grad(results, (tile, *learned), (dout[rows], dout[rows]))
            del results, tile
            sums.add(dweights)
            if len(dtile) == len(x):
                dx = dtile
            else:
                dx = torch.empty_like(x) if dx is None else dx
                dx[rows] = dtile
            del dtile, dweights
        gradients = iter(sums.results())
        return dx, None, None, None, *(next(gradients) if w.requires_grad else None for w in ctx.weights)


class _Sums:
    """Sums of the weights' gradients over the tiles, in fp32 at least."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights, self._sums, self._tiles = weights, list[Tensor](), 0

    def add(self, gradients: list[Tensor]) -> None:
        self._tiles += 1
        if self._tiles == 1:
            self._sums = gradients
            return
        if self._tiles == 2:
            self._sums = [total.to(torch.promote_types(total.dtype, torch.float32)) for total in self._sums]
        for total, gradient in zip(self._sums, gradients, strict=True):
            total += gradient

    def results(self) -> list[Tensor]:
        """Return the sums in the weights' dtypes."""
        return [total.to(weight.dtype) for total, weight in zip(self._sums, self._weights, strict=True)]


def _tiles(x: Tensor, tile_tokens: int | None) -> Iterator[slice]:
    size = tile_size(len(x), tile_tokens)
    for start in range(0, len(x), max(1, size)):
        yield slice(start, start + size)
