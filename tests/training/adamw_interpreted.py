"""Compares `FusedAdamW` with PyTorch's AdamW. As a script, it runs in Triton's interpreter."""

import copy
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from flash_train.training import fused_adamw
from flash_train.training.fused_adamw import FusedAdamW

SHAPES = [(64, 129), (7,), (40, 1), (1,), (3000,)]  # with whole and partial blocks
DECAYED, KEPT = (0, 2, 4), (1, 3)
SETTINGS = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8}
LAGGARD = 3  # gets a gradient only once, so its bias corrections differ from the others'


def errors(device: str, dtype: torch.dtype, *, aligned: bool = True) -> tuple[float, float]:
    """Errors of the weights after four steps: ours, and PyTorch's fused step in the same dtype.

    Both are relative to the change of the weights in fp64.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    ours = [nn.Parameter(_placed(start, device, aligned)) for start in starts]
    same = [nn.Parameter(start.clone().to(device)) for start in starts]
    exact = [nn.Parameter(start.double()) for start in starts]
    fused = FusedAdamW(_groups(ours), **SETTINGS)
    others = [torch.optim.AdamW(_groups(same), fused=True, **SETTINGS), torch.optim.AdamW(_groups(exact), **SETTINGS)]
    for step in range(4):
        scale = 4.0 if step else 1.0
        for i, shape in enumerate(SHAPES):
            gradient = torch.randn(shape, generator=generator).to(dtype)
            if i == 0 and step == 2:  # with other strides than its weight
                gradient = gradient.T.contiguous().T
            present = i != LAGGARD or step == 1
            ours[i].grad = gradient.to(device) if present else None
            same[i].grad = (gradient / scale).contiguous().to(device) if present else None
            exact[i].grad = gradient.double() / scale if present else None
        if step == 3:  # as in a checkpoint from PyTorch's fused step, which counts steps on the device
            saved = fused.state_dict()
            for state in saved["state"].values():
                state["step"] = state["step"].to(device)
            fused.load_state_dict(saved)
        if step:
            fused.grad_scale = torch.tensor(scale, device=device)
        fused.step()
        assert fused.grad_scale is None
        for other in others:
            other.step()
    changed = _norm([e - start.double() for e, start in zip(exact, starts, strict=True)])
    return tuple(
        _norm([w.cpu().double() - e for w, e in zip(weights, exact, strict=True)]) / changed for weights in (ours, same)
    )


def _groups(weights: list[nn.Parameter]) -> list[dict]:
    return [
        {"params": [weights[i] for i in DECAYED], "weight_decay": 0.3},
        {"params": [weights[i] for i in KEPT], "weight_decay": 0.0},
    ]


def _placed(start: Tensor, device: str, aligned: bool) -> Tensor:
    """A copy on the device; if not aligned, it starts one element into its memory."""
    memory = torch.empty(start.numel() + 8, dtype=start.dtype, device=device)
    return memory[0 if aligned else 1 :][: start.numel()].view(start.shape).copy_(start)


def _norm(differences: list[Tensor]) -> float:
    return torch.cat([difference.flatten() for difference in differences]).norm().item()


def stepped(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 1) -> list[Tensor]:
    for step in range(steps):
        for i, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(10 * step + i)
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def two(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((6, 8), (5,))]


def check_checkpoints() -> None:
    """PyTorch's optimizer continues from our state, and ours from PyTorch's state with any strides."""
    for first, second in ((FusedAdamW, torch.optim.AdamW), (torch.optim.AdamW, FusedAdamW)):
        weights = two()
        original = first(weights, **SETTINGS)
        stepped(weights, original, 2)
        saved = original.state_dict()
        copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
        # PyTorch's fused step assumes contiguous averages; ours must take any strides.
        copy_state = _transposed if second is FusedAdamW else torch.clone
        saved["state"] = {i: {k: copy_state(v) for k, v in state.items()} for i, state in saved["state"].items()}
        other = second(copies, **SETTINGS)
        other.load_state_dict(saved)
        for ours, theirs in zip(stepped(weights, original), stepped(copies, other), strict=True):
            torch.testing.assert_close(ours, theirs)
    for name in ("amsgrad", "maximize"):
        weights = two()
        plain = torch.optim.AdamW(weights, **SETTINGS, **{name: True})
        stepped(weights, plain)
        _raises(lambda p=plain: FusedAdamW(two(), **SETTINGS).load_state_dict(p.state_dict()), f"AdamW with {name}")


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() == 2 else x.clone()


def check_copies() -> None:
    weights = two()
    optimizer = FusedAdamW(weights, **SETTINGS)
    stepped(weights, optimizer)
    copied_weights, copied = copy.deepcopy((weights, optimizer))
    assert copied._step_supports_amp_scaling is False
    for ours, theirs in zip(stepped(weights, optimizer), stepped(copied_weights, copied), strict=True):
        assert torch.equal(ours, theirs)


def check_mistakes() -> None:
    weights = two()
    optimizer = FusedAdamW(weights, **SETTINGS)
    stepped(weights, optimizer)
    for weight in weights:
        weight.data = weight.data.half()
    _raises(lambda: stepped(weights, optimizer), "build the optimizer after")
    _raises(lambda: stepped(w := two(torch.float64), FusedAdamW(w, **SETTINGS)), "build the optimizer after")


def check_laggards() -> None:
    """A weight that gets its first gradient later does not make every step build the block table again."""
    weights, built = two(), []
    optimizer = FusedAdamW(weights, **SETTINGS)
    build_table = fused_adamw._BlockTable.of
    fused_adamw._BlockTable.of = lambda *arguments: built.append(1) or build_table(*arguments)
    try:
        for step in range(8):
            for i, weight in enumerate(weights):
                weight.grad = torch.ones_like(weight) if i == 0 or step > 2 else None
            optimizer.step()
    finally:
        fused_adamw._BlockTable.of = build_table
    assert len(built) == 2, built


def _raises(call, words: str) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error says {words}")


def main() -> int:
    wrong = 0
    for dtype in (torch.float32, torch.float16):
        ours, pytorch = errors("cpu", dtype)
        print(f"{dtype}: error {ours:.1e}, PyTorch's {pytorch:.1e}")
        wrong += not ours <= 2 * pytorch
    for check in (check_checkpoints, check_copies, check_mistakes, check_laggards):
        check()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
