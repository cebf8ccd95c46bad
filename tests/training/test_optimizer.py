"""Parameter groups, the schedule, the rescaling and clipping of gradients, and the fused step."""

import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from flash_train.cli.config.schema import OptimizerSchema
from flash_train.model import Transformer
from flash_train.optim import AdamW
from flash_train.training.optimizer import (
    OptimizerConfig,
    build_adamw,
    learning_rate_factor,
    parameter_groups,
    rescale_and_clip,
    total_norm,
    warmup_cosine,
)
from tests.support.training.tiny_run import tiny_config


@pytest.mark.parametrize("tied", [True, False])
def test_norms_embeddings_and_biases_do_not_decay(tied):
    model = Transformer(tiny_config(tied_embeddings=tied, qk_norm=True), attention="sdpa")
    model.bias = nn.Parameter(torch.zeros(3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[id(parameter)] for parameter in group["params"]} for group in parameter_groups(model, 0.1))
    assert decayed | kept == set(names.values())
    assert not decayed & kept
    assert {name for name in names.values() if "norm" in name} | {"embedding.weight", "bias"} == kept
    assert ("head.weight" in decayed) is not tied


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == 2


def test_adamw_is_fused_and_leaves_unscaling_to_the_scaler():
    optimizer = build_adamw(nn.Linear(2, 2), OptimizerConfig())
    assert optimizer.defaults["fused"] is True
    assert optimizer._step_supports_amp_scaling is False


def test_schedule():
    factors = [learning_rate_factor(s, warmup_steps=4, max_steps=24, min_lr_ratio=0.1) for s in range(30)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[14] == pytest.approx(0.55)  # half way down
    assert factors[24:] == [pytest.approx(0.1)] * 6
    assert all(a >= b for a, b in pairwise(factors[4:]))
    assert learning_rate_factor(0, warmup_steps=0, max_steps=1, min_lr_ratio=0.0) == 1.0


def test_scheduler_follows_the_schedule():
    optimizer = build_adamw(nn.Linear(2, 2), OptimizerConfig(lr=2.0))
    scheduler = warmup_cosine(optimizer, OptimizerConfig(lr=2.0, warmup_steps=2), max_steps=10)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 0, 0.5, 1e6])
