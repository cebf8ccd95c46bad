"""The suite every backend with this project's semantics must pass: cases, and the rule they are judged by.

The rule is FlashAttention's: the largest error against fp64 is at most twice (gradients: three times) that of PyTorch
in the same precision, plus what rounding the result alone costs. Inputs are fresh random numbers; uninitialised
memory and rows that belong to no entry are NaN, so that what is not written, or read where it must not be, shows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch

from flash_train.attention import AttentionSpec, Causal, Full, Packing, RngState, attention
from flash_train.attention.reference import reference_attention


@dataclass(frozen=True)
class Case:
    """One call: ``lengths`` are (query, key) lengths, of the rows of a batch (all equal) or of packed entries."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    causal: bool = True
    dropout: float = 0.0
    packed: bool = False
    tail: int = 0
    strided: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"


def _same(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((n, n) for n in lengths)


CASES = (
    Case("causal", _same(64, 64)),
    Case("full", _same(64, 64), causal=False),
    Case("odd-length", _same(77), head_dim=24),
    Case("one-token", _same(1, 1)),
    Case("longer-keys", ((37, 90),)),
    Case("fully-masked-rows", ((90, 37),)),
    Case("full-unequal", ((45, 70),), causal=False, head_dim=8),
    Case("gqa", _same(70), heads=4, kv_heads=2),
    Case("mqa-dropout", _same(70), heads=3, kv_heads=1, dropout=0.3),
    Case("dropout", _same(75, 75), dropout=0.1),
    Case("dropout-full", _same(75), causal=False, dropout=0.5),
    Case("packed", _same(40, 1, 70, 16), packed=True),
    Case("packed-gqa-dropout", _same(40, 33, 9), heads=4, kv_heads=2, packed=True, dropout=0.2),
    Case("packed-empty-entries", _same(0, 33, 0, 0, 50, 0), packed=True, tail=21),
    Case("packed-cross", ((20, 50), (50, 20), (0, 7), (7, 0)), packed=True, dropout=0.1, tail=5),
    Case("strided", _same(50, 50), strided=True),
    Case("head-dim-1", _same(33), head_dim=1),
)


def on_card(case: Case) -> Case:
    """The case at sizes that cross several of the card's tiles."""
    return replace(
        case,
        lengths=tuple((9 * a + (a > 1), 9 * b + (b > 1)) for a, b in case.lengths),
        head_dim={16: 128, 24: 72, 8: 64}.get(case.head_dim, case.head_dim),
    )


@dataclass(frozen=True)
class Error:
    """Largest error of one tensor, and the largest that the rule allows."""

    tensor: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def run(case: Case, backend: str, device: str) -> list[Error]:
    """Forward and backward of the case, with a gradient through the log-sum-exp, against fp64."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    spec = AttentionSpec(Causal() if case.causal else Full(), dropout=case.dropout)
    packing, shapes = _layout(case)
    inputs = [_tensor(shape, case, generator) for shape in shapes]
    rows = shapes[0][-2::-1] if case.packed else (shapes[0][0], shapes[0][2], shapes[0][1])
    dout, dlse = torch.randn(shapes[0], generator=generator).to(case.dtype), torch.randn(rows, generator=generator)
    rng = RngState(int(torch.randint(2**62, (), generator=generator)), 7)

    inputs, dout, dlse = [x.to(device) for x in inputs], dout.to(device), dlse.to(device)
    packing = packing and Packing(packing.cu_seqlens_q.to(device), packing.cu_seqlens_k.to(device))
    exact = _gradients(*_reference(inputs, spec, packing, rng, torch.float64), dout, dlse)
    same = _gradients(*_reference(inputs, spec, packing, rng, case.dtype), dout, dlse)
    leaves = [_place(x, case).requires_grad_() for x in inputs]
    with poisoned_memory():
        out, lse = attention(*leaves, spec, packing=packing, rng=rng, backend=backend, return_lse=True)
        ours = _gradients(out, lse, leaves, dout, dlse)
    errors = []
    for name in exact:
        ref = exact[name]
        _assert_equal_infinities(name, ours[name], ref)
        rounding = ((ref + 0.3).to(case.dtype) - torch.tensor(0.3, dtype=case.dtype)).double() - ref
        factor = 3 if name.startswith("d") else 2
        allowed = factor * _worst(same[name], ref) + 2 * rounding.nan_to_num(0, 0, 0).abs().amax().item()
        errors.append(Error(name, _worst(ours[name], ref), allowed))
    return errors


class poisoned_memory:
    """Uninitialised tensors hold NaN inside."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.before)


def _layout(case: Case) -> tuple[Packing | None, list[tuple[int, ...]]]:
    heads = ((case.heads, 0), (case.kv_heads, 1), (case.kv_heads, 1))
    if not case.packed:
        return None, [(len(case.lengths), case.lengths[0][side], h, case.head_dim) for h, side in heads]
    cu = [torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0).int() for side in (0, 1)]
    return Packing(*cu), [(int(cu[side][-1]) + case.tail, h, case.head_dim) for h, side in heads]


def _tensor(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator).to(case.dtype)
    if case.tail:
        x[-case.tail :] = float("nan")
    return x


def _place(x: torch.Tensor, case: Case) -> torch.Tensor:
    if not case.strided:
        return x.clone()
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8), float("nan"))
    view = wide[..., 1:, : x.shape[-1]]
    view.copy_(x)
    return view


def _reference(
    inputs: list[torch.Tensor], spec: AttentionSpec, packing: Packing | None, rng: RngState, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    out, lse = reference_attention(*leaves, spec, packing, rng.as_tensor(inputs[0].device))
    return out, lse, leaves


def _gradients(
    out: torch.Tensor, lse: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor
) -> dict[str, torch.Tensor]:
    dlse = torch.where(torch.isfinite(lse), dlse.to(lse.dtype), 0.0)
    grads = torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse))
    named = {"out": out, "lse": lse, "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    return {name: x.detach().double().cpu() for name, x in named.items()}


def _assert_equal_infinities(name: str, ours: torch.Tensor, ref: torch.Tensor) -> None:
    assert torch.equal(torch.isneginf(ours), torch.isneginf(ref)), f"{name}: -inf in other places than the reference"
    if name != "lse":
        zero = (ref == 0).all(-1)
        assert (ours[zero] == 0).all(), f"{name}: rows that must be exactly 0 are not"


def _worst(x: torch.Tensor, ref: torch.Tensor) -> float:
    finite = torch.isfinite(ref)
    return (x - ref)[finite].abs().amax().item() if finite.any() else 0.0
