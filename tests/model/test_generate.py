"""Sampling: greedy, seeded, bounded to the real vocabulary."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from flash_train.model import generate
from tests.support.model.tiny import tiny_model


def test_temperature_zero_takes_the_likeliest_id_of_each_step():
    model = tiny_model().eval()
    tokens = [3, 1, 4]
    new = generate(model, tokens, max_new_tokens=4, temperature=0)
    assert len(new) == 4
    with torch.no_grad():
        for token in new:
            assert token == model(torch.tensor([tokens]))[0, -1].argmax().item()
            tokens.append(token)


def test_samples_depend_on_the_generator_only():
    def sample(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return generate(tiny_model(), [1, 2], max_new_tokens=12, temperature=1.5, generator=generator)

    assert sample(0) == sample(0) != sample(1)


def test_low_temperature_is_greedy():
    greedy = generate(tiny_model(), [1, 2], max_new_tokens=6, temperature=0)
    assert generate(tiny_model(), [1, 2], max_new_tokens=6, temperature=1e-4) == greedy


@pytest.mark.parametrize("temperature", [0, 100.0])
def test_ids_at_or_above_the_limit_are_never_drawn(temperature):
    model = tiny_model()
    with torch.no_grad():
        model.head.weight[10:] = 50 * model.hidden(torch.tensor([[1]]))[0]  # without the limit they would win at once
    new = generate(model, [1], max_new_tokens=30, temperature=temperature, vocab_limit=10)
    assert max(new) < 10
    assert max(generate(model, [1], max_new_tokens=30, temperature=temperature)) >= 10


def test_generate_samples_without_dropout_and_restores_each_modules_mode():
    model = tiny_model(residual_dropout=0.5).train()
    model.blocks[0].eval()  # as of blocks that are frozen
    modes = [module.training for module in model.modules()]
    first = generate(model, torch.tensor([1, 2, 3]), max_new_tokens=5, temperature=0)
    assert modes == [module.training for module in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert first == generate(model, [1, 2, 3], max_new_tokens=5, temperature=0)
    assert generate(model, [1], max_new_tokens=0) == []


def test_a_compiled_model_runs_eagerly_and_is_compiled_afterwards():
    model, compilations = tiny_model(), CompileCounter()
    expected = generate(model, [1, 2], max_new_tokens=5, temperature=0)
    for block in model.blocks:
        block.compile(backend=compilations, dynamic=False)
    assert generate(model, [1, 2], max_new_tokens=5, temperature=0) == expected
    assert compilations.frame_count == 0
    model(torch.tensor([[1, 2]]))
    assert compilations.frame_count > 0


def test_generate_refuses_wrong_prompts_and_a_negative_temperature():
    with pytest.raises(ValueError, match="at least one token"):
        generate(tiny_model(), [], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 3\): must be \(seq,\), the ids of one text"):
        generate(tiny_model(), [[1, 2, 3], [4, 5, 6]], max_new_tokens=1)  # two prompts would be continued as one
    with pytest.raises(ValueError, match="temperature=-1: must be 0 or more"):
        generate(tiny_model(), [1], max_new_tokens=1, temperature=-1)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature):
    """The likeliest id would be 0, and a draw on a GPU would be an assertion that ends its use."""
    model = tiny_model()
    nn.init.constant_(model.norm.weight, math.nan)
    with pytest.raises(FloatingPointError, match="the model's largest logit is nan: training has diverged"):
        generate(model, [1, 2], max_new_tokens=1, temperature=temperature)


def test_generate_stops_at_its_time_limit(monkeypatch):
    """Each look at the clock is a second later; the first is before any token."""
    clock = iter(range(100))
    module = sys.modules[generate.__module__]  # the package has the function under the module's name
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    everything = generate(tiny_model(), [1, 2], max_new_tokens=6, temperature=0)
    assert next(clock) == 0  # without a limit nobody looks
    for seconds, tokens in ((0.5, 1), (1.0, 1), (2.5, 3), (100.0, 6)):
        clock = iter(range(100))
        new = generate(tiny_model(), [1, 2], max_new_tokens=6, temperature=0, max_seconds=seconds)
        assert new == everything[:tokens]


def test_a_tiny_temperature_and_wrong_arguments():
    model = tiny_model()
    options = {"max_new_tokens": 5}
    assert generate(model, [1], temperature=1e-39, **options) == generate(model, [1], temperature=0, **options)
    assert generate(model, [1], max_new_tokens=0) == []
    for name, value in (("vocab_limit", 0), ("vocab_limit", -1), ("max_new_tokens", -1), ("max_new_tokens", 1.5)):
        with pytest.raises(ValueError, match=f"^{name}={value}: must be an integer of at least"):
            generate(model, [1], **options | {name: value})
