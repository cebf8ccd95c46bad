"""Choose the family of kernels that runs a call: the first one that does not refuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.families import PORTABLE, families_of


def forward_of(backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """Return ``LaunchModule.forward`` of the family that runs the call.

    Args:
        backend: ``flash``, or the name of a family.

    Raises:
        ValueError: the named family cannot run the call; the message says why.
    """
    for family in families_of(backend):
        reason = family.refusal(q, k, v, call)
        if reason is None:
            return family.launch.forward
    raise ValueError(f"the {backend} backend cannot run this: {reason}; flash can")


def backward_of(backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Callable[..., Any]:
    """Return ``LaunchModule.backward`` of the family that runs the backward; arguments and errors as ``forward_of``."""
    for family in families_of(backend):
        reason = family.backward_refusal(q, k, v, call)
        if reason is None:
            return family.launch.backward
    raise ValueError(f"the {backend} backend cannot run the backward: {reason}; flash can")


def explain_choice(backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Say which kernels run the call's forward and backward, and why the families before them do not.

    Raises:
        ValueError: the named family cannot run the call's forward; the message says why.
    """
    if backend == PORTABLE.name:
        chosen = f"{PORTABLE.title} (they were asked for)"
        return f"forward by {chosen}, backward by {chosen}"
    forward_of(backend, q, k, v, call)
    families = families_of(backend)
    forward = {family.title: family.refusal(q, k, v, call) for family in families}
    backward = {family.title: family.backward_refusal(q, k, v, call) for family in families}
    return f"forward by {_first_able(forward)}, backward by {_first_able(backward)}"


def _first_able(refusals: dict[str, str | None]) -> str:
    """Return the title of the first family without a refusal, or "none", with the refusals before it."""
    reasons: list[str] = []
    for title, reason in refusals.items():
        if reason is None:
            return title + (f" ({'; '.join(reasons)})" if reasons else "")
        reasons.append(reason)
    return f"none ({'; '.join(reasons)})"
