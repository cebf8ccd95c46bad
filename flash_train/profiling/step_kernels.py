"""The kernels of a training step on an NVIDIA GPU: how long each kind of them runs, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from flash_train.attention.kernels.families import FAMILIES
from flash_train.records.markdown import markdown_table, number

OTHER = "other"
OWN = "|".join(("attention", *FAMILIES))  #: how the names of our kernels for attention begin
#: What a kernel's name contains, by kind. The first kind that matches counts: names of attention's kernels may also
#: contain "cutlass".
KINDS = {
    "communication": r"nccl|sum_shared_rows",
    "attention, forward": rf"({OWN})_(forward|decode)|list_tiles|flash_fwd|(sdpa|fmha).*(fprop|fwd)",
    "attention, backward": rf"({OWN})_(prepare|backward|finish)|flash_bwd|(sdpa|fmha).*(bprop|bwd)",
    "matrix products": r"gemm|nvjet|xmma|cutlass|cublas|splitK|gemv",
    "gated products": r"product_kernel|gradients_kernel",
    "norms": r"norm_(forward|backward)_kernel|sum_rows_kernel|rms_?norm|layer_norm",
    "rotary embedding": r"rotary_kernel",
    "loss": r"cross_entropy|softmax|nll_loss",
    "optimizer": r"adamw|multi_tensor|foreach",
    "copies": r"memcpy|memset|copy|CatArray|fill",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy or fill of memory, that a GPU ran.

    Args:
        name: as the profiler names it.
        start: seconds on the profiler's clock.
        seconds: how long it ran.
    """

    name: str
    start: float
    seconds: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel in `KINDS`, or `OTHER`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def device_kernels(profile: torch.profiler.profile) -> list[Kernel]:
    """Return what the GPU ran while `profile` recorded, in order."""
    events = [
        event
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    kernels = [Kernel(e.name, e.time_range.start / 1e6, e.time_range.elapsed_us() / 1e6) for e in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Return how long at least one kernel ran. Kernels of several streams may overlap."""
    busy, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        finish = kernel.start + kernel.seconds
        busy += max(0.0, finish - max(kernel.start, end))
        end = max(end, finish)
    return busy


def report(kernels: Sequence[Kernel], seconds: float) -> dict[str, Any]:
    """Add up the kernels of a step.

    Args:
        seconds: how long the step took, including what the profiler adds to it.

    Returns:
        `step_seconds`, `busy_seconds`, and two lists with seconds and launches, the longest first: `kinds`, and
        `kernels` by name.
    """
    return {
        "step_seconds": seconds,
        "busy_seconds": busy_seconds(kernels),
        "kinds": _sums(kernels, "kind", lambda kernel: kind_of(kernel.name)),
        "kernels": [
            found | {"kind": kind_of(found["name"])} for found in _sums(kernels, "name", lambda kernel: kernel.name)
        ],
    }


def markdown(found: dict[str, Any], title: str) -> str:
    """Format a report: a line, a table of kinds, and a table of the twenty kernels that run longest."""
    kinds = [(one["kind"], *_figures(one)) for one in found["kinds"]]
    names = [(f"`{_short(one['name'])}`", one["kind"], *_figures(one)) for one in found["kernels"][:20]]
    return (
        f"# {title}\n\n{summary(found)}\n\n"
        + markdown_table(("kind", "ms", "launches"), kinds)
        + "\n"
        + markdown_table(("kernel", "kind", "ms", "launches"), names, left=2)
    )


def summary(found: dict[str, Any]) -> str:
    """Return one line: how long kernels ran, and which kind ran longest."""
    launches = sum(one["launches"] for one in found["kinds"])
    line = f"{launches:,} kernels ran for {1e3 * found['busy_seconds']:.1f} ms of the step"
    if found["kinds"]:
        first = found["kinds"][0]
        line += f", longest {first['kind']} with {1e3 * first['seconds']:.1f} ms"
    return line


def _sums(kernels: Iterable[Kernel], label: str, key: Callable[[Kernel], str]) -> list[dict[str, Any]]:
    """Add up the kernels with the same key, which is the entry `label` of their sum; the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        name = key(kernel)
        one = found.setdefault(name, {label: name, "seconds": 0.0, "launches": 0})
        one["seconds"] += kernel.seconds
        one["launches"] += 1
    return sorted(found.values(), key=lambda one: -one["seconds"])


def _figures(one: dict[str, Any]) -> tuple[str, str]:
    return number(1e3 * one["seconds"], ".2f"), f"{one['launches']:,}"


def _short(name: str) -> str:
    """A name without its arguments and template, which fill whole screens."""
    name = name.removeprefix("void ").replace("(anonymous namespace)", "")
    name = re.split(r"[<(]", name, maxsplit=1)[0] or name
    return name[:80].replace("|", "")
