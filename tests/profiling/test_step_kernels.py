"""The kernels of a step: their kinds, how long any of them ran, and the report."""

import re
from pathlib import Path

import pytest

from flash_train.profiling.step_kernels import (
    OTHER,
    Kernel,
    busy_seconds,
    kind_of,
    markdown,
    report,
    summary,
)

ROOT = Path(__file__).parents[2] / "flash_train"
JIT = re.compile(r"@(?:triton|gluon)\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(")
LAUNCHED = re.compile(r"attention_|hopper_|\w+_kernel$|list_tiles$")  #: the others are called by these


def own_kernels() -> list[str]:
    """The functions in our source that run as a kernel by themselves."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py")))
    return sorted({name for name in JIT.findall(text) if LAUNCHED.match(name)})


KERNELS = {
    "attention_forward": "attention, forward",
    "attention_decode": "attention, forward",
    "hopper_forward": "attention, forward",
    "hopper_prepare": "attention, backward",
    "hopper_backward": "attention, backward",
    "hopper_backward_wide": "attention, backward",
    "hopper_backward_dq": "attention, backward",
    "hopper_finish": "attention, backward",
    "attention_backward_rows": "attention, backward",
    "attention_backward_dkdv": "attention, backward",
    "product_kernel": "gated products",
    "gradients_kernel": "gated products",
    "norm_forward_kernel": "norms",
    "norm_backward_kernel": "norms",
    "sum_rows_kernel": "norms",
    "sum_shared_rows_kernel": "communication",
    "rotary_kernel": "rotary embedding",
    "cross_entropy_kernel": "loss",
    "adamw_kernel": "optimizer",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNN": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128>(Params)": "matrix products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t> >": "attention, forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_128x128x128": "attention, backward",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float> >": "optimizer",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy DtoD (Device -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float> >": OTHER,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_kind_of_its_work(name):
    assert kind_of(name) == KERNELS[name]


def test_our_kernels_have_a_kind():
    names = own_kernels()
    assert len(names) > 15 and {"adamw_kernel", "cross_entropy_kernel", "list_tiles", "hopper_forward"} <= set(names)
    assert [name for name in names if kind_of(name) == OTHER] == []


def test_overlapping_kernels_count_once():
    kernels = [Kernel("a", 0.0, 2.0), Kernel("b", 1.0, 3.0), Kernel("c", 1.5, 0.5), Kernel("d", 10.0, 1.0)]
    assert busy_seconds(kernels) == pytest.approx(5.0)
    assert busy_seconds(reversed(kernels)) == pytest.approx(5.0)
    assert busy_seconds([]) == 0.0


def test_the_report_adds_up_by_kind_and_by_name():
    kernels = [Kernel("hopper_forward", 0.0, 2e-3), Kernel("nvjet_a", 2e-3, 1e-3), Kernel("nvjet_b", 3e-3, 4e-3)]
    kernels += [Kernel("nvjet_a", 8e-3, 1e-3), Kernel("void f<a|b>(int)", 9e-3, 5e-4)]
    found = report(kernels, 0.02)
    assert (found["step_seconds"], found["busy_seconds"]) == (0.02, pytest.approx(8.5e-3))
    assert [(one["kind"], one["launches"]) for one in found["kinds"]] == [
        ("matrix products", 3),
        ("attention, forward", 1),
        (OTHER, 1),
    ]
    assert found["kinds"][0]["seconds"] == pytest.approx(6e-3)
    assert sum(one["seconds"] for one in found["kernels"]) == pytest.approx(8.5e-3)
    assert [one["name"] for one in found["kernels"]][0] == "nvjet_b"
    assert summary(found) == "5 kernels ran for 8.5 ms of the step, longest matrix products with 6.0 ms"
    text = markdown(found, "Kernels")
    assert "| matrix products | 6.00 | 3 |\n" in text and "| `nvjet_a` | matrix products | 2.00 | 2 |\n" in text
    assert "| `f` | other | 0.50 | 1 |\n" in text
    assert summary(report([], 1.0)) == "0 kernels ran for 0.0 ms of the step"
