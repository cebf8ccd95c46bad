"""Weights that are updated within the backward get the bits of a step after it."""

import copy

import pytest
import torch
from torch import nn

from flash_train.optim import AdamW, step_in_backward
from tests.support.tiers import slow_after

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = [
    {"master": "exact"},
    {"master": "stochastic", "moments": "8bit"},
    {"master": "exact", "moments": "8bit", "offload": True},
    {"master": "none", "moments": "fp32"},
]


class Tied(nn.Module):
    """An embedding that is also the head, with two matrices, a norm and an unused weight between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 256)
        self.first, self.second = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        self.norm = nn.RMSNorm(256)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.second(self.first(self.norm(x)).relu())
        return nn.functional.linear(x, self.embedding.weight)


def make(device="cpu", dtype=torch.bfloat16, **formats):
    torch.manual_seed(0)
    model = Tied().to(device, dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return model, AdamW(groups, lr=1e-2, seed=3, **formats)


def loss_at(model, step):
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(40, (7,), generator=draw).to(model.norm.weight.device)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1), reduction="sum")


def norm_of(model):
    return torch.linalg.vector_norm(
        torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None])
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("formats", slow_after(2, FORMATS), ids=lambda formats: "-".join(map(str, formats.values())))
def test_a_step_in_the_backward_has_the_bits_of_a_step_after_it(formats, device):
    """Also with the default dtype of Lightning's bf16-true, and for a state that a checkpoint brought."""
    model, optimizer = make(device, **formats)
    other, other_optimizer = make(device, **formats)
    for step in range(4):
        scale = torch.tensor(7.0, device=device)
        loss_at(model, step).backward()
        norm = norm_of(model)
        optimizer.grad_scale = scale
        optimizer.step()
        optimizer.zero_grad()

        other_optimizer.grad_scale = scale
        torch.set_default_dtype(torch.bfloat16)
        try:
            with step_in_backward(other_optimizer) as norms:
                loss_at(other, step).backward()
        finally:
            torch.set_default_dtype(torch.float32)
        other_optimizer.step()
        assert other_optimizer.grad_scale is None
        assert all(weight.grad is None for weight in other.parameters())
        torch.testing.assert_close(norms.total(), norm, rtol=1e-6, atol=0)
        for (name, weight), twin in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(weight, twin), name
            for entry, value in optimizer.state[weight].items():
                assert torch.equal(value, other_optimizer.state[twin][entry]), (name, entry)
        if step == 1:
            saved = copy.deepcopy(other_optimizer.state_dict())
            other_optimizer.load_state_dict(saved)
    assert not torch.equal(other.first.weight, make(device)[0].first.weight)
    assert torch.equal(other.unused, torch.ones_like(other.unused))


def test_gradients_are_never_together():
    """When a gradient arrives, no other weight has one."""
    model, optimizer = make()
    with_gradient = []

    def count(weight):
        with_gradient.append(sum(p.grad is not None for p in model.parameters()))

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(count)
    with step_in_backward(optimizer):
        loss_at(model, 0).backward()
    assert with_gradient == [1] * 4


def test_the_context_ends():
    model, optimizer = make()
    with step_in_backward(optimizer) as norms:
        pass
    with pytest.raises(ValueError, match="no weight got a gradient"):
        norms.total()
    before = model.first.weight.detach().clone()
    loss_at(model, 0).backward()
    assert torch.equal(model.first.weight, before)
    assert model.first.weight.grad is not None


def test_a_graph_that_still_needs_a_weight_raises():
    model, optimizer = make(dtype=torch.float32)
    x = torch.ones(1, 256, requires_grad=True)
    late = nn.functional.linear(x, model.first.weight.detach())  # shares its memory and its version
    with step_in_backward(optimizer):
        loss_at(model, 0).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_another_optimizer_is_refused_before_the_backward():
    optimizer = torch.optim.AdamW(Tied().parameters())
    message = r"^optimizer=torch\.optim\.adamw\.AdamW: must be a flash_train\.optim\.AdamW$"
    with pytest.raises(TypeError, match=message), step_in_backward(optimizer):
        pytest.fail("the context was entered")
