"""AdamW: bf16 weights lose no update, and states load in any format."""

import copy
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import nn

from flash_train.optim import AdamW, exact_weights, formats, without_codes
from flash_train.profiling.memory.weights_walk import OPTIMIZER_BLOCK
from tests.support.pages import ROOT

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_weights(device="cpu", dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    shapes = (8, 512), (5, 100), (3000,)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype)) for shape in shapes]


def take_steps(weights, optimizer, first, last):
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw).to(torch.bfloat16).to(weight)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("device", DEVICES)
def test_an_exact_master_is_what_fp32_weights_are(device):
    """Bit for bit, over 1,000 steps; the weights are these numbers, rounded to nearest."""
    weights = random_weights(device)
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = AdamW(weights, **SETTINGS, moments="fp32")
    plain = (torch.optim.AdamW if device == "cpu" else AdamW)(
        masters, **SETTINGS, **({"fused": True} if device == "cpu" else {})
    )
    ties = 0
    for step in range(1000):
        take_steps(weights, optimizer, step, step + 1)
        take_steps(masters, plain, step, step + 1)
        for weight, master in zip(weights, masters, strict=True):
            assert torch.equal(formats.join_master(weight, optimizer.state[weight]["weight_lower"]), master)
            nearest = master.to(torch.bfloat16)
            is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert bool(((weight == nearest) | is_tie).all())
            ties += int(is_tie.sum())
    assert ties  # away from zero, where PyTorch rounds to even
    moved = [torch.equal(weight, start) for weight, start in zip(weights, random_weights(device), strict=True)]
    assert not any(moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("master", "progress"), [("exact", 1.0), ("stochastic", 1.0), ("none", 0.0)])
def test_small_updates_are_lost_without_a_master(master, progress, device):
    """Each update is an eighth of what the last bit of a weight counts; the mean weight must move all the same."""
    weight = nn.Parameter(torch.full((64, 1024), 1.0, dtype=torch.bfloat16, device=device))
    optimizer = AdamW([weight], lr=2**-10, weight_decay=0.0, master=master)
    for _ in range(20):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    moved = (weight.double().mean() - 1).item()
    assert moved == pytest.approx(progress * 20 * 2**-10, rel=0.15)  # exact: 2.5 last bits are 2 or 3


