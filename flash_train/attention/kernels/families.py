"""The registry of kernel families. A new family is one folder next to this file and one entry in ``FAMILIES``.

Only the compute capability of a device is read here. A family's ``launch`` module, with its compiler and its kernels,
is imported when the family is first asked about a call that its device could run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:  # it imports Triton, and this module must not
    from flash_train.attention.kernels.call import Call


class LaunchModule(Protocol):
    """The functions that the ``launch`` module of a family defines.

    ``refusal`` and ``backward_refusal`` say why the kernels cannot run a call's forward and backward; they return None
    if the kernels can. Every family's backward takes the ``out`` and ``lse`` of any family's forward. If ``out``
    or gradients ``into`` are given, the kernels write there; a gradient must be contiguous and start at a multiple of
    16 bytes.
    """

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None: ...

    def backward_refusal(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        needs_slopes: bool = False,
        into: Sequence[Tensor | None] = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]: ...


@dataclass(frozen=True)
class KernelFamily:
    """Kernels for one kind of device.

    Attributes:
        name: the value of ``backend`` that asks for this family alone.
        title: the kernels in a message, in the plural.
        module: the import path of its ``LaunchModule``.
        capability: the compute capability that the kernels need; None if ``flash_unavailable`` is the only check.
        chip: the name of the GPUs with this capability.
        has_decode: whether there is a kernel for attention to a cache.
        repeatable: whether gradients are bitwise the same in every call. In other families they are the same only under
            ``torch.use_deterministic_algorithms(True)``.
        widest_dq_accumulator: the largest head dimension for which the backward accumulates dQ in memory, in fp32; 0
            if it never does. Only 16-bit calls whose head dimension is a multiple of 8 do.
        row_block: in the accumulator of dQ, each entry of a packed call begins at a multiple of this number of rows.
    """

    name: str
    title: str
    module: str
    capability: tuple[int, int] | None = None
    chip: str = ""
    has_decode: bool = False
    repeatable: bool = False
    widest_dq_accumulator: int = 0
    row_block: int = 1

    @functools.cached_property
    def launch(self) -> LaunchModule:
        return cast(LaunchModule, importlib.import_module(self.module))

    def unavailable(self, device: torch.device) -> str | None:
        """Say why the kernels cannot run on this device; None if they can."""
        return None if self.capability is None else device_unavailable(device, self.capability, self.chip)

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
        """Say why the kernels cannot run the call's forward; None if they can."""
        return self.unavailable(q.device) or self.launch.refusal(q, k, v, call)

    def backward_refusal(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
        """Say why the kernels cannot run the call's backward; None if they can."""
        return self.unavailable(q.device) or self.launch.backward_refusal(q, k, v, call)

    def accumulates_dq(self, head_dim: int, itemsize: int) -> bool:
        """Whether the backward of such a call accumulates dQ in memory, in fp32."""
        return itemsize == 2 and head_dim % 8 == 0 and head_dim <= self.widest_dq_accumulator

    def accumulated_rows(self, rows: int, entries: int) -> int:
        """Return the rows of the dQ accumulator of a packed call; ``entries`` counts empty entries, too."""
        return self.row_block * (rows // self.row_block + entries + 1)


@functools.cache
def device_unavailable(device: torch.device, capability: tuple[int, int], chip: str) -> str | None:
    """Say why kernels for this compute capability cannot run on the device; None if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != capability:
        needed = "{}.{}".format(*capability)
        return f"the GPU has compute capability {major}.{minor} and the kernels are for {needed} ({chip})"
    return None


PORTABLE = KernelFamily(
    name="triton",
    title="the portable kernels",
    module="flash_train.attention.kernels.portable.launch",
    has_decode=True,
    repeatable=True,
)
HOPPER = KernelFamily(
    name="hopper",
    title="the Hopper kernels",
    module="flash_train.attention.kernels.hopper.launch",
    capability=(9, 0),
    chip="Hopper",
    widest_dq_accumulator=128,
    row_block=128,
)

#: by name, in the order in which ``flash`` tries them; the portable family is last, because it runs every call
FAMILIES: dict[str, KernelFamily] = {family.name: family for family in (HOPPER, PORTABLE)}


def is_own(backend: str) -> bool:
    """Whether the backend is one of this project's: ``flash`` or the name of a family."""
    return backend == "flash" or backend in FAMILIES


def fastest_on(device: torch.device) -> KernelFamily:
    """Return the first family that can run on the device."""
    return next((family for family in FAMILIES.values() if family.unavailable(device) is None), PORTABLE)


def families_of(backend: str) -> tuple[KernelFamily, ...]:
    """Return the families to try for a call, in order; ``backend`` must satisfy ``is_own``."""
    return tuple(FAMILIES.values()) if backend == "flash" else (FAMILIES[backend],)
