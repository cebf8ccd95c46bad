"""Which tensors are copied for the portable kernels."""

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

from flash_train.attention.kernels.call import addressable


@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 2, 4, 8)], ids=["packed", "padded"])
@pytest.mark.parametrize("stride, copied", [(2**23 - 8, False), (2**23, True)])
def test_rows_too_far_apart_for_32_bits_are_copied(shape, stride, copied):
    x = torch.randn(stride + 32, dtype=torch.float16).as_strided(shape, (0, stride, 8, 1)[-len(shape) :])
    found = addressable(x)
    assert (found is not x) == copied and torch.equal(found, x)
    assert found.stride()[-3:] == ((32 if copied else stride), 8, 1)


def test_strided_columns_are_copied():
    x = torch.randn(3, 8, 4).transpose(1, 2)
    assert addressable(x).is_contiguous() and torch.equal(addressable(x), x)
