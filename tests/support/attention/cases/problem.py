"""Attention calls for tests: a ``Case`` describes a call as plain data, and ``build`` draws its tensors."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from flash_train.attention import AttentionSpec, Causal, Packing, RngState
from flash_train.attention.dropout import EntryOrigins
from flash_train.attention.masks import Band
from tests.support.attention.cases.recipes import Layout, Recipe, compose

#: part of a tensor with more heads and columns; every other row; heads before rows; columns before rows
STRIDED = ("wide", "rows", "heads", "columns")
FAR_STEP = 2**24 + 2**18  #: elements from row to row of a ``far`` tensor: 127 of them pass 2**31


@dataclass(frozen=True)
class Case:
    """One attention call as plain data.

    Attributes:
        name, seed: determine the random contents of all tensors.
        lengths, tail: as in ``Layout``.
        learns: whether slopes and sinks require a gradient.
        pieces: if not 0, every entry has an origin of its own in the dropout mask, at multiples of this number.
        strided: memory layout of q, k and v: "" (contiguous), or one of ``STRIDED``.
        dout: memory layout of the output's gradient: ``dense``, ``row`` (one row for all, with stride 0), ``scalar``
            (one number for all), or one of ``STRIDED``.
        far: "", or one of q, k, v and dout: its rows are so far apart that the offset of a tile's last row exceeds
            2**31.
        uses: results that the loss depends on.
        spread: standard deviation of q and k.
        offset: constant that is part of every logit.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    band: Band = Causal()
    terms: tuple[Recipe, ...] = ()
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)
    pieces: int = field(default=0, repr=False)  # the random numbers of a case follow from its repr
    slopes: str = ""  # "", "heads", "entries"
    sinks: bool = False
    learns: bool = True
    packed: bool = False
    tail: tuple[int, int] = (0, 0)
    strided: str = ""
    dout: str = "dense"
    far: str = ""
    uses: str = "both"  # "both", "out", "lse", or "plain": the call does not return the log-sum-exp
    spread: float = 1.0
    offset: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def layout(self) -> Layout:
        return Layout(self.lengths, self.heads, self.packed, self.tail)

    @property
    def source(self) -> str:
        """The case as Python code, without default values, to be pasted into ``KEPT``."""
        given = ((f, getattr(self, f.name)) for f in fields(self))
        return f"Case({', '.join(f'{f.name}={value!r}' for f, value in given if value != f.default)})"


@dataclass(frozen=True)
class Problem:
    """The tensors and settings of a case."""

    inputs: dict[str, Tensor]  #: q, k, v, and if given slopes and sinks
    spec: AttentionSpec
    packing: Packing | None
    rng: RngState
    dout: Tensor
    dlse: Tensor

    @property
    def device(self) -> torch.device:
        return self.dout.device


def build(case: Case, device: str, redraw: int = 0) -> Problem:
    """The case's tensors; another ``redraw`` gives other random numbers of the same kind."""
    kind = replace(case, name="draw") if case.seed else case  # a failed draw in KEPT has the numbers of the draw
    seed = zlib.crc32(f"{kind} {case.seed}".encode())
    choices = torch.Generator().manual_seed(seed)  # for what must be equal on all devices and in all redraws
    spec = AttentionSpec(
        compose(case.band, case.terms, case.layout, choices, device), case.scale, case.softcap, case.dropout
    )
    rng = RngState(int(torch.randint(2**62, (), generator=choices)), 7, *case.origin)
    if case.pieces:
        first = torch.randint(50, (len(case.lengths), 3), generator=choices, dtype=torch.int32)
        first[:, 1:] *= case.pieces
        rng = replace(rng, entries=EntryOrigins(first.to(device), case.pieces % 16 == 0))
    numbers = torch.Generator(device).manual_seed(seed + redraw)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device=device)

    v_head_dim = case.v_head_dim or case.head_dim
    batch = () if case.packed else (len(case.lengths),)
    rows_q, rows_k = (*batch, case.layout.rows(0)), (*batch, case.layout.rows(1))
    inputs = {
        "q": normal(*rows_q, case.heads, case.head_dim) * case.spread,
        "k": normal(*rows_k, case.kv_heads, case.head_dim) * case.spread,
        "v": normal(*rows_k, case.kv_heads, v_head_dim),
    }
    if case.offset:  # one coordinate is the same in all rows
        inputs["q"][..., 0] = 8.0
        inputs["k"][..., 0] = case.offset / spec.scale_for(case.head_dim) / 8.0
    inputs = {name: x.to(case.dtype) for name, x in inputs.items()}
    dout = _output_gradient(case, normal, (*rows_q, case.heads, v_head_dim))
    for x, tail in zip((*inputs.values(), dout), (*case.tail, case.tail[1], case.tail[0]), strict=True):
        if tail and x.stride(0) != 0:
            x[-tail:] = float("nan")
    if case.slopes:
        shape = (case.heads,) if case.slopes == "heads" else (len(case.lengths), case.heads)
        inputs["slopes"] = (normal(*shape).abs() * 0.2).bfloat16().float()  # exact in every dtype
    if case.sinks:
        inputs["sinks"] = normal(case.heads).bfloat16().float()
    dlse = normal(*((case.heads, *rows_q) if case.packed else (*batch, case.heads, rows_q[1])))
    return Problem(inputs, spec, _packing(case, device), rng, dout, dlse)


def _output_gradient(case: Case, normal, shape: tuple[int, ...]) -> Tensor:
    if case.dout == "row":
        return normal(shape[-1]).to(case.dtype).expand(shape)
    if case.dout == "scalar":
        return normal(1).to(case.dtype).expand(shape)
    dout = normal(*shape).to(case.dtype)
    if case.far == "dout":
        return spread_rows(dout)
    return dout if case.dout == "dense" else restride(dout, case.dout)


def _packing(case: Case, device: str) -> Packing | None:
    if not case.packed:
        return None
    cu = [torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0).int().to(device) for side in (0, 1)]
    return Packing(*cu)


def arrange(name: str, x: Tensor, case: Case) -> Tensor:
    if case.far == name:
        return spread_rows(x)
    return restride(x, case.strided) if case.strided and name in "qkv" else x.clone()


def restride(x: Tensor, strided: str) -> Tensor:
    """The same numbers, (..., rows, heads, head_dim), in another memory layout; gaps are NaN."""
    if strided == "heads":
        view = torch.full_like(x.transpose(-3, -2).contiguous(), float("nan")).transpose(-3, -2)
    elif strided == "columns":
        view = torch.full_like(x.movedim(-1, -3).contiguous(), float("nan")).movedim(-3, -1)
    elif strided == "rows":
        view = x.new_full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), float("nan"))[..., ::2, :, :]
    else:
        assert strided == "wide", strided
        view = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8), float("nan"))
        view = view[..., 1:, : x.shape[-1]]
    view.copy_(x)
    return view


def spread_rows(x: Tensor) -> Tensor:
    """The same numbers with rows ``FAR_STEP`` elements apart. The gaps are gigabytes and stay uninitialised."""
    rows = x.shape[:-2].numel()
    steps = [FAR_STEP * x.shape[-3], FAR_STEP] if x.dim() == 4 else [FAR_STEP]
    size = FAR_STEP * (rows - 1) + x.shape[-2:].numel() if rows else 0
    store = torch.empty(size, dtype=x.dtype, device=x.device)
    view = store.as_strided(x.shape, (*steps, x.shape[-1], 1))
    view.copy_(x)
    return view
