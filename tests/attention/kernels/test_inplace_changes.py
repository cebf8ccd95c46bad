"""If a tensor changes between forward and backward, the gradients are right or PyTorch raises its error."""

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Full,
    MaskFunction,
    Packing,
    RngState,
    Tree,
    attention,
)
from tests.support.attention.cases.rules import budget, budget_twin
from tests.support.attention.devices import INTERPRETING, on_devices

N = 40


def one_mask(name, device):
    """A mask, and the tensor of it that will change."""
    if name == "document":
        ids = (torch.arange(N, device=device) // 7).int()
        return Document(ids), ids
    if name == "document-keys":
        ids = (torch.arange(N, device=device) // 7).int()
        return Causal() & Document(ids.clone(), ids), ids
    if name == "blocks":
        pattern = torch.eye(3, dtype=torch.bool, device=device)
        return BlockSparse(pattern, 16), pattern
    if name == "tree":
        mask = Tree(torch.tensor([-1, 0, 0, 1], device=device))
        return Full() & mask, mask.bits
    if name == "function":
        reach, shift = torch.arange(N, device=device) % 9, torch.tensor([3, N], device=device)
        return Causal() & MaskFunction(budget, budget_twin, (reach, shift)), reach
    return Causal(), None


def call_of(name, device, dtype, head_dim):
    """q, k and v, spec, options, and the tensor that will change."""
    torch.manual_seed(0)
    tensors = {x: torch.randn(1, N, 2, head_dim, device=device).to(dtype) for x in "qkv"}
    mask, tensor = one_mask(name, device)
    options, spec = {}, AttentionSpec(mask, dropout=0.3 if name == "rng" else 0.0)
    if name == "slopes":
        tensor = options["alibi_slopes"] = torch.rand(2, device=device)
    if name == "sinks":
        tensor = options["sinks"] = torch.rand(2, device=device)
    if name == "rng":
        tensor = torch.tensor(5, device=device)
        options["rng"] = RngState(tensor)
    if name == "boundaries":
        tensors = {x: y[0] for x, y in tensors.items()}
        tensor = torch.tensor([0, 9, N], dtype=torch.int32, device=device)
        options["packing"] = Packing(tensor, tensor)
    return [x.requires_grad_() for x in tensors.values()], spec, options, tensor


def hold(backend, device, name, dtype=torch.float32, head_dim=16):
    """Check that the gradients are right or PyTorch refuses, and return which."""
    leaves, spec, options, tensor = call_of(name, device, dtype, head_dim)
    inputs = [x * 1 for x in leaves]  # a leaf must not be changed in place
    if name in "qkv":
        tensor = inputs["qkv".index(name)]
    out = attention(*inputs, spec, backend=backend, **options)
    right = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.no_grad():
        tensor.copy_(tensor.flip(0) if tensor.dtype == torch.bool else tensor * 0 if tensor.dim() else tensor + 1)
    try:
        late = torch.autograd.grad(out.sum(), leaves)
    except RuntimeError as error:
        assert "has been modified by an inplace operation" in str(error)
        return "refused"
    for a, b in zip(late, right, strict=True):
        assert torch.equal(a, b)
    return "right"


MASKS = ["document", "document-keys", "blocks", "tree", "function"]
OTHERS = ["q", "k", "v", "slopes", "sinks", "rng", "boundaries"]


@on_devices
@pytest.mark.parametrize("name", [*MASKS, *OTHERS])
def test_kernels_with_changed_inputs(device, name):
    hold("triton", device, name)


if not INTERPRETING:

    @pytest.mark.parametrize("name", [*MASKS, *OTHERS])
    @pytest.mark.parametrize("backend", ["reference", "standard", "chunked", "sdpa"])
    def test_dense_backends_with_changed_inputs(backend, name):
        if backend == "sdpa" and name in ("sinks", "rng"):
            pytest.skip("PyTorch's fused attention has neither sinks nor a dropout state")
        hold(backend, "cpu", name)

    @pytest.mark.parametrize("name", ["document", "function", "k", "v"])
    def test_chunked_refuses_changes_to_tensors_read_in_the_backward(name):
        assert hold("chunked", "cpu", name) == "refused"

    def test_hopper_kernels_with_changed_inputs():
        from tests.support.attention.emulated import hopper_on_cpu

        with hopper_on_cpu():
            for name in ("sinks", "boundaries", "k"):
                assert hold("hopper", "cpu", name, torch.bfloat16, 64) == "refused"
