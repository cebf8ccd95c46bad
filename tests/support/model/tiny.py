"""Small models and packed batches that the tests of the model share."""

import torch

from flash_train.attention import Packing
from flash_train.model import ModelConfig, Transformer

SHAPE = {
    "vocab_size": 96,
    "n_layers": 2,
    "width": 48,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "mlp_width": 80,
    "tied_embeddings": False,
}


def tiny_config(**overrides) -> ModelConfig:
    return ModelConfig(**(SHAPE | overrides))


def tiny_model(
    *, attention: str = "sdpa", memory: str = "none", keep: float = 0.0, seed: int = 0, **overrides
) -> Transformer:
    """A model whose weights are large enough that every part of it matters to the result."""
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**overrides), attention=attention, memory=memory, keep=keep)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.15)
    return model


def packing_of(lengths: tuple[int, ...], spare: int = 2, device: str = "cpu") -> Packing:
    """Boundaries of `lengths`, padded with `spare` empty entries as the data layer does."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = torch.cat((ends, ends[-1:].expand(spare))).to(torch.int32).to(device)
    return Packing(cu_seqlens, cu_seqlens, max(lengths), max(lengths), lengths)


def positions_of(lengths: tuple[int, ...], shape: tuple[int, int], device: str = "cpu") -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).view(shape).to(device)


def random_batch(shape: tuple[int, int], vocab_size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; about a tenth of the labels are -100."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    labels = torch.randint(vocab_size, shape, generator=generator)
    return tokens, labels.masked_fill(torch.rand(shape, generator=generator) < 0.1, -100)
