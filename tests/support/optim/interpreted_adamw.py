"""Compares the kernel of `AdamW` with PyTorch's AdamW and operations. As a script, it runs in Triton's interpreter."""

import copy
import sys

from tests.support.interpreting import interpret

if __name__ == "__main__":
    interpret()  # before Triton is imported

import torch
from torch import Tensor, nn

from flash_train.optim import AdamW, adamw, formats, launch
from flash_train.optim.operations import update_by_operations

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
    fused = made(AdamW, _groups(ours))
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


def made(kind: type, weights: list, **options) -> torch.optim.Optimizer:
    """An optimizer; ours updates weights on a CPU by its kernel, in the interpreter."""
    optimizer = kind(weights, **SETTINGS, **options)
    if kind is AdamW and not next(iter(optimizer.param_groups[0]["params"])).is_cuda:
        optimizer._launcher = lambda is_cuda: launch.Launcher()
    return optimizer


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
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)):
        weights = two()
        original = made(first, weights)
        stepped(weights, original, 2)
        saved = original.state_dict()
        copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
        # PyTorch's fused step assumes contiguous averages; ours must take any strides.
        copy_state = _transposed if second is AdamW else torch.clone
        saved["state"] = {i: {k: copy_state(v) for k, v in state.items()} for i, state in saved["state"].items()}
        other = made(second, copies)
        other.load_state_dict(saved)
        for ours, theirs in zip(stepped(weights, original), stepped(copies, other), strict=True):
            torch.testing.assert_close(ours, theirs)
    for name in ("amsgrad", "maximize"):
        weights = two()
        plain = torch.optim.AdamW(weights, **SETTINGS, **{name: True})
        stepped(weights, plain)
        _raises(lambda p=plain: made(AdamW, two()).load_state_dict(p.state_dict()), f"AdamW with {name}")


def _transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() == 2 else x.clone()


def check_copies() -> None:
    weights = two()
    optimizer = made(AdamW, weights)
    stepped(weights, optimizer)
    copied_weights, copied = copy.deepcopy((weights, optimizer))
    assert copied._step_supports_amp_scaling is False
    copied._launcher = optimizer._launcher
    for ours, theirs in zip(stepped(weights, optimizer), stepped(copied_weights, copied), strict=True):
        assert torch.equal(ours, theirs)


def check_mistakes() -> None:
    weights = two()
    optimizer = made(AdamW, weights)
    stepped(weights, optimizer)
    for weight in weights:
        weight.data = weight.data.half()
    _raises(lambda: stepped(weights, optimizer), "build the optimizer after")


def check_laggards() -> None:
    """A weight that gets its first gradient later does not make every step build the block table again."""
    weights, built = two(), []
    optimizer = made(AdamW, weights)
    build_table = launch.BlockTable.of
    launch.BlockTable.of = lambda *arguments: built.append(1) or build_table(*arguments)
    try:
        for step in range(8):
            for i, weight in enumerate(weights):
                weight.grad = torch.ones_like(weight) if i == 0 or step > 2 else None
            optimizer.step()
    finally:
        launch.BlockTable.of = build_table
    assert len(built) == 2, built


def format_differences(dtype: torch.dtype, master: str, moments: str | None, device: str = "cpu") -> dict[str, float]:
    """Compare three steps of the kernel with the same by PyTorch's operations: the share of numbers that differ.

    Of numbers in fp32, those count that differ by more than 1e-5 of the largest; of numbers in fp16, by more than one
    unit in the last place: many sums of fp16 numbers lie half way between two of them.
    """
    found = []
    for launches in (True, False):
        draw = torch.Generator().manual_seed(0)
        shapes = [(9, 512), (3, 256), (7,), (5, 130)]
        weights = [nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype)) for shape in shapes]
        optimizer = AdamW(weights, **SETTINGS, weight_decay=0.1, master=master, moments=moments, seed=2**35 + 17)
        optimizer._launcher = lambda _, launches=launches: launch.Launcher() if launches else update_by_operations
        for step in range(3):
            for i, weight in enumerate(weights):
                spread = torch.exp(2 * torch.randn(weight.shape, generator=draw))
                gradient = torch.randn(weight.shape, generator=draw) * spread
                weight.grad = gradient.to(device, dtype) if i != 2 or step == 1 else None
            optimizer.grad_scale = torch.tensor(4.0, device=device) if step else None
            optimizer.step()
        states = [{"weight": weight.detach(), **optimizer.state[weight]} for weight in weights]
        if master == "exact" and dtype == torch.bfloat16:
            for state in states:
                state["weight_lower"] = formats.join_master(state["weight"], state["weight_lower"])
        found.append(states)
    shares: dict[str, list[float]] = {}
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            a, b = ours[name].double(), theirs[name].double()
            limit = torch.zeros(())
            if ours[name].dtype == torch.float32:
                limit = 1e-5 * b.abs().max()
            elif ours[name].dtype == torch.float16:
                limit = (2**-10 * b.abs()).clamp(min=2**-24)
            shares.setdefault(name, []).append(((a - b).abs() > limit).double().mean().item())
    return {name: max(values) for name, values in shares.items()}


def check_offload() -> None:
    """Whose state comes piece by piece takes the same steps, also where pieces begin within a weight."""
    smallest, piece = adamw.SMALLEST_ON_HOST, launch.STAGED
    adamw.SMALLEST_ON_HOST, launch.STAGED = 1000, 4096
    shapes = [(9, 512), (12,), (3, 256), (40, 256), (5, 130)]
    try:
        for dtype, moments in ((torch.bfloat16, "8bit"), (torch.bfloat16, "bf16"), (torch.float32, None)):
            found = []
            for offload in (False, True):
                draw = torch.Generator().manual_seed(0)
                weights = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]
                optimizer = made(AdamW, weights, moments=moments, offload=offload)
                assert optimizer.format_of(weights[0]).on_host is offload
                assert not optimizer.format_of(weights[1]).on_host
                stepped(weights, optimizer, 3)
                states = [optimizer.state[weight] for weight in weights]
                found.append([x for state in states for x in state.values()] + [weight.detach() for weight in weights])
            assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)), (dtype, moments)
    finally:
        adamw.SMALLEST_ON_HOST, launch.STAGED = smallest, piece


FORMATS = [
    (dtype, master, moments)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for master in (("exact", "stochastic", "none") if dtype == torch.bfloat16 else ("none",))
    for moments in (("fp32", "bf16", "8bit") if dtype == torch.bfloat16 else (None, "8bit"))
]
# A sum that rounds another way, in fp32, may choose the next number of a format with fewer bits
MAY_DIFFER = 0.01


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
    for case in FORMATS:
        shares = format_differences(*case)
        print(*case, {name: f"{share:.1e}" for name, share in shares.items()})
        wrong += max(shares.values()) > MAY_DIFFER
    for check in (check_checkpoints, check_copies, check_mistakes, check_laggards, check_offload):
        check()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
