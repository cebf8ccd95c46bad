"""Launches that are planned once. A later call of the same form only fills in its own tensors.

Except for addresses, everything about a launch (grid, tiles, strides, TMA descriptors, the compiled kernel) follows
from the shapes, strides and dtypes of the call's tensors and from its plain values. Computing it takes several times
as long as the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from flash_train.attention.kernels.arguments import Launch
from flash_train.attention.kernels.call import Call

MAX_PLANS = 4096  #: when more plans are cached, as if every call has other lengths, all are dropped

Build = Callable[..., Iterable[Launch]]


class _TemporaryTensor(Exception):
    """An argument is a tensor that was copied for one launch."""


class TensorForm(NamedTuple):
    """What Triton and TMA need to know about a tensor, except its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  #: bytes of the address past a multiple of 16


class Group(NamedTuple):
    """A tuple, a named tuple or a kernel's list of arguments, with empty places for its tensors and nested tuples.

    ``tensors``: (place, number of the tensor). ``groups``: (place, nested group).
    """

    kind: type
    parts: list[Any]
    tensors: list[tuple[int, int]]
    groups: list[tuple[int, Group]]


class Plan(NamedTuple):
    """A compiled kernel with its grid and its arguments, which have empty places for a call's tensors.

    Tensors are numbered: first the call's, then the tensors that its launches make. ``arguments`` leaves out TMA
    descriptors, which are in ``descriptors``: (place, number of the base tensor, class, other fields).
    """

    compiled: Any
    grid: tuple[int, ...]  #: always three numbers
    arguments: Group
    descriptors: list[tuple[int, int, type, dict[str, Any]]]


class LaunchPlan(NamedTuple):
    """The kernels that a call of one form runs, and shape and dtype of the tensors that its launches allocate.

    These tensors are numbered after the call's own.
    """

    plans: tuple[Plan, ...]
    made: tuple[tuple[torch.Size, torch.dtype], ...]


_plans: dict[tuple[Any, ...], LaunchPlan | None] = {}


def launch_all(
    build: Build, inputs: Sequence[Tensor | None], made: Sequence[Tensor | None], call: Call, *options: Any
) -> None:
    """Run the launches of ``build(*inputs, *made, call, *options)``, one after the other.

    Args:
        build: returns the launches; they must depend on its arguments only. It runs once for each form of arguments.
        inputs: tensors from the caller.
        made: tensors that were allocated for this call. Their forms must follow from the other arguments.
        options: hashable.
    """
    key = _key(build, inputs, made, call, options)
    given = (*inputs, *made, *call.tensors)
    planned = None if key is None else _plans.get(key)
    if planned is not None:
        if planned.made:
            given = (*given, *(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in planned.made))
        for plan in planned.plans:
            plan.compiled[plan.grid](*_filled(plan, given))
        return
    if key is None or key in _plans:
        for launch in build(*inputs, *made, call, *options):
            launch.run()
        return
    apart = _distinct(given)
    n_tensors = len(inputs) + len(made)
    call = Call.of(apart[n_tensors:], call.settings)
    launched = [(launch, launch.start()) for launch in _flat(build(*apart[:n_tensors], call, *options))]
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = _plan_all(launched, apart)


def _flat(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Yield all launches, each after the launches that must run before it."""
    for launch in launches:
        yield from launch.first
        yield launch


def _distinct(given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors as distinct objects: one that is given twice now may be two tensors in the next call."""
    first = {id(x): number for number, x in reversed([*enumerate(given)])}
    return [x if x is None or first[id(x)] == number else x.detach() for number, x in enumerate(given)]


def _key(
    build: Build,
    inputs: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    call: Call,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Return everything that the launches depend on, or None if they are not cached, as off CUDA."""
    device = inputs[0].device
    if device.type != "cuda":
        return None
    return (
        build,
        options,
        device,
        knobs.runtime.debug,  # Triton compiles another kernel for other values of this and the next one
        knobs.compilation.instrumentation_mode,
        call.settings,
        *[x is None for x in made],
        # the fields of `form_of`, without the cost of a named tuple
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (*inputs, *call.tensors)],
    )


def form_of(x: Tensor) -> TensorForm:
    return TensorForm(x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def _plan_all(launched: Sequence[tuple[Launch, Any]], given: Sequence[Tensor | None]) -> LaunchPlan | None:
    made = [x for launch, _ in launched for x in launch.made]
    numbers = {id(x): number for number, x in enumerate((*given, *made))}
    plans = []
    for launch, compiled in launched:
        constants = [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        if not isinstance(compiled, CompiledKernel):  # a hook of Triton skipped the compilation
            return None
        plain = [None if hasattr(x, "base") else x for x in launch.arguments]
        try:
            arguments = _group(list, [*plain, *constants], numbers)
            descriptors = [
                (place, _number(x.base, numbers), type(x), {k: v for k, v in vars(x).items() if k != "base"})
                for place, x in enumerate(launch.arguments)
                if hasattr(x, "base")  # a TMA descriptor
            ]
        except _TemporaryTensor:
            return None
        plans.append(Plan(compiled, (*launch.grid, 1, 1)[:3], arguments, descriptors))
    return LaunchPlan(tuple(plans), tuple((x.shape, x.dtype) for x in made))


def _group(kind: type, parts: Iterable[Any], numbers: dict[int, int]) -> Group:
    group = Group(kind, list(parts), [], [])
    for place, part in enumerate(group.parts):
        if isinstance(part, Tensor):
            group.tensors.append((place, _number(part, numbers)))
        elif isinstance(part, tuple) and _has_tensor(part):
            group.groups.append((place, _group(type(part), part, numbers)))
        else:
            continue
        group.parts[place] = None  # the plan must not keep the tensor alive
    return group


def _has_tensor(parts: tuple[Any, ...]) -> bool:
    return any(isinstance(part, Tensor) or (isinstance(part, tuple) and _has_tensor(part)) for part in parts)


def _number(x: Tensor, numbers: dict[int, int]) -> int:
    if id(x) not in numbers:
        raise _TemporaryTensor
    return numbers[id(x)]


def _filled(plan: Plan, given: Sequence[Tensor | None]) -> list[Any]:
    """Return the arguments with these tensors in their places."""
    arguments = _parts(plan.arguments, given)
    for place, number, kind, fields in plan.descriptors:
        described: Any = object.__new__(kind)
        arguments[place] = described
        described.__dict__ = {**fields, "base": given[number]}
    return arguments


def _parts(group: Group, given: Sequence[Tensor | None]) -> list[Any]:
    parts = group.parts.copy()
    for place, number in group.tensors:
        parts[place] = given[number]
    for place, inner in group.groups:
        parts[place] = tuple.__new__(inner.kind, _parts(inner, given))
    return parts
