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

MOST = 4096  #: plans that are kept; where lengths change with every call, all are forgotten then

Build = Callable[..., Iterable[Launch]]


class Unknown(Exception):
    """A tensor that was copied for one launch alone."""


class Form(NamedTuple):
    """What Triton and TMA need to know about a tensor, except its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  #: bytes of the address past a multiple of 16


class Group(NamedTuple):
    """A tuple, a named one or a kernel's list of arguments, with places left for tensors, at any depth. ``tensors``:
    (place, number); ``groups``: (place, group)."""

    kind: type
    parts: list[Any]
    tensors: list[tuple[int, int]]
    groups: list[tuple[int, Group]]


class Plan(NamedTuple):
    """A compiled kernel with its grid, and its arguments, in which places are left for a call's tensors.

    Tensors are numbered: first the call's, then the tensors that its launches make. ``arguments`` leaves out TMA
    descriptors, which are in ``descriptors``: (place, number of the base tensor, class, other fields).
    """

    compiled: Any
    grid: tuple[int, ...]  #: three
    arguments: Group
    descriptors: list[tuple[int, int, type, dict[str, Any]]]


class Planned(NamedTuple):
    """What a call of a form runs, and shape and dtype of tensors that its launches make, numbered behind its own."""

    plans: tuple[Plan, ...]
    made: tuple[tuple[torch.Size, torch.dtype], ...]


_plans: dict[tuple[Any, ...], Planned | None] = {}


def launch_all(
    build: Build, inputs: Sequence[Tensor | None], made: Sequence[Tensor | None], call: Call, *options: Any
) -> None:
    """Run the launches of ``build(*inputs, *made, call, *options)``, one after the other.

    Args:
        build: makes them; of its arguments alone, and the first time of their form only.
        inputs: tensors from outside.
        made: this call's own, whose forms follow from all else.
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
    apart = _apart(given)
    n_tensors = len(inputs) + len(made)
    call = Call.of(apart[n_tensors:], call.settings)
    launched = [(launch, launch.start()) for launch in _flat(build(*apart[:n_tensors], call, *options))]
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = _plan_all(launched, apart)


def _flat(launches: Iterable[Launch]) -> Iterator[Launch]:
    """All of them, each behind those that must run before it."""
    for launch in launches:
        yield from launch.first
        yield launch


def _apart(given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors, each an object of its own: one that was given twice need not be the next time."""
    first = {id(x): number for number, x in reversed([*enumerate(given)])}
    return [x if x is None or first[id(x)] == number else x.detach() for number, x in enumerate(given)]


def _key(
    build: Build,
    inputs: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    call: Call,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """What the launches follow from; None where they are not planned: off CUDA."""
    device = inputs[0].device
    if device.type != "cuda":
        return None
    return (
        build,
        options,
        device,
        knobs.runtime.debug,  # Triton compiles for it, and for the next
        knobs.compilation.instrumentation_mode,
        call.settings,
        *[x is None for x in made],
        # as `form_of` has it, whose names a call does without
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (*inputs, *call.tensors)],
    )


def form_of(x: Tensor) -> Form:
    return Form(x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def _plan_all(launched: Sequence[tuple[Launch, Any]], given: Sequence[Tensor | None]) -> Planned | None:
    made = [x for launch, _ in launched for x in launch.made]
    numbers = {id(x): number for number, x in enumerate((*given, *made))}
    plans = []
    for launch, compiled in launched:
        constants = [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        if not isinstance(compiled, CompiledKernel):  # a hook of Triton's kept it from compiling
            return None
        plain = [None if hasattr(x, "base") else x for x in launch.arguments]
        try:
            arguments = _group(list, [*plain, *constants], numbers)
            descriptors = [
                (place, _number(x.base, numbers), type(x), {k: v for k, v in vars(x).items() if k != "base"})
                for place, x in enumerate(launch.arguments)
                if hasattr(x, "base")  # a descriptor of TMA's
            ]
        except Unknown:
            return None
        plans.append(Plan(compiled, (*launch.grid, 1, 1)[:3], arguments, descriptors))
    return Planned(tuple(plans), tuple((x.shape, x.dtype) for x in made))


def _group(kind: type, parts: Iterable[Any], numbers: dict[int, int]) -> Group:
    group = Group(kind, list(parts), [], [])
    for place, part in enumerate(group.parts):
        if isinstance(part, Tensor):
            group.tensors.append((place, _number(part, numbers)))
        elif isinstance(part, tuple) and _has_tensor(part):
            group.groups.append((place, _group(type(part), part, numbers)))
        else:
            continue
        group.parts[place] = None  # which would keep the tensor
    return group


def _has_tensor(parts: tuple[Any, ...]) -> bool:
    return any(isinstance(part, Tensor) or (isinstance(part, tuple) and _has_tensor(part)) for part in parts)


def _number(x: Tensor, numbers: dict[int, int]) -> int:
    if id(x) not in numbers:
        raise Unknown
    return numbers[id(x)]


def _filled(plan: Plan, given: Sequence[Tensor | None]) -> list[Any]:
    """The arguments, with these tensors in their places."""
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
