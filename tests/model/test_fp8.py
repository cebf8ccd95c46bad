"""fp8 products: their accuracy, in which layers they are, and that the weights stay a model's weights.

On a CPU torchao rounds to fp8 and multiplies in fp32 (`emulate`).
"""

import pytest
import torch
from torch import nn

from flash_train.model import Transformer
from flash_train.model.fp8 import fp8_obstacle, to_fp8
from flash_train.model.layers import Linear
from tests.support.model.tiny import packing_of, random_batch, tiny_config, tiny_model

pytest.importorskip("torchao", reason="torchao is not installed")

SHAPE = {"width": 64, "mlp_width": 96, "head_dim": 16, "n_layers": 3}
# A product's operands are rounded by up to 2^-4 (e4m3) and 2^-3 (e5m2 of a gradient), evenly distributed. A gradient
# goes through four products a block, whose errors are independent.
ALLOWED = (4 * SHAPE["n_layers"]) ** 0.5 * (2**-4 + 2**-3) / 3**0.5


def fp8_model(recipe: str = "tensorwise", **options) -> Transformer:
    model = tiny_model(**SHAPE, **options).bfloat16().train()
    to_fp8(model, recipe, emulate=True)
    return model


def loss_and_gradients(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens, labels = random_batch((2, 32), 96)
    loss, count = model.loss(tokens, labels, packing=packing_of((20, 7, 37)))
    model.zero_grad()
    (loss / count).backward()
    return loss.detach() / count, {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_are_close_to_those_of_bf16(recipe):
    loss, gradients = loss_and_gradients(fp8_model(recipe))
    plain_loss, plain = loss_and_gradients(tiny_model(**SHAPE).bfloat16().train())
    assert loss != plain_loss and loss == pytest.approx(plain_loss.item(), rel=0.02)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        error = (gradient - plain[name]).norm() / plain[name].norm()
        assert 0 < error < 1.5 * ALLOWED, name


@pytest.mark.parametrize("memory", ["selective", "checkpoint"])
def test_memory_modes_have_the_same_gradients(memory):
    loss, gradients = loss_and_gradients(fp8_model(memory=memory))
    plain_loss, plain = loss_and_gradients(fp8_model())
    assert torch.equal(loss, plain_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], rtol=0.02, atol=1e-3 * plain[name].abs().max().item())


def test_all_layers_of_the_blocks_are_converted_and_no_others():
    model = fp8_model(tied_embeddings=False)
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert len(kinds) == 3 * 7 + 1 and kinds.pop("head") is Linear
    assert {kind.__name__ for kind in kinds.values()} == {"Float8Linear"}
    assert model.fp8 == "tensorwise" and tiny_model().fp8 is None


def test_weights_load_into_a_model_without_fp8_and_back():
    model, plain = fp8_model(seed=1), tiny_model(**SHAPE, seed=2).bfloat16()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    tokens, _ = random_batch((1, 16), 96)
    assert torch.equal(model.eval()(tokens), plain.eval()(tokens))  # evaluation computes in bf16


def test_widths_that_fp8_products_cannot_have():
    model = Transformer(tiny_config(width=64, mlp_width=100), attention="sdpa")
    with pytest.raises(ValueError, match=r"blocks.0.mlp.gate.weight: 100 x 64; for fp8 both must be multiples of 16"):
        to_fp8(model, emulate=True)
    with pytest.raises(ValueError, match="recipe='blockwise': must be one of tensorwise, rowwise"):
        to_fp8(model, "blockwise")


def test_what_prevents_it(monkeypatch):
    assert fp8_obstacle(torch.device("cpu")) == "needs an NVIDIA GPU of compute capability 8.9 or later"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert fp8_obstacle(torch.device("cuda")) == "needs compute capability 8.9 or later, and this GPU has 8.6"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8_obstacle(torch.device("cuda")) is None
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    assert fp8_obstacle(torch.device("cuda")) == "needs torchao: pip install 'torchao>=0.18'"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("memory", ["none", "checkpoint"])
def test_compiled_layers_on_the_card(recipe, memory):
    """The card's products, from compiled layers, are as close to bf16's gradients as emulated ones."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    config = tiny_config(width=256, mlp_width=512, head_dim=64, n_heads=4, n_kv_heads=2, n_layers=2, vocab_size=512)
    results = []
    for kind in ("bf16", "emulated", "card"):
        torch.manual_seed(0)
        model = Transformer(config, attention="flash", memory=memory).to("cuda", torch.bfloat16).train()
        if kind != "bf16":
            to_fp8(model, recipe, emulate=kind == "emulated")
        tokens, labels = (x.cuda() for x in random_batch((1, 1024), 512))
        loss, count = model.loss(tokens, labels)
        (loss / count).backward()
        results.append([p.grad.float() for p in model.parameters()])
    for plain, emulated, card in zip(*results, strict=True):
        assert (card - plain).norm() <= 1.5 * (emulated - plain).norm() + 1e-3 * plain.norm()
