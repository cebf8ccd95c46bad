"""This project's kernels behind PyTorch's own functions: `F.scaled_dot_product_attention` and `varlen_attn`.

    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    from flash_train.integrations.pytorch import register

    activate_flash_attention_impl(register())
    ...
    restore_flash_attention_impl()

PyTorch still decides which backend runs a call. Calls that would run its FlashAttention on a GPU run these kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flash_train.attention import AttentionSpec, Packing
from flash_train.attention.backends import backend_names
from flash_train.attention.dropout import draw_state
from flash_train.attention.flash_attn.api import spec_of
from flash_train.attention.functional import operands_of, prepare
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.families import is_own
from flash_train.checks import check_name

NAME = "flash_train"
PYTORCH_NAMES = ("FA2", "FA3", "FA4")  # names of implementations that PyTorch registers, or may register


def register(name: str = NAME, *, backend: str = "flash") -> str:
    """Add this project's kernels to PyTorch's FlashAttention implementations, and return their name.

    Nothing changes before `torch.nn.attention.activate_flash_attention_impl(name)`. Then causal and full attention,
    windows, dropout, grouped queries and packed sequences run these kernels in every program of the process, also in
    graphs that `torch.compile` has made. `restore_flash_attention_impl()` ends it.

    Args:
        name: for `activate_flash_attention_impl`; must not be a name of PyTorch's own.
        backend: ``flash``, or the name of one family of kernels, such as ``triton``.

    Raises:
        ValueError: a name that cannot be used, or a backend that is not one of this project's kernels.
        ImportError: PyTorch is older than 2.11, which has no such implementations.
    """
    if not name or name in PYTORCH_NAMES:
        raise ValueError(f"name={name!r}: must not be empty or one of {', '.join(PYTORCH_NAMES)}, which PyTorch has")
    check_name("backend", backend, [known for known in backend_names() if is_own(known)])
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise ImportError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: must be 2.11 or later"
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=partial(override, backend))
    return name


class Override:
    """Keeps operators overridden until `remove`."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        self._library = None  # PyTorch removes the library's functions with the object


def override(backend: str, key: str = "CUDA") -> Override:
    """Make the operators of PyTorch's FlashAttention run `backend` on devices with this dispatch key."""
    kernels = Kernels(backend)
    library = Library("aten", "IMPL", key)
    for operator, function in (
        ("_scaled_dot_product_flash_attention", kernels.sdpa_forward),
        ("_scaled_dot_product_flash_attention_backward", kernels.sdpa_backward),
        ("_flash_attention_forward", kernels.forward),
        ("_flash_attention_forward_no_dropout_inplace", kernels.forward_into),
        ("_flash_attention_backward", kernels.backward),
    ):
        if hasattr(torch.ops.aten, operator):  # older releases have no operator that writes into a given output
            library.impl(operator, function, key)
    return Override(library)


