"""Implementations of attention that can be compared: this project's kernels, and what else PyTorch's users can call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_train.attention import RngState, attention
from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.attention.masks import SKIPPED
from flash_train.profiling.attention.cases import Case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS = PORTABLE.name
OWN = tuple(FAMILIES)  #: the families of this project's kernels
SDPA = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
#: the names of all implementations
IMPLEMENTATIONS = (*OWN, *SDPA, "fa4", "varlen_attn", "cudnn_packed", "flex", "flex_fa4")

#: the modules of those that come with packages of their own
MODULES = {"fa4": "flash_attn.cute", "flex_fa4": "flash_attn.cute", "cudnn_packed": "cudnn"}


def implementations(case: Case) -> tuple[str, ...]:
    """Return the implementations that can run a case on this machine: ours, then its peers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = tuple(name for name, family in FAMILIES.items() if family.unavailable(device) is None)
    peers = ["flex", "flex_fa4"]
    if case.lengths:
        peers = ["fa4", "varlen_attn", "cudnn_packed", *peers]
    elif case.density == 1:
        peers = [*SDPA, "fa4", *peers]
    return (*own, *(name for name in peers if name not in MODULES or has_module(MODULES[name])))


def has_module(name: str) -> bool:
    """Return whether a module is installed."""
    parent = name.rpartition(".")[0]
    return (not parent or has_module(parent)) and find_spec(name) is not None


def build(name: str, case: Case, device: torch.device | str, rng: RngState | None = None) -> Attention:
    """Return a call on q, k, v from ``Case.inputs``. ``rng`` fixes the dropout mask of our kernels.

    Raises:
        ValueError: the implementation has no such call.
    """
    if name in OWN:
        spec, packing = case.spec(device), case.packing(device)
        return lambda q, k, v: attention(q, k, v, spec, packing=packing, rng=rng, backend=name)
    if name in SDPA:
        return _sdpa(name, case)
    if case.dropout:
        raise ValueError(f"{name} has no dropout")
    if name == "fa4":
        return _flash_attention_4(case, device)
    if name == "varlen_attn":
        return _varlen_attn(case, device)
    if name == "cudnn_packed":
        from flash_train.profiling.attention.packed_cudnn import PackedCudnn

        return PackedCudnn(case, device)
    return _flex(case, device, "FLASH" if name == "flex_fa4" else "TRITON")


def _sdpa(name: str, case: Case) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPA[name]):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, dropout_p=case.dropout, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    return call


def _varlen_attn(case: Case, device: torch.device | str) -> Attention:
    """Return PyTorch's call for packed sequences.

    Up to torch 2.13 its kernel is FlashAttention-2's. From 2.14 on it may be cuDNN's.
    """
    from torch.nn.attention.varlen import varlen_attn

    packing, longest = case.packing(device), max(case.lengths)
    assert packing is not None
    cu = packing.cu_seqlens_q
    options: dict[str, Any] = {"window_size": (-1, 0) if case.causal else (-1, -1)}
    if case.n_heads != case.n_kv_heads and "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch >= 2.12
        options["enable_gqa"] = True
    return lambda q, k, v: cast(Tensor, varlen_attn(q, k, v, cu, cu, longest, longest, **options))


def _flash_attention_4(case: Case, device: torch.device | str) -> Attention:
    """Return FlashAttention-4's call. It comes with the package ``flash-attn-4``."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    packing = case.packing(device)
    call, options = flash_attn_func, {}
    if packing is not None:
        cu, longest = packing.cu_seqlens_q, max(case.lengths)
        call = flash_attn_varlen_func
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = call(q, k, v, causal=case.causal, **options)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)  # some releases return the log-sum-exp, too

    return attend


def _flex(case: Case, device: torch.device | str, backend: str) -> Attention:
    """Return FlexAttention as its users call it: compiled for the shape, with a block mask built beforehand.

    Args:
        backend: "TRITON", or "FLASH" for the kernels of FlashAttention-4.
    """
    from torch._functorch import config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # it compiles once per shape, and PyTorch limits recompilations of a function
    functorch.donated_buffer = False  # timing the backward needs to retain the graph
    compiled = torch.compile(flex_attention, dynamic=False)
    options: Any = {"BACKEND": backend} if backend != "TRITON" else None
    mask = None
    rule = _flex_rule(case, device)
    if rule is not None:
        n = sum(case.lengths) or case.seq_len
        mask = torch.compile(create_block_mask)(rule, None, None, n, n, device=device)  # eager holds all pairs

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = q.dim() == 3
        q, k, v = ((x[None] if packed else x).transpose(1, 2) for x in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        out = compiled(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=options).transpose(1, 2)
        return out[0] if packed else out

    return call


def _flex_rule(case: Case, device: torch.device | str) -> Callable[..., Tensor] | None:
    """Return the case's mask as FlexAttention takes it: a function of batch row, head, query and key."""
    from torch.nn.attention.flex_attention import and_masks

    rules: list[Callable[..., Tensor]] = []
    if case.causal:
        rules.append(lambda b, h, q, k: q >= k)
    if case.lengths:
        lengths = torch.tensor(case.lengths)
        document = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
        rules.append(lambda b, h, q, k: document[q] == document[k])
    blocks = case.spec(device).mask.block_map(case.seq_len, case.seq_len, False)
    if blocks is not None:
        pattern = blocks.states[0, 0] != SKIPPED
        rules.append(lambda b, h, q, k: pattern[q // blocks.block_q, k // blocks.block_k])
    return and_masks(*rules) if rules else None
