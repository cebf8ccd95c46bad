"""An optimizer's state goes to the weights that it was saved from, or to none."""

import re

import pytest
import torch
from torch import nn

from flash_train.distributed.same_weights import check_same_weights
from flash_train.training.optimizer import OptimizerConfig, build_adamw
from tests.support.training.tiny_run import TinyData, tiny_module, tiny_trainer


def trained(*frozen, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    for number in frozen:
        model[number].requires_grad_(False)
    optimizer = build_adamw(model, OptimizerConfig())
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # PyTorch's AdamW and ours
def test_state_of_other_weights_is_refused(dtype):
    """Also of as many weights of the same shapes."""
    state = trained(0, dtype=dtype).state_dict()
    message = "trains other weights: 1.weight, 1.bias only in the checkpoint; 0.weight, 0.bias only here; "
    with pytest.raises(ValueError, match=re.escape(message)):
        trained(1, dtype=dtype).load_state_dict(state)
    with pytest.raises(ValueError, match=r"other weights: 0\.weight, 0\.bias only here; train the same weights"):
        trained(dtype=dtype).load_state_dict(state)
    trained(0, dtype=dtype).load_state_dict(state)


def test_weights_without_names_are_counted():
    one, two = (torch.optim.SGD([nn.Parameter(torch.ones(2)) for _ in range(n)]) for n in (1, 2))
    with pytest.raises(ValueError, match=r"has groups of \[1\] weights, and the one here of \[2\]; train the same"):
        check_same_weights(two, one.state_dict())
    check_same_weights(two, two.state_dict())


def test_weights_in_another_order_are_refused():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = (torch.optim.SGD(named) for named in ([("a", a), ("b", b)], [("b", b), ("a", a)]))
    with pytest.raises(ValueError, match="trains other weights: in another order;"):
        check_same_weights(second, first.state_dict())


def test_a_run_that_trains_other_weights_does_not_resume(tmp_path):
    module = tiny_module()
    module.model.blocks[0].requires_grad_(False)
    tiny_trainer(tmp_path / "a", max_steps=2).fit(module, datamodule=TinyData())
    module = tiny_module()
    module.model.blocks[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"trains other weights: blocks\.1\..* and \d+ more only in the checkpoint"):
        tiny_trainer(tmp_path / "b", max_steps=4).fit(
            module, datamodule=TinyData(), ckpt_path=tmp_path / "a" / "checkpoints" / "step-000002.ckpt"
        )
