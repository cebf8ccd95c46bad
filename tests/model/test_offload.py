"""Inputs of blocks in the host's memory: the gradients do not change, and the memory of the device is free."""

import copy
import gc
import weakref

import pytest
import torch

from flash_train.model import ModelConfig, Transformer
from flash_train.model.offload import blocks_on_host

CONFIG = ModelConfig(
    vocab_size=64, n_layers=6, width=32, n_heads=2, n_kv_heads=1, head_dim=16, mlp_width=64, attention_dropout=0.1,
    residual_dropout=0.1,
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(device, **options):
    """The model and its gradients after two micro-batches."""
    torch.manual_seed(0)
    model = Transformer(CONFIG, attention="standard", **options).to(device)
    for length in (40, 24):  # the memory in the host is taken again for another length
        tokens = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
        model.loss(tokens, tokens)[0].backward()
    return model, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", ["checkpoint", "selective"])
@pytest.mark.parametrize(("offload", "keep", "expected"), [(1.0, 0.0, 5), (0.5, 0.0, 3), (1.0, 0.5, 3), (0.17, 0.0, 1)])
def test_gradients_are_the_same(device, memory, offload, keep, expected):
    _, plain = gradients(device, memory=memory)
    model, offloaded = gradients(device, memory=memory, offload=offload, keep=keep)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert sorted(model._host_inputs._memory) == list(range(expected))
    assert not model._host_inputs._arriving and not model._host_inputs._sent


def test_which_blocks():
    assert blocks_on_host(8, 8, 0.5) == 4
    assert blocks_on_host(8, 8, 1.0) == 7  # the last block's backward comes at once
    assert blocks_on_host(8, 3, 1.0) == 3  # the others keep everything
    assert blocks_on_host(8, 0, 1.0) == 0
    assert blocks_on_host(1, 1, 1.0) == 0


def test_inputs_are_freed_during_the_forward():
    model = Transformer(CONFIG, attention="standard", memory="checkpoint", offload=1.0)
    alive, most = weakref.WeakSet(), []

    def look(block, arguments):
        alive.add(arguments[0].untyped_storage())
        gc.collect()
        most.append(len(alive))

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    tokens = torch.randint(64, (2, 40))
    loss, _ = model.loss(tokens, tokens)
    assert max(most) <= 2
    loss.backward()


def test_a_graph_can_be_used_twice():
    model = Transformer(CONFIG, attention="standard", memory="checkpoint", offload=1.0)
    tokens = torch.randint(64, (2, 40))
    loss, _ = model.loss(tokens, tokens)
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_models_can_be_copied_and_used_without_gradients():
    model, _ = gradients("cpu", memory="checkpoint", offload=1.0)
    assert not copy.deepcopy(model)._host_inputs._memory
    with torch.no_grad():
        model(torch.randint(64, (1, 8)))
    with pytest.raises(ValueError, match=r"memory.offload=1.5: must be in \[0, 1\]"):
        Transformer(CONFIG, offload=1.5)
