"""Inputs of blocks in the host's memory: the gradients do not change, and the memory of the device is free."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flash_train.host_memory import compute_after
from flash_train.model import ModelConfig, Transformer, offload
from flash_train.model.offload import blocks_on_host

CONFIG = ModelConfig(
    vocab_size=64, n_layers=6, width=32, n_heads=2, n_kv_heads=1, head_dim=16, mlp_width=64, attention_dropout=0.1,
    residual_dropout=0.1,
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def buffers(model):
    """The number of buffers in the host's memory that a next forward can take."""
    gc.collect()
    inputs = model._host_inputs
    return len(inputs._free) + sum(len(place.memory) for known in inputs._taken if (place := known()) is not None)


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
    assert buffers(model) == expected


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


def test_a_copy_is_awaited_on_its_own_device(monkeypatch):
    """Another device may be the current one, whose stream waited in its place."""
    waits = []

    def stream_of(device=None):
        return SimpleNamespace(wait_event=lambda event: waits.append((device, event)))

    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    compute_after("copied", torch.device("cuda", 1))
    assert waits == [(torch.device("cuda", 1), "copied")]


def test_a_graph_can_be_used_twice():
    model = Transformer(CONFIG, attention="standard", memory="checkpoint", offload=1.0)
    tokens = torch.randint(64, (2, 40))
    loss, _ = model.loss(tokens, tokens)
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def loss_of(model, seed):
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(seed))
    return model.loss(tokens, tokens)[0]


def without_dropout(**options):
    torch.manual_seed(0)
    config = replace(CONFIG, attention_dropout=0.0, residual_dropout=0.0)
    return Transformer(config, attention="standard", memory="checkpoint", **options)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_two_forwards_before_a_backward():
    """As in DPO: the second forward must not overwrite what the backward of the first needs."""
    plain, model = without_dropout(), without_dropout(offload=1.0)
    for _ in range(2):
        expected = gradients_of(plain, loss_of(plain, 1) - loss_of(plain, 2))
        found = gradients_of(model, loss_of(model, 1) - loss_of(model, 2))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert buffers(model) == 10


def test_a_loss_that_is_still_there_takes_no_second_memory():
    model = without_dropout(offload=1.0)
    kept = []
    for seed in range(3):
        kept.append(loss_of(model, seed))
        kept[-1].backward()
    assert buffers(model) == 5


def test_a_backward_that_ends_early_leaves_nothing_behind():
    plain, model = without_dropout(), without_dropout(offload=1.0)
    torch.autograd.grad(loss_of(model, 1), list(model.blocks[3].parameters()))

    def fail(gradient):
        raise FloatingPointError

    handle = model.blocks[2].register_full_backward_pre_hook(lambda *_: fail(None))
    with pytest.raises(FloatingPointError):
        loss_of(model, 1).backward()
    handle.remove()
    expected, found = gradients_of(plain, loss_of(plain, 2)), gradients_of(model, loss_of(model, 2))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_an_input_that_no_backward_took_is_kept_until_it_has_arrived(monkeypatch):
    """The copy would write to memory that a later tensor has by then."""
    model, arrived = without_dropout(offload=1.0), []
    torch.autograd.grad(loss_of(model, 1), list(model.blocks[3].parameters()))
    under_way = [x for x, _ in model._host_inputs._moving]
    assert len(under_way) == 1
    monkeypatch.setattr(offload, "compute_after", lambda event, device: arrived.append(device))
    model._host_inputs.settle()
    assert arrived == [torch.device("cpu")] and not model._host_inputs._moving
    loss_of(model, 1).backward()
    assert not model._host_inputs._moving


def test_a_second_backward_after_another_forward_is_an_error():
    model = without_dropout(offload=1.0)
    loss = loss_of(model, 1)
    loss.backward(retain_graph=True)
    loss_of(model, 2)
    with pytest.raises(RuntimeError, match="a later forward has taken the host memory of the input of block"):
        loss.backward()


def test_models_can_be_copied_and_used_without_gradients():
    model, _ = gradients("cpu", memory="checkpoint", offload=1.0)
    assert buffers(model) == 5 and buffers(copy.deepcopy(model)) == 0
    assert buffers(pickle.loads(pickle.dumps(model))) == 0
    with torch.no_grad():
        model(torch.randint(64, (1, 8)))
    with pytest.raises(ValueError, match=r"memory.offload=1.5: must be in \[0, 1\]"):
        Transformer(CONFIG, offload=1.5)
