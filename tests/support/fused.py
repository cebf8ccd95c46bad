"""A model on a CPU takes the code path of CUDA: it launches this project's kernels, and a test gets each launch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.jit import JITFunction

from flash_train.attention import backends
from flash_train.model import ops, products
from flash_train.model.kernels import cross_entropy
from flash_train.optim import AdamW
from flash_train.optim.launch import Launcher


def fused_on_cpu(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., Any]) -> None:
    """Replace ``JITFunction.run`` by ``launch(kernel, *arguments, grid, warmup, **named)``."""

    def linear_cross_entropy(hidden, weight, labels):
        return cross_entropy.linear_cross_entropy(hidden.to(ops.compute_dtype(hidden)), weight, labels)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(AdamW, "_launcher", lambda self, is_cuda: Launcher())
    monkeypatch.setattr(backends, "flash_unavailable", lambda *_: None)
    monkeypatch.setattr(ops, "_kernels_run", lambda x: True)
    monkeypatch.setattr(ops, "linear_cross_entropy", linear_cross_entropy)


@contextmanager
def no_products() -> Iterator[None]:
    """Matrix products on the CPU return zeros: for measurements of memory, which need no values."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # that PyTorch's own products are replaced
        warnings.simplefilter("ignore")
        library.impl("mm", lambda a, b: a.new_zeros(len(a), b.shape[1]), "CPU")
        library.impl("mm.out", lambda a, b, *, out: out.zero_(), "CPU")
        library.impl("mm.dtype", lambda a, b, kind: a.new_zeros(len(a), b.shape[1], dtype=kind), "CPU")
        library.impl("addmm.dtype_out", lambda c, a, b, kind, *, beta=1, alpha=1, out: out, "CPU")
        library.impl("addmm_", lambda c, a, b, *, beta=1, alpha=1: c, "CPU")
    try:
        with mock.patch.object(products, "has_wide_results", lambda x: True):
            yield
    finally:
        library._destroy()