@dataclass(frozen=True)
class Kernels:
    """The operators that run PyTorch's FlashAttention, on one of this project's backends.

    PyTorch's operators define the arguments and the results. Results have the memory layouts that
    `torch.compile` expects. Dropout's state is the generator's seed and offset, as an unsigned tensor (2,).
    """

    backend: str

    def sdpa_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Attend: ``_scaled_dot_product_flash_attention``.

        Args:
            query: (batch, heads, seqlen_q, head_dim); key and value may have fewer heads.
            is_causal: queries and keys are aligned at their ends.

        Returns:
            out, like query; the log-sum-exp, fp32 (batch, heads, seqlen_q); None, None, seqlen_q, seqlen_k; dropout's
            state; two tensors without meaning.
        """
        out, lengths = _empty(query, value.shape[-1]), (query.shape[2], key.shape[2])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        lse, state = self._forward(
            out.transpose(1, 2), q, k, v, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        return out, lse, None, None, *lengths, *_state_and_unused(state, query)

    def sdpa_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: None,
        cum_seq_k: None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value: ``_scaled_dot_product_flash_attention_backward``."""
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = self.backward(
            dout, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
            scale=scale,
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in gradients)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Attend: ``_flash_attention_forward``.

        Args:
            query: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with boundaries; key and value may
                have fewer heads.
            arguments, options: as for ``_forward``.

        Returns:
            out, like query; the log-sum-exp, fp32 (batch, heads, seqlen_q), with boundaries (heads, total_q); dropout's
            state; two tensors without meaning.
        """
        out = _empty(query, value.shape[-1])
        lse, state = self._forward(out, query, key, value, *arguments, **options)
        return out, lse, *_state_and_unused(state, query)

    def forward_into(self, out: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Write the output to `out`, return the log-sum-exp: ``_flash_attention_forward_no_dropout_inplace``."""
        return self._forward(out, *arguments, **options)[0]

    def _forward(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the output to `out`; return the log-sum-exp and dropout's state, int64 (2,) or None.

        Raises:
            ValueError: options that these kernels do not support, or arguments that do not fit together.
        """
        unsupported = {
            "return_debug_mask": return_debug_mask or None,
            "seqused_k": seqused_k,
            "alibi_slopes": alibi_slopes,  # PyTorch's backward does not get them
            "block_table": block_table,
            "num_splits": num_splits if num_splits not in (0, 1) else None,
        }
        for option, given in unsupported.items():
            if given is not None:
                raise ValueError(
                    f"{option} was given: must be left out with this implementation of FlashAttention; "
                    "torch.nn.attention.restore_flash_attention_impl() gives PyTorch's own back"
                )
        spec, packing = _spec_and_packing(
            cum_seq_q, cum_seq_k, dropout_p, is_causal, scale, window_size_left, window_size_right
        )
        prepare(q, k, v, spec, packing, None, None, None, self.backend, return_lse=True)  # raises what does not fit
        from flash_train.attention.kernels.select import forward_of

        state = draw_state(q.device) if spec.dropout > 0 else None
        call = _call(q, k, spec, packing, state)
        _, lse = forward_of(self.backend, q, k, v, call)(q, k, v, call, out)
        return lse, state

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value: ``_flash_attention_backward``.

        Args:
            grad_out: like out.
            rng_state: dropout's state, which the forward returned.
        """
        from flash_train.attention.kernels.select import backward_of

        spec, packing = _spec_and_packing(
            cum_seq_q, cum_seq_k, dropout_p, is_causal, scale, window_size_left, window_size_right
        )
        call = _call(query, key, spec, packing, rng_state.view(torch.int64) if spec.dropout > 0 else None)
        made = [torch.empty_like(x) for x in (query, key, value)]
        run = backward_of(self.backend, query, key, value, call)
        into = [x if x.is_contiguous() else None for x in made]  # kernels write contiguous gradients
        gradients = run(grad_out, None, query, key, value, out, logsumexp, call, False, into)[:3]
        return tuple(x if x is found else x.copy_(found) for x, found in zip(made, gradients, strict=True))


def _spec_and_packing(
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *window: int | None,
) -> tuple[AttentionSpec, Packing | None]:
    """Translate PyTorch's arguments; a bound of the window is None or negative if there is none."""
    left, right = (-1 if bound is None else bound for bound in window)
    spec = spec_of(dropout_p, scale, is_causal, (left, right), 0.0)
    if cum_seq_q is None and cum_seq_k is None:
        return spec, None
    if cum_seq_q is None or cum_seq_k is None:
        raise ValueError("one of cum_seq_q and cum_seq_k was given: must be both, or neither")
    return spec, Packing(cum_seq_q, cum_seq_k)


def _call(q: Tensor, k: Tensor, spec: AttentionSpec, packing: Packing | None, state: Tensor | None) -> Call:
    return operands_of(q, k, spec, packing, state, (0, 0, 0, 0), None, None).contiguous()


def _empty(query: Tensor, width: int) -> Tensor:
    """Allocate an output with `width` columns whose dimensions are in memory in the query's order."""
    if width == query.shape[-1]:
        return torch.empty_like(query)
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    return torch.empty_permuted((*query.shape[:-1], width), order, dtype=query.dtype, device=query.device)


def _state_and_unused(state: Tensor | None, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last three results of PyTorch's operators: dropout's state, an offset, and a mask for debugging."""
    empty = partial(torch.empty, dtype=torch.uint64, device=query.device)
    return empty(2) if state is None else state.view(torch.uint64), empty(()), query.new_empty(0)