@pytest.mark.parametrize("master", ["exact", "stochastic"])
@pytest.mark.parametrize("moments", [None, "fp32", "8bit"])
def test_a_run_that_resumes_takes_the_same_steps(master, moments):
    weights = random_weights()
    optimizer = AdamW(weights, **SETTINGS, master=master, moments=moments, seed=3)
    take_steps(weights, optimizer, 0, 3)
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = AdamW(copies, **SETTINGS, master=master, moments=moments, seed=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for ours, theirs in zip(take_steps(weights, optimizer, 3, 6), take_steps(copies, resumed, 3, 6), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_moments_in_fewer_bits_give_nearly_the_same_weights(moments):
    exact, fewer = random_weights(dtype=torch.float32), random_weights(dtype=torch.float32)
    starts = random_weights(dtype=torch.float32)
    take_steps(exact, AdamW(exact, **SETTINGS), 0, 40)
    take_steps(fewer, AdamW(fewer, **SETTINGS, moments=moments), 0, 40)
    for a, b, start in zip(exact, fewer, starts, strict=True):
        assert (a - b).norm() < 0.03 * (a - start).norm()


def test_moments_in_bf16_do_not_stand_still():
    """With beta2 = 0.999 each step changes the average by less than bf16 can round to; its mean must converge."""
    weight = nn.Parameter(torch.zeros(16, 256, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=0.0, betas=(0.9, 0.999))
    for _ in range(300):
        weight.grad = torch.full_like(weight, 2.0)
        optimizer.step()
    expected = 4 * (1 - 0.999**300)
    assert optimizer.state[weight]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, rel=0.01)


STATES = ["fp32", "bf16", "8bit", "pytorch"]  # PyTorch's AdamW cannot load 8-bit moments


@pytest.mark.parametrize(("source", "target"), sorted({*product(STATES, STATES)} - {("8bit", "pytorch")}))
def test_a_state_loads_in_any_format(source, target):
    def made(weights, kind):
        if kind == "pytorch":
            return torch.optim.AdamW(weights, **SETTINGS)
        return AdamW(weights, **SETTINGS, moments=kind)

    weights = random_weights(dtype=torch.float32)
    first = made(weights, source)
    take_steps(weights, first, 0, 5)
    saved = first.state_dict()
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    second = made(copies, target)
    second.load_state_dict(copy.deepcopy(saved))
    starts = [weight.detach().clone() for weight in weights]
    ours, theirs = take_steps(weights, first, 5, 8), take_steps(copies, second, 5, 8)
    for a, b, start in zip(ours, theirs, starts, strict=True):
        assert (a - b).norm() < 0.05 * (a - start).norm()


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_a_loaded_state_is_no_view(tmp_path, moments):
    """A view would keep the file that a checkpoint is mapped from, and a background copy of it fails."""
    weights = random_weights()
    first = AdamW(weights, **SETTINGS, moments=moments)
    take_steps(weights, first, 0, 1)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", mmap=True)
    second = AdamW(weights, **SETTINGS, moments=moments)
    second.load_state_dict(saved)
    for weight, entries in zip(weights, saved["state"].values(), strict=True):
        for name, value in second.state[weight].items():
            assert torch.equal(value, entries[name])
            assert value.untyped_storage().data_ptr() != entries[name].untyped_storage().data_ptr(), name


def test_the_state_has_the_formats_that_were_asked_for():
    weights = random_weights()
    optimizer = AdamW(weights, **SETTINGS, moments="8bit")
    take_steps(weights, optimizer, 0, 1)
    wide, narrow, vector = (optimizer.state[weight] for weight in weights)
    assert wide["exp_avg"].dtype == torch.uint8 and wide["exp_avg_scale"].shape == (8, 2)
    assert narrow["exp_avg"].dtype == vector["exp_avg_sq"].dtype == torch.bfloat16
    assert all(state["weight_lower"].dtype == torch.int16 for state in (wide, narrow, vector))
    optimizer = AdamW(weights, **SETTINGS, master="stochastic")
    take_steps(weights, optimizer, 0, 1)
    assert "weight_lower" not in optimizer.state[weights[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "fp32"}, "master='fp32': must be one of exact, stochastic, none"),
        ({"moments": "fp8"}, "moments='fp8': must be one of fp32, bf16, 8bit"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(random_weights(), **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"maximize": True}, "AdamW: a group of weights has maximize: must be without"),
        ({"amsgrad": True}, "AdamW: a group of weights has amsgrad: must be without"),
        ({"moments": "8bit"}, "AdamW: a group of weights has moments='8bit': must be an argument, for all groups"),
    ],
)
def test_settings_that_groups_do_not_have(settings, message):
    """They would be ignored: with maximize, the loss would be minimised."""
    weight = nn.Parameter(torch.zeros(2, 256))
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": [weight], **settings}])
    optimizer = AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight], **settings})


def test_a_group_that_is_added_later_is_as_the_first_ones():
    optimizer = AdamW([nn.Parameter(torch.zeros(3))], moments="bf16")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5})
    first, second = optimizer.param_groups
    assert first.keys() == second.keys() and (first["lr"], second["lr"]) == (1e-3, 0.5)


@pytest.mark.parametrize("moments", [None, "8bit"])
def test_a_state_of_weights_with_other_shapes_is_refused(moments):
    """Transposed, they have the same number of elements."""
    weight, other = (nn.Parameter(torch.zeros(shape)) for shape in ((256, 512), (512, 256)))
    first, second = AdamW([weight], moments=moments), AdamW([other], moments=moments)
    weight.grad = torch.ones_like(weight)
    first.step()
    message = r"the state is of a weight of shape \(256, 512\), and the weight has \(512, 256\): must be equal"
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(first.state_dict())


def test_weights_of_other_dtypes_are_refused():
    weights = random_weights(dtype=torch.float64)
    with pytest.raises(ValueError, match="weights must be in bf16, fp32 or fp16"):
        AdamW(weights)


