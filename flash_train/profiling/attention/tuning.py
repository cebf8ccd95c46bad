"""Checks and times one kernel with one tile, for ``tune_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flash_train.attention import AttentionSpec, Causal, Full, Mask, RngState, attention
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels.portable import launch
from flash_train.attention.kernels.results import lse_shape
from flash_train.attention.kernels.tile_sizes import Tile, block_d
from flash_train.attention.masks import Document

KERNELS = ("forward", "dq", "dkdv", "dk", "dv")  #: a split dkdv is launched twice: as dk and as dv
REGISTERS = (16, 224)  #: registers per thread for a tile in fp32, of 255: fewer leave the thread idle, more spill
ALLOWED_ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
DROPOUT = 0.1
DOCUMENTS = 4


class Unfit(Exception):
    """A tile cannot be used; the message says why."""


@dataclass(frozen=True)
class Setting:
    """The call that tunes a row of the table: ``n_heads`` heads of ``seq_len`` tokens in one batch row."""

    head_dim: int
    dtype: torch.dtype
    variant: str
    seq_len: int
    n_heads: int

    @property
    def spec_parts(self) -> tuple[bool, float]:
        """Whether it is causal, and its dropout."""
        return not self.variant.endswith("full"), DROPOUT if self.variant.startswith("dropout") else 0.0

    def spec(self, device: torch.device) -> AttentionSpec:
        """Return the mask and dropout. The variant ``terms`` has documents; its partial tiles test every pair."""
        causal, dropout = self.spec_parts
        mask: Mask = Causal() if causal else Full()
        if self.variant == "terms":
            ids = torch.arange(self.seq_len, device=device) * DOCUMENTS // self.seq_len
            mask = mask & Document(ids.int())
        return AttentionSpec(mask, dropout=dropout)


class Problem:
    """Random inputs of a setting, and the launch of each kernel on them.

    ``start`` is the tile of the forward, whose results the backward's kernels need.
    """

    def __init__(self, setting: Setting, start: Tile, device: torch.device) -> None:
        self.setting, self.device = setting, device
        shape = (1, setting.seq_len, setting.n_heads, setting.head_dim)
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device=device, dtype=setting.dtype) for _ in range(4))
        self.rng = RngState(int(torch.randint(1 << 31, ())))
        state = self.rng.as_tensor(device) if setting.spec_parts[1] else None
        spec = setting.spec(device)
        self.call = operands_of(self.q, self.k, spec, None, state, (0, 0, 0, 0), None, None)
        self.out, self.dq, self.dk, self.dv = (torch.empty_like(self.q) for _ in range(4))
        self.lse = torch.empty(lse_shape(self.q), device=device)
        self.delta, self.lse2 = torch.empty_like(self.lse), torch.empty_like(self.lse)
        self.launch("forward", start).run()
        launch.rows_launch(self.out, self.dout, self.lse, None, self.delta, self.lse2, self.call).run()

    def launch(self, kernel: str, tile: Tile) -> launch.Launch:
        if self.call.has_lists:
            tile = tile.within(*self.call.bounds.block)
        if kernel == "forward":
            return launch.forward_launch(self.q, self.k, self.v, self.out, self.lse, self.call, tile)
        inputs = (self.q, self.k, self.v, self.dout, self.lse2, self.delta)
        if kernel == "dq":
            return launch.dq_launch(*inputs, self.dq, None, self.call, tile)
        dk, dv = (self.dk if "dk" in kernel else None), (self.dv if "dv" in kernel else None)
        return launch.dkdv_launch(*inputs, dk, dv, self.call, tile)

    def results(self, kernel: str) -> dict[str, Tensor]:
        named = {"forward": ["out"], "dq": ["dq"], "dkdv": ["dk", "dv"], "dk": ["dk"], "dv": ["dv"]}[kernel]
        return {name: getattr(self, name) for name in named}

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """The correct result of every kernel, from the reference in fp32."""
        q, k, v = (x.float().requires_grad_() for x in (self.q, self.k, self.v))
        spec = self.setting.spec(self.device)
        out = attention(q, k, v, spec, rng=self.rng if spec.dropout else None, backend="reference")
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), self.dout.float())
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    def check(self, kernel: str, tile: Tile) -> None:
        """Run a kernel and compare it with the reference.

        Raises:
            Unfit: its results are wrong.
        """
        for result in self.results(kernel).values():
            result.fill_(float("nan"))
        self.launch(kernel, tile).run()
        for name, result in self.results(kernel).items():
            error = ((result.float() - self.exact[name]).norm() / self.exact[name].norm()).item()
            if not error <= ALLOWED_ERROR[self.setting.dtype]:
                raise Unfit(f"wrong {name}: relative error {error:.1e}")


def candidates(kernel: str, setting: Setting, shared: int) -> list[Tile]:
    """Return tiles that may fit registers and ``shared`` bytes of shared memory, and leave no warp idle."""
    return [tile for tile in _all_tiles() if _plausible(kernel, tile, setting, shared)]


def _all_tiles() -> Iterator[Tile]:
    sides = (16, 32, 64, 128)
    for block_m, block_n, warps, stages in product(sides, sides, (4, 8), (1, 2, 3)):
        yield Tile(block_m, block_n, warps, stages)


def _plausible(kernel: str, tile: Tile, setting: Setting, shared: int) -> bool:
    """Whether a lower bound on the tile's resources fits; only the compiler knows the resources themselves."""
    width = block_d(setting.head_dim)
    outer, inner = (tile.block_m, tile.block_n) if kernel in ("forward", "dq") else (tile.block_n, tile.block_m)
    accumulators = 2 if kernel == "dkdv" else 1
    products = 2 if kernel in ("dq", "dkdv", "dk") else 1  # scores, and dP
    registers = (accumulators * outer * width + products * outer * inner) / (32 * tile.num_warps)
    row = width * setting.dtype.itemsize
    loaded = 2 * inner * row * max(1, tile.num_stages - 1)
    return REGISTERS[0] <= registers <= REGISTERS[1] and inner <= 2 * outer and loaded <= shared


def compile_only(setting: Setting, start: Tile, tries: list[tuple[str, Tile]]) -> None:
    """Compile kernels into Triton's cache, for use in a separate process; `try_tile` reports those that fail."""
    from triton.errors import TritonError

    problem = Problem(setting, start, torch.device("cuda"))
    for kernel, tile in tries:
        found = problem.launch(kernel, tile)
        try:
            found.kernel.warmup(*found.arguments, grid=(1,), **found.constants)
        except (TritonError, RuntimeError):
            continue


def try_tile(
    kernel: str, tile: Tile, small: Problem, large: Problem, timer: Callable[[Callable[[], Any]], float]
) -> float:
    """Return the milliseconds of a kernel on the large problem, after a check on the small one.

    Raises:
        Unfit: it does not compile, needs more resources than the chip has, or computes wrong results.
    """
    from triton.errors import TritonError

    try:
        small.check(kernel, tile)
        found = large.launch(kernel, tile)
        found.run()
        return timer(found.start)
    except torch.AcceleratorError:  # this process has lost the device
        raise
    except (TritonError, RuntimeError) as failure:
        raise Unfit(str(failure).strip().splitlines()[0]) from failure


def smaller(setting: Setting) -> Setting:
    """Return the setting with a length that the reference can hold and that no tile divides.

    2000 is a multiple of 16, like longer lengths, so Triton does not compile another specialisation of the kernel.
    """
    return replace(setting, seq_len=2000, n_heads=2)
