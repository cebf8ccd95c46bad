"""The MLP half of a recomputed block: its tiles, its gradients, and what runs again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flash_train.model import Transformer
from flash_train.model.layers import Block
from flash_train.model.tiled_mlp import tile_size, tiled_mlp
from tests.support.model.tiny import tiny_config

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def half_block(dtype: torch.dtype, device: str = "cpu", **options) -> Block:
    torch.manual_seed(0)
    block = Block(tiny_config(width=64, mlp_width=160, residual_dropout=0.25, **options), "sdpa").to(device, dtype)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.2)
    return block


def inputs(tokens: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x, dout = (torch.randn(tokens, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(tokens, 64, generator=generator) < 0.75
    return x.to(device, dtype).requires_grad_(), mask.to(device), dout.to(device, dtype)


def learned(block: Block) -> list[torch.nn.Parameter]:
    return [*block.mlp_norm.parameters(), *block.mlp.parameters()]


def run(block, x, mask, dout, tile_tokens: int | None) -> list[torch.Tensor]:
    """The output and all gradients; without tiles through autograd."""
    if tile_tokens is None:
        stream, update = block._mlp_half(x, mask, True)
        out = stream + update
    else:
        out = tiled_mlp(block._mlp_half, x, mask, learned(block), tile_tokens)
    wanted = [tensor for tensor in (x, *learned(block)) if tensor.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout)]


@pytest.mark.parametrize(("tokens", "tile_tokens"), [(300, 128), (256, 128), (50, 128), (1000, 300), (1, 128)])
def test_tiles_have_the_gradients_of_the_whole_row(tokens, tile_tokens):
    block = half_block(torch.float64)
    x, mask, dout = inputs(tokens, torch.float64)
    whole, tiled = run(block, x, mask, dout, None), run(block, x, mask, dout, tile_tokens)
    for got, expected in zip(tiled, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles_lose_no_accuracy(dtype, device):
    """Sums over tiles are in fp32: in bf16, sixteen roundings of a sum would show."""
    block = half_block(dtype, device)
    x, mask, dout = inputs(2048, dtype, device)
    whole, tiled = run(block, x, mask, dout, None), run(block, x, mask, dout, 128)
    exact_block = half_block(torch.float64, device)
    exact_block.load_state_dict(block.state_dict())
    exact = run(exact_block, x.detach().double().requires_grad_(), mask, dout.double(), None)
    for factor, got, peer, reference in zip((2, *[3] * 9), tiled, whole, exact, strict=False):
        allowed = factor * (peer - reference).abs().max() + torch.finfo(dtype).eps * reference.abs().max()
        assert (got - reference).abs().max() <= allowed


def test_frozen_weights_get_no_gradient():
    block = half_block(torch.float64)
    block.mlp.gate.weight.requires_grad_(False)
    block.mlp_norm.weight.requires_grad_(False)
    x, mask, dout = inputs(300, torch.float64)
    for got, expected in zip(run(block, x, mask, dout, 128), run(block, x, mask, dout, None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_autocast_is_the_same_in_the_backward():
    block = half_block(torch.float32)
    x, mask, dout = inputs(300, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        whole, tiled = run(block, x, mask, dout, None), run(block, x, mask, dout, 300)
    for got, expected in zip(tiled, whole, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_a_recomputed_block_runs_its_mlp_once_more_and_holds_one_tile():
    block, seen = half_block(torch.float32), []
    block.mlp.gate.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    x, mask, dout = inputs(512, torch.float32)

    def second_half(x):
        return tiled_mlp(block._mlp_half, x * 1, mask, learned(block), 128)

    checkpoint(second_half, x, use_reentrant=False).backward(dout)
    assert seen == [128] * 4 + [128] * 4  # the forward, then the backward: the recomputation runs none


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(0, 0), (1, 1), (32_768, 32_768), (32_769, 16_512), (65_536, 32_768), (98_304, 32_768), (40_000, 20_096)],
)
def test_tile_size(tokens, size):
    assert tile_size(tokens) == size


@pytest.mark.gpu
def test_the_last_product_is_not_computed_again():
    """With `needs_value=False` the result has no memory of its own, and the gradients are the same."""
    block = half_block(torch.bfloat16, "cuda")
    x, mask, dout = inputs(512, torch.bfloat16, "cuda")
    _, update = block._mlp_half(x, None, False)
    assert update.shape == x.shape and update.untyped_storage().nbytes() < x.nbytes
    for got, expected in zip(run(block, x, mask, dout, 512), run(block, x, mask, dout, None), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("memory", ["selective", "checkpoint"])
@pytest.mark.parametrize("trained", ["mlp", "mlp.down", "attention", "norm", "blocks.1", "embedding", "head"])
def test_frozen_weights_change_no_gradient(memory, trained):
    """Also where nothing before the first MLP is trained."""
    found = []
    for mode in ("none", memory):
        torch.manual_seed(0)
        model = Transformer(tiny_config(tied_embeddings=False), attention="sdpa", memory=mode)
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained in name)
        tokens = torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(1))
        model.loss(tokens, tokens)[0].backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
        assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)
    assert found[0] and all(gradient is not None for gradient in found[1].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)
