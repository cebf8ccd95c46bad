"""What the attention for transformers finds in its inputs, without a model: documents, dtypes, and what it keeps."""

import pytest
import torch

pytest.importorskip("transformers")

from flash_train.integrations import transformers as adapter
from flash_train.integrations.transformers import packing_of


def test_documents_of_packed_rows():
    rows = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 5, 6, 7, 8]])
    packing = packing_of(rows, 2)
    assert packing.cu_seqlens_q.tolist() == [0, 3, 5, 6, 12] and packing.lengths == (3, 2, 1, 6)
    assert packing_of(torch.arange(6)[None], 4) is None


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_do_not_decide_the_dtype_of_attention(stored):
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(stored), requires_grad=False)
    q, k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4, dtype=torch.bfloat16)
    assert {x.dtype for x in adapter._in_one_dtype(layer, q, k, v)} == {torch.bfloat16}


def test_what_was_found_from_tensors_is_forgotten_with_each_of_them():
    """A mask may serve for all batches, and new positions may get the `id` of those that were freed."""
    mask, positions = torch.ones(1, 4), torch.arange(4)[None]

    def once() -> object:
        return adapter._once((mask, positions), "key", object)

    first = once()
    assert once() is first
    positions += 1
    second = once()
    assert second is not first and once() is second
    mask += 1
    assert once() is not second
    assert len(adapter._known[mask].with_others) == 1
    positions = torch.zeros(1)  # frees the others
    assert len(adapter._known[mask].with_others) == 0
