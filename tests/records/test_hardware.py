"""Peak FLOP rates by the driver's name of the GPU, memory in use, and versions."""

import mmap
import subprocess
from pathlib import Path

import pytest
import torch

import flash_train
from flash_train.records import device_name, hardware, memory_use, peak_flops, peak_memory, versions
from flash_train.records.hardware import PEAK_TFLOPS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", BF16, 989.5),
        ("NVIDIA H200 NVL", BF16, 835.5),
        ("NVIDIA H100 80GB HBM3", FP16, 989.5),
        ("NVIDIA H100 PCIe", BF16, 756),
        ("NVIDIA H100 NVL", BF16, 835.5),
        ("NVIDIA H100 80GB HBM2e", BF16, None),
        ("NVIDIA H800 PCIe", BF16, None),
        ("NVIDIA GH200 480GB", BF16, 989.5),
        ("NVIDIA GH200 144G HBM3e", BF16, 989.5),
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A100 80GB PCIe", BF16, 312),
        ("NVIDIA A100-SXM-64GB", BF16, None),
        ("GRID A100-40C", BF16, None),
        ("NVIDIA A100-PCIE-40GB", FP32, 19.5),
        ("NVIDIA A10", BF16, 125),
        ("NVIDIA A40", BF16, 149.7),
        ("NVIDIA L40S", BF16, 362),
        ("NVIDIA L4", BF16, 121),
        ("Tesla T4", FP16, 65),
        ("Tesla T4", BF16, None),
        ("Tesla V100-SXM2-16GB", FP16, 125),
        ("NVIDIA RTX A6000", BF16, 154.8),
        ("NVIDIA RTX 6000 Ada Generation", BF16, 364.2),
        ("NVIDIA GeForce RTX 3080 Ti", BF16, 68.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", BF16, 88.2),
        ("NVIDIA GeForce RTX 4080 SUPER", BF16, 104.4),
        ("NVIDIA GeForce RTX 4090", FP32, 82.6),
        ("GeForce RTX 4090", BF16, 165.2),
        ("NVIDIA GeForce RTX 4090 D", BF16, None),
        ("NVIDIA GeForce RTX 5090 D", BF16, None),
        ("NVIDIA GeForce RTX 5090 D V2", BF16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, None),
        ("NVIDIA GeForce RTX 2080 Ti with Max-Q Design", FP16, None),
        ("NVIDIA H200 MIG 1g.18gb", BF16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", BF16, None),
        ("NVIDIA A10G", BF16, None),
        ("NVIDIA Something New", BF16, None),
        ("NVIDIA H200", torch.float64, None),
    ],
)
def test_peak_flops(name, dtype, tflops):
    assert peak_flops(name, dtype) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_tf32_counts_where_it_is_used():
    assert peak_flops("NVIDIA A100-SXM4-80GB", FP32, tf32=True) == 156e12
    assert peak_flops("Tesla T4", FP32, tf32=True) == pytest.approx(8.1e12)


def test_rates_are_dense_and_ordered():
    """A rate "with sparsity" in the table would be more than twice the rate of TF32."""
    for card, (bf16, fp16, tf32, fp32) in PEAK_TFLOPS.items():
        assert fp32 <= fp16, card
        if bf16 is not None:
            assert bf16 == fp16, card
            assert 1.9 * tf32 < bf16 < 2.1 * tf32, card


def test_device_name_of_this_machine():
    assert device_name(torch.device("cpu"))


def test_memory_on_a_cpu_is_the_process():
    use = memory_use(torch.device("cpu"))
    assert set(use) == {"memory/process_gib", "memory/process_peak_gib"}
    assert 0.05 < use["memory/process_gib"] < 64
    held = mmap.mmap(-1, 2**28)  # 256 MiB of new pages; an allocator may reuse old ones
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    assert memory_use(torch.device("cpu"))["memory/process_gib"] - use["memory/process_gib"] > 0.2
    assert peak_memory(memory_use(torch.device("cpu"))) > 0.25
    del held


def test_versions_name_torch_and_the_device():
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["flash-train"] == flash_train.__version__
    assert {"python", "triton", "lightning", "gpu", "commit"} <= set(found)


def test_commit_is_from_the_checkout_that_tracks_the_file(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    file = tmp_path / "code.py"
    file.write_text("1")
    assert hardware._commit(file) is None  # no checkout
    git("init", "--quiet")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "first")
    clean = hardware._commit(file)
    assert len(clean) == 40
    file.write_text("2")
    assert hardware._commit(file) == clean + "-dirty"
    installed = tmp_path / "site-packages.py"
    installed.write_text("3")
    assert hardware._commit(Path(installed)) is None  # inside a checkout, but not of it