def test_rescale_and_clip(dtype, max_norm):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(7, 5), (300,), (2,)]]
    for parameter in parameters[:2]:  # the third has no gradient
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    before = [parameter.grad.double() for parameter in parameters[:2]]
    exact = 3.0 * torch.cat([gradient.flatten() for gradient in before]).norm().item()

    norm = rescale_and_clip(torch.optim.SGD(parameters), torch.tensor(3.0, dtype=torch.float64), max_norm)

    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact, rel=1e-5)
    factor = 3.0 * (min(1.0, max_norm / exact) if max_norm else 1.0)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    for parameter, gradient in zip(parameters, before, strict=False):
        torch.testing.assert_close(parameter.grad.double(), gradient * factor, rtol=tolerance, atol=1e-12)
    assert parameters[2].grad is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_step_rescales_gradients(max_norm, device, dtype):
    """Weights come out as where the gradients are multiplied beforehand; no scale is left behind. PyTorch's fused step
    writes the multiplied gradients, too, which ours, on a GPU, only reads."""
    config = OptimizerConfig(lr=0.1)
    models = [nn.Linear(7, 5, device=device, dtype=dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fused, plain = build_adamw(models[0], config), torch.optim.AdamW(models[1].parameters(), lr=0.1, betas=config.betas)
    plain.param_groups[0]["weight_decay"] = 0.0
    fused.param_groups[0]["weight_decay"] = 0.0
    for step in range(3):
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(step)).to(device, dtype)
            theirs.grad = ours.grad.clone()
        given = [weight.grad.clone() for weight in models[0].parameters()]
        norms = [rescale_and_clip(optimizer, torch.tensor(3.0), max_norm) for optimizer in (fused, plain)]
        assert norms[0] == norms[1]
        fused.step()
        plain.step()
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            written = theirs.grad if type(fused) is torch.optim.AdamW else given.pop(0)
            torch.testing.assert_close(ours.grad, written, rtol=1e-6, atol=0)
        assert fused.grad_scale is None


def test_our_adamw_updates_bf16_weights_and_others_if_moments_are_given():
    assert type(build_adamw(nn.Linear(2, 2), OptimizerConfig())) is torch.optim.AdamW
    for model, config in (
        (nn.Linear(2, 2, dtype=torch.bfloat16), OptimizerConfig()),
        (nn.Linear(2, 2), OptimizerConfig(moments="bf16")),
    ):
        optimizer = build_adamw(model, config)
        assert type(optimizer) is AdamW and optimizer.defaults["master"] == "exact"
        assert optimizer.defaults["moments"] == config.moments and optimizer.defaults["fused"] is True
    assert build_adamw(nn.Linear(2, 2).bfloat16(), OptimizerConfig(master="none")).defaults["master"] == "none"


@pytest.mark.gpu
def test_our_adamw_is_used_on_a_gpu():
    optimizer = build_adamw(nn.Linear(2, 2, device="cuda"), OptimizerConfig())
    assert type(optimizer) is AdamW
    assert optimizer.defaults["fused"] is True
    assert optimizer._step_supports_amp_scaling is False
    assert type(build_adamw(nn.Linear(2, 2, device="cuda").double(), OptimizerConfig())) is torch.optim.AdamW


def test_rescale_without_any_gradient():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    assert rescale_and_clip(optimizer, torch.tensor(1.0), 1.0).item() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0}, "optimizer.lr=0: must be more than 0"),
        ({"lr": math.nan}, "optimizer.lr=nan"),
        ({"min_lr_ratio": 1.5}, r"min_lr_ratio=1.5: must be in \[0, 1\]"),
        ({"betas": (0.9, 1.0)}, r"two numbers in \[0, 1\)"),
        ({"weight_decay": -1}, "weight_decay=-1: must be 0 or more"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps=-1"),
        ({"gradient_clip": -1.0}, "or null"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**change)


def test_config_round_trip():
    config = OptimizerConfig(lr=1e-3, betas=[0.8, 0.9])
    assert OptimizerConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="no setting lrr; it has betas, eps"):
        OptimizerConfig.from_dict({"lrr": 1})


def test_defaults_of_the_configuration_are_the_defaults_of_optimizer_config():
    defaults = OptimizerConfig().to_dict()
    derived = {"lr", "warmup_steps", "in_backward"}  # null in the configuration: a run derives them
    schema = asdict(OptimizerSchema())
    conf = OmegaConf.load(Path(__file__).parents[2] / "conf" / "optimizer" / "adamw.yaml")
    for values in (schema, OmegaConf.to_container(conf)):
        assert values == {**defaults, **dict.fromkeys(derived)}


def test_pytorchs_adamw_takes_a_checkpoint_with_8_bit_moments():
    torch.manual_seed(0)
    model, gradient = nn.Linear(512, 4, bias=False), torch.randn(4, 512)
    own = build_adamw(model, OptimizerConfig(moments="8bit"))
    model.weight.grad = gradient
    own.step()
    plain = build_adamw(model, OptimizerConfig())
    assert type(plain) is torch.optim.AdamW
    plain.load_state_dict(own.state_dict())
    torch.testing.assert_close(plain.state[model.weight]["exp_avg"], 0.1 * gradient, rtol=0.1, atol=5e-3)


def test_the_norm_of_fp64_gradients_is_fp64():
    tensors = [torch.full((3,), 1 / 3, dtype=torch.float64), torch.ones(2)]
    norm = total_norm(tensors, torch.device("cpu"))
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(math.sqrt(3 / 9 + 2), rel=1e-15)
    assert total_norm(tensors[1:], torch.device("cpu")).dtype == torch.float32


def test_a_model_without_a_weight_to_train():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="Linear has no weight to train: requires_grad is False everywhere"):
        build_adamw(model, OptimizerConfig())
