"""`hardware=auto`: detects the device, and picks a file under `conf/hardware`."""

from dataclasses import dataclass
from typing import Literal

SMALL_GIB = 16.0  # below this, activations are recomputed
FLASH_CAPABILITY = (8, 0)  # bf16 and the Triton kernels need Ampere or newer


@dataclass(frozen=True)
class Device:
    """What the choice depends on. `memory_gib` and `capability` are known for CUDA only."""

    kind: Literal["cpu", "cuda", "mps"]
    name: str
    memory_gib: float | None = None
    capability: tuple[int, int] | None = None


def detect() -> Device:
    """The first device of the best kind that PyTorch can use here."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device("cuda", properties.name, properties.total_memory / 2**30, (properties.major, properties.minor))
    if torch.backends.mps.is_available():
        return Device("mps", "Apple GPU")
    return Device("cpu", "no GPU found")


def choose(device: Device) -> tuple[str, str]:
    """The name of the file under `conf/hardware` for a device, and the reason."""
    if device.kind == "mps":
        return "mps", device.name
    if device.kind == "cpu":
        return "cpu", device.name
    assert device.capability is not None and device.memory_gib is not None
    about = f"{device.name}, {device.memory_gib:.0f} GiB, sm_{device.capability[0]}{device.capability[1]}"
    if device.capability < FLASH_CAPABILITY:
        return "cuda_old", f"{about}: older than sm_{FLASH_CAPABILITY[0]}{FLASH_CAPABILITY[1]}"
    if device.memory_gib < SMALL_GIB:
        return "cuda_small", f"{about}: less than {SMALL_GIB:.0f} GiB"
    return "cuda", about