@pytest.mark.slow
def test_the_kernel_in_the_interpreter():
    """As accurate as PyTorch's fused step, equal to PyTorch's operations; states load both ways, and misuse raises."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    command = [sys.executable, "-m", "tests.support.optim.interpreted_adamw"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_pieces_fill_buckets():
    launch = pytest.importorskip("flash_train.optim.launch", reason="Triton exists for Linux only")
    buckets = launch.into_buckets([5000, 1, 2048, 9000], 4096)
    assert buckets == [
        [(0, 0, 4096)],
        [(0, 4096, 904), (1, 0, 1)],
        [(2, 0, 2048), (3, 0, 2048)],
        [(3, 2048, 4096)],
        [(3, 6144, 2856)],
    ]


def test_predicted_memory_includes_the_kernels_blocks():
    kernel = pytest.importorskip("flash_train.optim.kernel", reason="Triton exists for Linux only")
    assert kernel.BLOCK == OPTIMIZER_BLOCK


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_equals_pytorchs(dtype, aligned):
    from tests.support.optim.interpreted_adamw import errors

    ours, pytorch = errors("cuda", dtype, aligned=aligned)
    assert ours <= 2 * pytorch


@pytest.mark.gpu
def test_the_kernels_formats_are_those_of_pytorchs_operations():
    from tests.support.optim.interpreted_adamw import FORMATS, MAY_DIFFER, format_differences

    for case in FORMATS:
        assert max(format_differences(*case, device="cuda").values()) <= MAY_DIFFER, case


def test_pytorchs_adamw_loads_a_state_of_this_one():
    """It would take the codes of 8-bit moments for numbers."""
    torch.manual_seed(0)
    weight, gradient = torch.randn(4, 512), torch.randn(4, 512)
    for moments in ("fp32", "bf16", "8bit"):
        own = torch.nn.Parameter(weight.clone())
        own.grad = gradient.clone()
        optimizer = AdamW([own], lr=1e-3, moments=moments)
        optimizer.step()
        theirs = torch.optim.AdamW([torch.nn.Parameter(weight.clone())], lr=1e-3)
        theirs.load_state_dict(without_codes(optimizer.state_dict()))
        (state,) = theirs.state.values()
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 1
        for name, expected in (("exp_avg", 0.1 * gradient), ("exp_avg_sq", 1e-3 * gradient.square())):
            assert (state[name] - expected).norm() < 0.03 * expected.norm(), (moments, name)


def test_exact_weights_are_those_of_fp32():
    weights, masters = random_weights(), [nn.Parameter(weight.detach().float()) for weight in random_weights()]
    named = [("a", weights[0]), ("b", weights[1])]
    optimizer = AdamW([{"params": named}, {"params": [("c", weights[2])]}], **SETTINGS, moments="fp32")
    take_steps(weights, optimizer, 0, 3)
    take_steps(masters, torch.optim.AdamW(masters, **SETTINGS, fused=True), 0, 3)
    stored = {"m.c": weights[2].detach(), "m.a": weights[0].detach(), "m.b": weights[1].detach().float(), "m.d": None}
    found = exact_weights(stored, optimizer.state_dict(), "m.")
    assert list(found) == list(stored)
    assert torch.equal(found["m.a"], masters[0]) and torch.equal(found["m.c"], masters[2])
    assert found["m.b"] is stored["m.b"] and found["m.d"] is None  # already fp32; not in the optimizer
    nameless = AdamW(weights, **SETTINGS)
    nameless.load_state_dict({**optimizer.state_dict(), "param_groups": nameless.state_dict()["param_groups"]})
    assert exact_weights(stored, nameless.state_dict(), "m.") == stored


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            torch.zeros(2, 3, dtype=torch.float64),
            "AdamW: weights must be in bf16, fp32 or fp16, and one is torch.float64",
        ),
        (torch.zeros(3, 2).t(), "AdamW: weights must be contiguous, and one of shape"),
    ],
)
def test_weights_that_it_cannot_update(weight, message):
    parameter = torch.nn.Parameter(weight)
    with pytest.raises(ValueError, match=message):
        AdamW([parameter])
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter]})


def test_weights_may_be_on_several_devices(monkeypatch):
    """As in a model that is divided over GPUs. One launch was for all of them."""
    weights = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "meta", "cpu", "meta")]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer, numbers = AdamW(weights), []
    monkeypatch.setattr(optimizer, "_launcher", lambda is_cuda: lambda update: numbers.append(update.numbers))
    optimizer.step()
    assert numbers == [[0, 2], [1, 3]]


def test_a_step_cannot_be_captured(monkeypatch):
    """Its replays would all be the step that was captured, without a message."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = AdamW([weight])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="capture the forward and the backward alone"):
        optimizer.step()
    assert not optimizer.state and weight.eq(1).all()
