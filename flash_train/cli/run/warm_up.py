"""The kernels of a run's steps, compiled while PyTorch Lightning is imported.

Triton compiles a kernel when it is first launched. That takes seconds for each attention kernel that is written in
Gluon, and for all kernels of a step about as long as the import. Most of the compiler, the assembler and the C compiler
run outside of Python's lock. Kernels that were compiled before are only loaded, and the first step need not do that.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig

from flash_train.attention import AttentionSpec, Causal, Packing, attention
from flash_train.attention.backends import interpreting
from flash_train.attention.dropout import draw_state
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels.families import is_own
from flash_train.cli.config.errors import is_out_of_memory
from flash_train.cli.run.resolve import device_of, model_and_backend
from flash_train.model import ModelConfig, Transformer
from flash_train.precision import PRECISIONS

LONG = 4096  # tokens of a row, from which on longer ones launch the same kernels
SHORT = 128
DOCUMENTS = 64  # of a row of texts; in one that is LONG they are then as short as most
ALIGNED = 16  # Triton compiles for whether a number is a multiple of it

Part = Callable[[], None]


@contextmanager
def rehearsed(config: DictConfig) -> Iterator[None]:
    """Runs small copies of what a step will launch in threads of their own, beside the caller, and waits for them at
    the end, even that of an error or an interrupt.

    They may draw from PyTorch's generators; what they leave in memory any step does: cuBLAS's workspaces. The cross
    entropy and the optimizer are not rehearsed. Nothing is with attention that isn't ours, on several devices, for a
    deterministic run, before whose first matrix product cuBLAS has to be set up, and for a validation.
    """
    device = device_of(config.trainer.accelerator)
    alone = config.trainer.devices * config.trainer.num_nodes == 1
    if device.type != "cuda" or not alone or config.trainer.deterministic or config.validate_only:
        yield
        return
    found = parts(config, torch.device("cuda", 0))
    with shared_triton() if found else nullcontext(), ThreadPoolExecutor() as pool:
        running = [pool.submit(attempt, part) for part in found]
        yield
        for part in running:
            part.result()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def attempt(part: Part) -> None:
    """Run it; where memory doesn't suffice, leave it to the run to tell what it lacks."""
    try:
        part()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


@contextmanager
def shared_triton() -> Iterator[None]:
    """Makes Triton fit for several threads: what it asks the driver with is made by one of them, and it leaves the
    process's filters of warnings alone. Version 3.6 changes those at every node that it compiles, and back; each thread
    would bring back what it found. What it ignores there, Python doesn't show."""
    from triton.compiler import code_generator
    from triton.runtime import driver

    attempt(driver.active.get_current_device)
    module: Any = code_generator
    found = module.warnings
    module.warnings = SimpleNamespace(
        **{**vars(warnings), "catch_warnings": nullcontext, "simplefilter": lambda *_, **__: None}
    )
    try:
        yield
    finally:
        module.warnings = found


def parts(config: DictConfig, device: torch.device) -> list[Part]:
    """What can run side by side: the attention's forward, its backward, and the rest of a block, both ways."""
    model, backend = model_and_backend(config, 1, device)  # the vocabulary shapes none of these kernels
    if not is_own(backend) or interpreting():  # by which nothing is compiled, and which takes minutes
        return []
    dtype, weights = PRECISIONS[config.precision].compute_dtype, PRECISIONS[config.precision].weight_dtype
    whole_rows = config.data.packing == "concat" or config.data.corpus == "recall"
    row = one_row(config.seq_len * (1 if whole_rows else config.batch_size), LONG)
    entries = 1 if whole_rows else DOCUMENTS
    found: list[Part] = [
        lambda: attention_forward(model, backend, dtype, packing_of(row, entries, device)),
        lambda: attention_backward(model, backend, dtype, packing_of(row, entries, device)),
    ]
    if not config.compile:  # of whose blocks Inductor makes kernels of its own
        few = one_row(config.seq_len * config.batch_size, SHORT)
        found.append(lambda: rest_of_block(model, weights, dtype, packing_of(few, 1, device)))
    return found


def one_row(tokens: int, most: int) -> int:
    """So many tokens, or about as many as suffice."""
    return min(tokens, most + tokens % ALIGNED)


def packing_of(tokens: int, entries: int, device: torch.device) -> Packing:
    """One document, with places for more behind it."""
    cu_seqlens = torch.tensor([0] + [tokens] * entries, dtype=torch.int32, device=device)
    return Packing(cu_seqlens, cu_seqlens, lengths=(tokens,))


def attention_forward(model: ModelConfig, backend: str, dtype: torch.dtype, packing: Packing) -> None:
    q, k, v = _zeros(model, dtype, packing)
    attention(q, k, v, _spec(model), packing=packing, backend=backend)


def attention_backward(model: ModelConfig, backend: str, dtype: torch.dtype, packing: Packing) -> None:
    """Beside the forward, not behind it: of results that are none."""
    q, k, v = _zeros(model, dtype, packing)
    spec = _spec(model)
    state = draw_state(q.device) if spec.dropout > 0 else None
    call = operands_of(q, k, spec, packing, state, (0, 0, 0, 0), None, None)
    lse = torch.zeros((q.shape[1], q.shape[0]), device=q.device)
    torch.ops.flash_train.attention_backward(q, None, q, k, v, q, lse, *call.arguments, backend, False)


def rest_of_block(model: ModelConfig, weights: torch.dtype, dtype: torch.dtype, packing: Packing) -> None:
    """A decoder of one block, whose attention launches none of the kernels that are rehearsed by themselves."""
    device, (tokens,) = packing.cu_seqlens_q.device, packing.lengths or ()
    with torch.device("meta"):
        decoder = Transformer(replace(model, n_layers=1, vocab_size=1), attention="standard")
    decoder = decoder.to(weights).to_empty(device=device)
    for weight in decoder.parameters():
        torch.nn.init.zeros_(weight)
    with torch.autocast(device.type, dtype, enabled=dtype != weights):
        hidden = decoder.hidden(torch.zeros((1, tokens), dtype=torch.int64, device=device), packing=packing)
    hidden.backward(torch.zeros_like(hidden))


def _zeros(model: ModelConfig, dtype: torch.dtype, packing: Packing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (tokens,), device = packing.lengths or (), packing.cu_seqlens_q.device
    shapes = ((tokens, heads, model.head_dim) for heads in (model.n_heads, model.n_kv_heads, model.n_kv_heads))
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def _spec(model: ModelConfig) -> AttentionSpec:
    return AttentionSpec(Causal(), dropout=model.attention_dropout)
