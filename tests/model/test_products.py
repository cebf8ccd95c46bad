"""Linear layers that add gradients within their products, and that write fp32 gradients under autocast."""

import pytest
import torch
import torch.nn.functional as F

from flash_train.model import products
from tests.support.model.tiny import packing_of, random_batch, tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def micro_batches(model, *, adding: bool, count: int = 3) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    for seed in range(count):
        torch.manual_seed(seed)
        tokens, labels = (x.to(device) for x in random_batch((2, 32), 96, seed=seed))
        packing = packing_of((20, 7, 37), device=device)
        if adding:
            with model.adding_gradients():
                loss, _ = model.loss(tokens, labels, packing=packing)
        else:
            loss, _ = model.loss(tokens, labels, packing=packing)
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("memory", ["none", "selective", "checkpoint"])
@pytest.mark.parametrize("device", DEVICES)
def test_added_gradients_are_the_sums_of_the_micro_batches(memory, device):
    options = {"memory": memory, "keep": 0.5, "n_layers": 4, "attention_dropout": 0.1, "residual_dropout": 0.1}
    dtype = torch.float64 if device == "cpu" else torch.float32
    found = micro_batches(tiny_model(**options, attention="sdpa").to(device, dtype).train(), adding=True)
    expected = micro_batches(tiny_model(**options, attention="sdpa").to(device, dtype).train(), adding=False)
    for got, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(got, reference)


def test_only_products_of_kept_blocks_add_and_the_gradients_stay_the_same_tensors(monkeypatch):
    model, totals = tiny_model(memory="checkpoint", keep=0.5, n_layers=2).train(), []
    micro_batches(model, adding=True, count=1)
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    add_product = products.add_product
    monkeypatch.setattr(products, "add_product", lambda total, a, b: totals.append(total) or add_product(total, a, b))
    micro_batches(model, adding=True, count=1)
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())
    inside = [name for name in before if name.startswith("blocks.1.") and "norm" not in name]
    assert len(inside) == len(totals) == 7 and all(any(before[name] is total for total in totals) for name in inside)
    assert not any(block.adding.on for block in model.blocks)
    micro_batches(model, adding=False, count=1)
    assert len(totals) == 7


def test_weights_with_hooks_are_left_out():
    model, calls = tiny_model(n_layers=1).train(), []
    weight = model.blocks[0].attention.q.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    micro_batches(model, adding=True)
    assert len(calls) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_as_accurate_as_pytorchs(device, dtype):
    """Sixteen micro-batches: the sums of a product in fp32 are rounded once, PyTorch rounds product and sum."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=draw)
    inputs = [torch.randn(96, 64, generator=draw).bfloat16() for _ in range(16)]
    upstream = [torch.randn(96, 48, generator=draw).bfloat16() for _ in range(16)]

    def gradient(linear, kind: torch.dtype) -> torch.Tensor:
        parameter = torch.nn.Parameter(weight.to(device, kind))
        for x, dout in zip(inputs, upstream, strict=True):
            wide = torch.float64 if kind == torch.float64 else torch.bfloat16
            linear(x.to(device, wide), parameter).backward(dout.to(device, wide))
        return parameter.grad.double()

    exact = gradient(F.linear, torch.float64)
    plain = gradient(lambda x, w: F.linear(x, w.to(x.dtype)), dtype)
    ours = gradient(lambda x, w: products.linear(x, w, adds=True), dtype)
    eps = torch.finfo(dtype).eps
    assert (ours - exact).abs().max() <= 1.2 * (plain - exact).abs().max() + eps * exact.abs().max()


@pytest.mark.gpu
def test_fp32_gradients_are_written_by_the_product():
    """Sixteen-bit gradients would be rounded; these have the accuracy of fp32 sums of 16-bit numbers."""
    draw = torch.Generator("cuda").manual_seed(0)
    x, dout = (torch.randn(512, n, device="cuda", generator=draw).bfloat16() for n in (256, 128))
    weight = torch.nn.Parameter(torch.randn(128, 256, device="cuda", generator=draw))
    products.linear(x, weight, adds=False).backward(dout)
    exact = dout.double().T @ x.double()
    assert weight.grad.dtype == torch.float32
    assert (weight.grad - exact).abs().max() < 1e-5 * exact.abs().max()
    before = weight.grad
    products.linear(x, weight, adds=True).backward(dout)
    assert weight.grad is before and (weight.grad - 2 * exact).abs().max() < 1e-5 * exact.abs().max()
