"""Traced programs with symbolic sizes: several head dimensions, and exports for any length."""

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    Causal,
    Document,
    MaskFunction,
    Packing,
    RngState,
    Tree,
    Window,
    attention,
)
from tests.support.attention.devices import INTERPRETING, on_devices

BACKENDS = ("sdpa", "standard", "chunked", "reference")


def tensors(device, len_q, len_k, head_dim=16, packed=False):
    """q, k and v that require gradients."""
    batch = () if packed else (2,)
    return tuple(
        torch.randn(*batch, n, h, head_dim, device=device, requires_grad=True)
        for n, h in ((len_q, 4), (len_k, 2), (len_k, 2))
    )


def check_same(found, right, given):
    torch.testing.assert_close(found, right)
    grads, expected = (torch.autograd.grad(x.square().sum(), given) for x in (found, right))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


def check_widths(device, backend, dynamic):
    torch._dynamo.reset()
    spec = AttentionSpec(Window(9, 0))

    def call(q, k, v):
        return attention(q, k, v, spec, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length, head_dim in ((10, 16), (20, 32), (24, 24)):
        given = tensors(device, length, length, head_dim)
        check_same(compiled(*given), call(*given), given)


@on_devices
@pytest.mark.parametrize("dynamic", [None, True])
def test_several_head_dimensions_with_the_kernels(device, dynamic):
    check_widths(device, "triton", dynamic)


class Attend(torch.nn.Module):
    def __init__(self, backend, spec, **options):
        super().__init__()
        self.backend, self.spec, self.options = backend, spec, options

    def forward(self, q, k, v, cu=None):
        packing = None if cu is None else Packing(cu, cu)
        return attention(q, k, v, self.spec, packing=packing, backend=self.backend, **self.options)


def check_export(device, backend, spec, cross, strict, **options):
    """Export for any lengths: different ones of queries and keys, or the same for both."""
    n, m = (torch.export.Dim(name, min=2, max=4096) for name in "nm")
    m = m if cross else n
    module = Attend(backend, spec, **options)
    shapes = ({1: n}, {1: m}, {1: m}, None)
    given = (*tensors(device, 20, 30 if cross else 20), None)
    program = torch.export.export(module, given, dynamic_shapes=shapes, strict=strict).module()
    for len_q, len_k in ((50, 70), (3, 7)):
        given = tensors(device, len_q, len_k if cross else len_q)
        check_same(program(*given, None), module(*given), given)


@on_devices
@pytest.mark.parametrize("cross", [False, True])
def test_exports_with_the_kernels(device, cross):
    check_export(device, "triton", AttentionSpec(Causal()), cross, False)


if not INTERPRETING:

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("backend", "dynamic"), [*((backend, None) for backend in ("auto", *BACKENDS)), ("auto", True), ("sdpa", True)]
    )
    def test_several_head_dimensions_with_dense_backends(backend, dynamic):
        check_widths("cpu", backend, dynamic)

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("cross", [False, True])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_exports_with_dense_backends(backend, cross, strict):
        check_export("cpu", backend, AttentionSpec(Causal()), cross, strict)

    @pytest.mark.parametrize("backend", ["standard", "chunked"])
    def test_exports_with_all_options(backend):
        options = {"rng": RngState(3), "alibi_slopes": torch.rand(4), "sinks": torch.rand(4)}
        check_export(
            "cpu", backend, AttentionSpec(Window(9, 2) & Tree([-1, 0, 0]), 0.3, 3.0, 0.4), True, False, **options
        )

    @pytest.mark.parametrize("backend", ["standard", "chunked", "reference"])
    @pytest.mark.parametrize("export", [False, True])
    def test_packed_calls_without_lengths_on_the_host(backend, export):
        """Packed calls compile to one graph for any boundaries, and export for any number of rows."""
        torch._dynamo.reset()
        module = Attend(backend, AttentionSpec(Causal()))
        cu = torch.tensor([0, 13, 13, 30], dtype=torch.int32)
        if export:
            n = torch.export.Dim("n", min=2, max=4096)
            shapes = ({0: n}, {0: n}, {0: n}, None)
            example = (*tensors("cpu", 40, 40, packed=True), cu)
            program = torch.export.export(module, example, dynamic_shapes=shapes).module()
        else:
            program = torch.compile(module, fullgraph=True, backend="aot_eager")
        for boundaries, rows in (([0, 13, 13, 30], 40), ([0, 1, 39, 39], 41)):
            given = tensors("cpu", rows, rows, packed=True)
            cu = torch.tensor(boundaries, dtype=torch.int32)
            check_same(program(*given, cu), module(*given, cu), given)

    def test_slopes_and_sinks_get_gradients_through_the_operator():
        torch._dynamo.reset()
        given = tensors("cpu", 20, 20, packed=True)
        slopes, sinks = (torch.rand(4, requires_grad=True) for _ in "ab")
        ids = (torch.arange(20) // 3).int()
        module = Attend("chunked", AttentionSpec(Document(ids)), alibi_slopes=slopes, sinks=sinks)
        cu = torch.tensor([0, 8, 20], dtype=torch.int32)
        found = torch.compile(module, fullgraph=True, backend="aot_eager")(*given, cu)
        check_same(found, module(*given, cu), (*given, slopes, sinks))

    def test_boundaries_are_checked_in_a_compiled_program():
        torch._dynamo.reset()
        given = tensors("cpu", 20, 20, packed=True)
        compiled = torch.compile(Attend("reference", AttentionSpec()), fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match="cu_seqlens_q ends at 21 and q has 20 rows"):
            compiled(*given, torch.tensor([0, 8, 21], dtype=torch.int32))

    def test_a_mask_function_is_refused_in_one_line():
        mask = MaskFunction(None, lambda entry, head, q, k: k % 2 == 0)
        given = (*tensors("cpu", 20, 20), None)
        with pytest.raises(ValueError, match="mask=MaskFunction: must .* or use backend=flash"):
            torch.export.export(Attend("chunked", AttentionSpec(mask)), given, strict=False)
