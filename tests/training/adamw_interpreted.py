"""Steps of `FusedAdamW` beside PyTorch's. As a script: in Triton's interpreter, asked for before Triton is imported."""

import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from flash_train.training import fused_adamw
from flash_train.training.fused_adamw import FusedAdamW

SHAPES = [(64, 129), (7,), (40, 1), (1,), (3000,)]  # blocks that are whole, and that are not
DECAYED, KEPT = (0, 2, 4), (1, 3)
LAGGARD = 3  # has a gradient once only, so that its bias corrections lag behind


def errors(device: str, dtype: torch.dtype, *, aligned: bool = True) -> tuple[float, float]:
    """Of the weights after four steps, ours and those of PyTorch's fused step of the same dtype, relative to what the
    steps change in fp64."""
    fused_adamw.BLOCK = 1024
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    ours = [nn.Parameter(_placed(start, device, aligned)) for start in starts]
    same = [nn.Parameter(start.clone().to(device)) for start in starts]
    exact = [nn.Parameter(start.double()) for start in starts]
    settings = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8}
    fused = FusedAdamW(_groups(ours), **settings)
    others = [torch.optim.AdamW(_groups(same), fused=True, **settings), torch.optim.AdamW(_groups(exact), **settings)]
    for step in range(4):
        scale = 4.0 if step else 1.0
        for i, shape in enumerate(SHAPES):
            gradient = torch.randn(shape, generator=generator).to(dtype)
            if i == 0 and step == 2:  # laid out otherwise than its weight
                gradient = gradient.T.contiguous().T
            present = i != LAGGARD or step == 1
            ours[i].grad = gradient.to(device) if present else None
            same[i].grad = (gradient / scale).contiguous().to(device) if present else None
            exact[i].grad = gradient.double() / scale if present else None
        if step:
            fused.grad_scale = torch.tensor(scale, device=device)
        if step == 3:  # as from a checkpoint of PyTorch's own fused step, which counts on the device
            saved = fused.state_dict()
            for state in saved["state"].values():
                state["step"] = state["step"].to(device)
            fused.load_state_dict(saved)
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
    """A copy on the device; unaligned, one element into its memory."""
    memory = torch.empty(start.numel() + 8, dtype=start.dtype, device=device)
    return memory[0 if aligned else 1 :][: start.numel()].view(start.shape).copy_(start)


def _norm(differences: list[Tensor]) -> float:
    return torch.cat([difference.flatten() for difference in differences]).norm().item()


def main() -> int:
    wrong = 0
    for dtype, aligned in ((torch.float32, True), (torch.float32, False), (torch.float16, True)):
        ours, pytorch = errors("cpu", dtype, aligned=aligned)
        print(f"{dtype}, {'aligned' if aligned else 'not aligned'}: error {ours:.1e}, PyTorch's {pytorch:.1e}")
        wrong += not ours <= 2 * pytorch
    return wrong


if __name__ == "__main__":
    sys.exit(main())
