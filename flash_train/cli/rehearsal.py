"""The kernels of a run's steps, compiled while PyTorch Lightning is imported.

Triton compiles a kernel when it is first launched, which takes seconds for each of Hopper's attention, and for all of a
step about as long as the import. Compiler, assembler and C compiler run beside Python. What was compiled before is only
loaded, which the first step need not do then.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from omegaconf import DictConfig

from flash_train.attention import AttentionSpec, Causal, Packing, attention
from flash_train.attention.backends import OWN
from flash_train.attention.dropout import draw_state
from flash_train.attention.functional import operands_of
from flash_train.cli.shape import COMPUTE_DTYPES, build_model_config, choose_attention, device_of, load_shape
from flash_train.model import ModelConfig, Transformer

TOKENS = 4096  # from which on a row of attention is a long one
FEW_TOKENS = 128


@contextmanager
def rehearsed(config: DictConfig) -> Iterator[None]:
    """Runs small copies of what a step will launch in threads of their own, beside the caller, and ends with them.

    They may draw from PyTorch's generators, and keep no memory. Not rehearsed are attention by other kernels than ours,
    a run on several devices, a deterministic one, before whose first matrix product cuBLAS has to be set up, and a
    validation.
    """
    device = device_of(config.trainer.accelerator)
    alone = config.trainer.devices * config.trainer.num_nodes == 1
    if device.type != "cuda" or not alone or config.trainer.deterministic or config.validate_only:
        yield
        return
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(part) for part in parts(config, torch.device("cuda", 0))]
        yield
        for part in running:
            with suppress(torch.OutOfMemoryError):  # the run itself tells what it lacks
                part.result()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def parts(config: DictConfig, device: torch.device) -> list[Callable[[], None]]:
    """What can run side by side: the attention's forward, its backward, and the rest of a block, both ways."""
    pretrained = None if config.init_from is None else load_shape(config.init_from)
    model = build_model_config(config, 1, pretrained)  # the vocabulary shapes none of these kernels
    backend, _ = choose_attention(config, device, model.head_dim)
    if backend not in OWN:
        return []
    start_triton()
    dtype = COMPUTE_DTYPES.get(config.precision, torch.bfloat16)
    weights = dtype if config.precision == "bf16-true" else torch.float32
    tokens = min(config.seq_len * config.batch_size, TOKENS)
    found = [
        lambda: attention_forward(model, backend, dtype, tokens, device),
        lambda: attention_backward(model, backend, dtype, tokens, device),
    ]
    if not config.compile:  # of whose blocks Inductor makes kernels of its own
        found.append(lambda: rest_of_block(model, weights, dtype, device))
    return found


def start_triton() -> None:
    """Have one thread make what Triton asks the driver with: it is made when first needed, and is one for them all."""
    from triton.runtime import driver

    if torch.cuda.is_available():
        driver.active.get_current_device()


def attention_forward(model: ModelConfig, backend: str, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    q, k, v = _operands(model, dtype, tokens, device)
    attention(q, k, v, _spec(model), packing=_one_document(tokens, device), backend=backend)


def attention_backward(model: ModelConfig, backend: str, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """Beside the forward, not behind it: of results that are none."""
    q, k, v = _operands(model, dtype, tokens, device)
    spec = _spec(model)
    state = draw_state(device) if spec.dropout > 0 else None
    operands = operands_of(q, k, spec, _one_document(tokens, device), state, (0, 0, 0, 0), None, None)
    lse = torch.zeros((model.n_heads, tokens), device=device)
    torch.ops.flash_train.attention_backward(q, None, q, k, v, q, lse, *operands, backend, False)


def rest_of_block(model: ModelConfig, weights: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """A decoder of one block, whose attention launches none of the kernels that are rehearsed by themselves."""
    with torch.device("meta"):
        decoder = Transformer(replace(model, n_layers=1, vocab_size=1), attention="standard")
    decoder = decoder.to(weights).to_empty(device=device)
    for weight in decoder.parameters():
        torch.nn.init.zeros_(weight)
    tokens = torch.zeros((1, FEW_TOKENS), dtype=torch.int64, device=device)
    packing = _one_document(FEW_TOKENS, device)
    with torch.autocast(device.type, dtype, enabled=dtype != weights):
        hidden = decoder.hidden(tokens, packing=packing)
    hidden.backward(torch.zeros_like(hidden))


def _operands(
    model: ModelConfig, dtype: torch.dtype, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((tokens, heads, model.head_dim) for heads in (model.n_heads, model.n_kv_heads, model.n_kv_heads))
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
    return q, k, v


def _spec(model: ModelConfig) -> AttentionSpec:
    return AttentionSpec(Causal(), dropout=model.attention_dropout)


def _one_document(tokens: int, device: torch.device) -> Packing:
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return Packing(cu_seqlens, cu_seqlens, lengths=(tokens,))
