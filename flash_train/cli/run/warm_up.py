"""Warm-up: compile the kernels of a run's steps while PyTorch Lightning is imported.

Triton compiles a kernel at its first launch. Each attention kernel in Gluon takes seconds, and all kernels of a
step take about as long as the import. Only Triton's front end holds Python's lock; the rest of the compiler, the
assembler and the C compiler run in parallel to the import. Kernels in Triton's cache are loaded here, so that the first
step need not load them.
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
from flash_train.cli.components.model_config import device_of, model_and_backend
from flash_train.cli.config.errors import is_out_of_memory
from flash_train.model import ModelConfig, Transformer
from flash_train.precision import PRECISIONS

LONG = 4096  # tokens; longer rows launch the same kernels
SHORT = 128
DOCUMENTS = 64  # per packed row; in a row of LONG tokens they are then as short as typical ones
ALIGNED = 16  # Triton compiles another kernel if an integer argument is a multiple of this

WarmUp = Callable[[], None]


@contextmanager
def warming_up(config: DictConfig) -> Iterator[None]:
    """Launch small copies of a step's kernels in threads of their own while the block runs, and wait for their end.

    It waits after an error or an interrupt too. The launches may draw from PyTorch's generators, and leave cuBLAS's
    workspaces in memory, as any step does. The cross entropy and the optimizer have no warm-up. There is none at all
    for attention that isn't ours, on several devices, for a validation, and for a deterministic run, which has to set
    up cuBLAS before its first matrix product.
    """
    device = device_of(config.trainer.accelerator)
    alone = config.trainer.devices * config.trainer.num_nodes == 1
    if device.type != "cuda" or not alone or config.trainer.deterministic or config.validate_only:
        yield
        return
    found = warm_ups(config, torch.device("cuda", 0))
    with shared_triton() if found else nullcontext(), ThreadPoolExecutor() as pool:
        running = [pool.submit(attempt, each) for each in found]
        yield
        for each in running:
            each.result()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def attempt(warm_up: WarmUp) -> None:
    """Run a warm-up. If memory runs out, do nothing: the run itself reports it better."""
    try:
        warm_up()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


@contextmanager
def shared_triton() -> Iterator[None]:
    """Make Triton usable from several threads.

    Its driver is created here, by one thread. And its compiler is kept from changing the process's warning filters:
    version 3.6 changes and restores them at every node, so threads would restore each other's state. Python does not
    show the warnings that it ignores there anyway.
    """
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


def warm_ups(config: DictConfig, device: torch.device) -> list[WarmUp]:
    """What can run in parallel: attention's forward, attention's backward, and the rest of a block."""
    model, backend = model_and_backend(config, 1, device)  # these kernels do not depend on the size of the vocabulary
    if not is_own(backend) or interpreting():  # the interpreter compiles nothing, and would take minutes
        return []
    dtype, weights = PRECISIONS[config.precision].compute_dtype, PRECISIONS[config.precision].weight_dtype
    whole_rows = config.data.packing == "concat" or config.data.corpus == "recall"
    row = row_length(config.seq_len * (1 if whole_rows else config.batch_size), LONG)
    entries = 1 if whole_rows else DOCUMENTS
    found: list[WarmUp] = [
        lambda: attention_forward(model, backend, dtype, packing_of(row, entries, device)),
        lambda: attention_backward(model, backend, dtype, packing_of(row, entries, device)),
    ]
    if not config.compile:  # otherwise Inductor generates the kernels of the blocks
        few = row_length(config.seq_len * config.batch_size, SHORT)
        found.append(lambda: rest_of_block(model, weights, dtype, packing_of(few, 1, device)))
    return found


def row_length(tokens: int, most: int) -> int:
    """The length of a row for the warm-up: `tokens`, or about `most` with the same alignment."""
    return min(tokens, most + tokens % ALIGNED)


def packing_of(tokens: int, entries: int, device: torch.device) -> Packing:
    """A packing of one document, followed by empty entries."""
    cu_seqlens = torch.tensor([0] + [tokens] * entries, dtype=torch.int32, device=device)
    return Packing(cu_seqlens, cu_seqlens, lengths=(tokens,))


def attention_forward(model: ModelConfig, backend: str, dtype: torch.dtype, packing: Packing) -> None:
    q, k, v = _zeros(model, dtype, packing)
    attention(q, k, v, _spec(model), packing=packing, backend=backend)


def attention_backward(model: ModelConfig, backend: str, dtype: torch.dtype, packing: Packing) -> None:
    """Launch the backward on zeros instead of the forward's results, so that it need not wait for the forward."""
    q, k, v = _zeros(model, dtype, packing)
    spec = _spec(model)
    state = draw_state(q.device) if spec.dropout > 0 else None
    call = operands_of(q, k, spec, packing, state, (0, 0, 0, 0), None, None)
    lse = torch.zeros((q.shape[1], q.shape[0]), device=q.device)
    torch.ops.flash_train.attention_backward(q, None, q, k, v, q, lse, *call.arguments, backend, False)


def rest_of_block(model: ModelConfig, weights: torch.dtype, dtype: torch.dtype, packing: Packing) -> None:
    """Run a decoder of one block; its standard attention launches none of the kernels that have their own warm-up."""
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
