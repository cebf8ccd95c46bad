"""Facts about the machine: the device's name, its dense peak rate, and the versions of the software."""

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from flash_train import __version__

#: what a record of versions has besides this package: what it requires, and what it uses or is compared with
PACKAGES = ("triton", "lightning")
OPTIONAL_PACKAGES = ("liger-kernel", "transformers", "torchao", "flash-attn-4", "nvidia-cudnn-frontend")

# Dense matrix rates in TFLOP/s as (bf16, fp16, TF32, fp32), accumulated in fp32, from NVIDIA's data sheets and
# architecture papers (which often print the rate "with sparsity", twice as high). None: not supported. The keys are
# whole names as `_card` returns them: a name with any addition (D, Laptop GPU, PCIe, MIG …) has another rate.
PEAK_TFLOPS: dict[str, tuple[float | None, float | None, float | None, float]] = {
    "b200": (2250.0, 2250.0, 1125.0, 75.0),
    "gh200": (989.5, 989.5, 494.7, 66.9),
    "h200": (989.5, 989.5, 494.7, 66.9),
    "h200 nvl": (835.5, 835.5, 417.7, 60.0),
    "h100": (989.5, 989.5, 494.7, 66.9),
    "h100 nvl": (835.5, 835.5, 417.7, 60.0),
    "h100 pcie": (756.0, 756.0, 378.0, 51.2),
    "h800": (989.5, 989.5, 494.7, 66.9),
    "h20": (148.0, 148.0, 74.0, 44.0),
    "a100 sxm4": (312.0, 312.0, 156.0, 19.5),
    "a100 pcie": (312.0, 312.0, 156.0, 19.5),
    "a800 sxm4": (312.0, 312.0, 156.0, 19.5),
    "a800 pcie": (312.0, 312.0, 156.0, 19.5),
    "a40": (149.7, 149.7, 74.8, 37.4),
    "a30": (165.0, 165.0, 82.0, 10.3),
    "a10": (125.0, 125.0, 62.5, 31.2),
    "l40s": (362.0, 362.0, 183.0, 91.6),
    "l40": (181.0, 181.0, 90.5, 90.5),
    "l4": (121.0, 121.0, 60.0, 30.3),
    "v100 sxm2": (None, 125.0, None, 15.7),
    "v100 pcie": (None, 112.0, None, 14.0),
    "v100s pcie": (None, 130.0, None, 16.4),
    "t4": (None, 65.0, None, 8.1),
    "rtx 6000 ada generation": (364.2, 364.2, 182.1, 91.1),
    "rtx a6000": (154.8, 154.8, 77.4, 38.7),
    "rtx 5090": (209.5, 209.5, 104.8, 104.8),
    "rtx 5080": (112.6, 112.6, 56.3, 56.3),
    "rtx 5070 ti": (87.9, 87.9, 43.9, 43.9),
    "rtx 5070": (61.7, 61.7, 30.9, 30.9),
    "rtx 4090": (165.2, 165.2, 82.6, 82.6),
    "rtx 4080 super": (104.4, 104.4, 52.2, 52.2),
    "rtx 4080": (97.5, 97.5, 48.7, 48.7),
    "rtx 4070 ti super": (88.2, 88.2, 44.1, 44.1),
    "rtx 4070 ti": (80.2, 80.2, 40.1, 40.1),
    "rtx 4070 super": (70.9, 70.9, 35.5, 35.5),
    "rtx 4070": (58.3, 58.3, 29.1, 29.1),
    "rtx 4060 ti": (44.1, 44.1, 22.1, 22.1),
    "rtx 4060": (30.2, 30.2, 15.1, 15.1),
    "rtx 3090 ti": (80.0, 80.0, 40.0, 40.0),
    "rtx 3090": (71.0, 71.0, 35.6, 35.6),
    "rtx 3080 ti": (68.2, 68.2, 34.1, 34.1),
    "rtx 3080": (59.5, 59.5, 29.8, 29.8),
    "rtx 3070 ti": (43.5, 43.5, 21.7, 21.7),
    "rtx 3070": (40.6, 40.6, 20.3, 20.3),
    "rtx 3060 ti": (32.4, 32.4, 16.2, 16.2),
    "rtx 3060": (25.5, 25.5, 12.7, 12.7),
    "rtx 2080 ti": (None, 53.8, None, 13.4),
}

BRANDS = frozenset({"nvidia", "geforce", "tesla"})
MEMORY = re.compile(r"\d+gb?|hbm3e?")  # not HBM2e: the H100 with HBM2e is slower than the one with HBM3


def device_name(device: torch.device) -> str:
    """Return a name such as "NVIDIA H200", "MPS", or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type.upper()
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def peak_flops(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return a card's dense peak for matrix products, in FLOP/s; None if the card or its rate is unknown.

    Args:
        name: the driver's name of the card, such as "NVIDIA A100-SXM4-80GB".
        dtype: the operands' dtype.
        tf32: whether fp32 products go through TF32 (`torch.get_float32_matmul_precision() != "highest"`).
    """
    if (known := PEAK_TFLOPS.get(_card(name))) is None:
        return None
    bf16, fp16, tensor_fp32, fp32 = known
    rates = {
        torch.bfloat16: bf16,
        torch.float16: fp16,
        torch.float32: tensor_fp32 if tf32 and tensor_fp32 else fp32,
    }
    rate = rates.get(dtype)
    return rate * 1e12 if rate else None


def _card(name: str) -> str:
    """Return the driver's name without the brand and the memory: "a100 sxm4" of "NVIDIA A100-SXM4-80GB"."""
    words = re.split(r"[ -]+", name.lower())
    return " ".join(word for word in words if word not in BRANDS and not MEMORY.fullmatch(word))


def versions() -> dict[str, str | None]:
    """Return the versions of the software, and this package's commit if it runs from a checkout; None if absent.

    Packages that this one does not require are named only where they are installed.
    """
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    found["flash-train"] = __version__  # the installed metadata of a checkout may be of an earlier version
    for package in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package in PACKAGES:
                found[package] = None
    found["torch"] = str(torch.__version__)  # with its build, which the package's version may lack
    found["cuda"] = torch.version.cuda
    if (cudnn := torch.backends.cudnn.version()) is not None:  # 91900 is 9.19.0
        found["cudnn"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found["commit"] = _commit(Path(__file__))
    return found


def _commit(file: Path) -> str | None:
    """Return the commit of the checkout that tracks `file`, with "-dirty" if it has changes; None without one."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # An installed copy may be inside another project's checkout, so ask for this file.
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
