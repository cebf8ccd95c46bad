"""Sampling without a KV cache. It shows what a model has learnt and is not meant for serving."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from flash_train.checks import at_least, check, integer_at_least


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    vocab_limit: int | None = None,
    max_seconds: float | None = None,
    agree: Callable[[bool], bool] = bool,
) -> list[int]:
    """Continue `tokens` and return only the new ids.

    Each id costs a forward over all ids before it. This forward runs eagerly even if the model is compiled, since each
    length would compile a new graph.

    Args:
        model: a Transformer, or a module with the same forward. If its weights are sharded, all ranks generate
            together.
        tokens: the ids to continue, at least one.
        max_new_tokens: how many ids to draw.
        temperature: divides the logits; 0 takes the likeliest id.
        generator: on the model's device; None takes PyTorch's default.
        vocab_limit: ids from here on, which pad the vocabulary, are never drawn.
        max_seconds: stop after this time, but not before the first id.
        agree: takes whether this rank's time is over, and returns whether any rank's is.

    Raises:
        ValueError: no token to continue, tokens of several texts, or an argument is out of range.
        FloatingPointError: the model's logits are nan or inf.
    """
    if not len(tokens):
        raise ValueError("tokens=[]: must be at least one token to start from")
    check("temperature", temperature, at_least(0))
    check("max_new_tokens", max_new_tokens, integer_at_least(0))
    check("vocab_limit", vocab_limit, integer_at_least(1), or_none="or None for the whole vocabulary")
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    stream = torch.as_tensor(tokens, dtype=torch.int64, device=next(model.parameters()).device)
    if stream.dim() != 1:
        raise ValueError(f"tokens has shape {tuple(stream.shape)}: must be (seq,), the ids of one text")
    stream = stream[None]
    start = stream.shape[1]
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        for _ in range(max_new_tokens):
            logits = model(stream)[0, -1].float()[:vocab_limit]
            largest = logits.max()
            if not largest.isfinite():  # sampling from NaN ends a process's use of its GPU
                raise FloatingPointError(f"the model's largest logit is {largest.item()}: training has diverged")
            if temperature == 0:
                token = logits.argmax(keepdim=True)
            else:
                relative = (logits - largest) / temperature  # 0 for the likeliest id, however small it is
                token = torch.multinomial(relative.softmax(-1), 1, generator=generator)
            stream = torch.cat((stream, token[None]), dim=1)
            if deadline is not None and agree(_time_when_ready(token) >= deadline):
                break
    return stream[0, start:].tolist()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module of it back into its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _time_when_ready(token: torch.Tensor) -> float:
    """Wait until the device has computed `token`, then return the monotonic clock in seconds."""
    token.item()
    return time.monotonic()
