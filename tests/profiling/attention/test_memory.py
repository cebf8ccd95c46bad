"""The memory that a single attention call allocates."""

import pytest
import torch

from flash_train.profiling.attention import memory
from flash_train.profiling.attention.memory import HEAD_DIM, HEADS, exponents, own_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [128, 256])
def test_standard_attention_holds_the_pairs_and_its_results(length):
    """The peak is in the backward: P and dS, and with them the output, its log-sum-exp and tensors of their size."""
    own = own_bytes("standard", length, CPU, torch.float32)
    pairs, row = 4 * HEADS * length**2, 4 * HEADS * length * HEAD_DIM
    assert 2 * pairs + row < own < 3 * pairs + 8 * row


def test_exponents_are_fitted_to_the_long_rows(monkeypatch):
    sizes = {"flash": {n: 12 * n for n in (1024, 8192, 16384)}, "standard": {1024: 1, 8192: 8192**2, 32768: 32768**2}}
    assert exponents(sizes | {"sdpa": {8192: 5}}) == {
        "flash": pytest.approx(1), "standard": pytest.approx(2), "sdpa": None,
    }  # fmt: skip
    monkeypatch.setattr(memory, "FITTED_FROM", 128)
    measured = {name: {n: own_bytes(name, n, CPU, torch.float32) for n in (256, 512)} for name in ("sdpa", "standard")}
    powers = exponents(measured)
    assert powers["sdpa"] < 1.2 and powers["standard"] > 1.4
