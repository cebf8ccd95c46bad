"""Launches that are planned once: a later call of the same form only puts its own tensors into them.

All that a launch is told beside addresses (grid, tiles, strides, what TMA describes, which of Triton's compiled forms
runs) follows from the shapes, strides and dtypes of a call's tensors and from its plain values. To find it takes
several times as long as the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from flash_train.attention.kernels.arguments import Call, Launch

MOST = 4096  #: plans that are kept; where lengths change with every call, all are forgotten then

Build = Callable[..., Iterable[Launch]]


class Unknown(Exception):
    """A tensor that was made for one launch alone, or lies deeper than a plan looks."""


class Form(NamedTuple):
    """What Triton and TMA are told of a tensor, but for its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  #: bytes of the address past a multiple of 16


class Plan(NamedTuple):
    """A compiled kernel with its grid, and its arguments, in which places are left for a call's tensors.

    Tensors are known by their numbers among those of the call. ``tensors``: (place, number); ``descriptors`` of TMA's:
    (place, number of the base, class, other fields); ``groups``, tuples with tensors in them: (place, class, parts,
    (place, number) of the tensors in it).
    """

    compiled: Any
    grid: tuple[int, ...]  #: three
    arguments: list[Any]
    tensors: list[tuple[int, int]]
    descriptors: list[tuple[int, int, type, dict[str, Any]]]
    groups: list[tuple[int, type, list[Any], list[tuple[int, int]]]]


_plans: dict[tuple[Any, ...], tuple[Plan, ...] | None] = {}


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
    given = (*inputs, *made, *_tensors_of(call))
    plans = None if key is None else _plans.get(key)
    if plans is not None:
        for plan in plans:
            plan.compiled[plan.grid](*_filled(plan, given))
        return
    if key is None or key in _plans:
        for launch in build(*inputs, *made, call, *options):
            launch.run()
        return
    apart = _apart(given)
    *tensors, cu_q, cu_k, rng, slopes, sinks = apart
    call = call._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, rng=rng, alibi_slopes=slopes, sinks=sinks)
    launched = [(launch, launch.run()) for launch in build(*tensors, call, *options)]
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = _plan_all(launched, apart)


def _tensors_of(call: Call) -> tuple[Tensor | None, ...]:
    return call.cu_seqlens_q, call.cu_seqlens_k, call.rng, call.alibi_slopes, call.sinks


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
    """What the launches follow from; None where they are not planned: off CUDA, and for masks with tensors."""
    device = inputs[0].device
    if device.type != "cuda" or call.block_map is not None or call.term_tensors:
        return None
    return (
        build,
        options,
        device,
        knobs.runtime.debug,  # Triton compiles for it, and for the next
        knobs.compilation.instrumentation_mode,
        call.terms,
        tuple(call.bounds),
        tuple(call.origin),
        *call[-3:],
        *[x is None for x in made],
        # as `form_of` has it, whose names a call does without
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in (*inputs, *_tensors_of(call))],
    )


def form_of(x: Tensor) -> Form:
    return Form(x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def _plan_all(launched: Sequence[tuple[Launch, Any]], given: Sequence[Tensor | None]) -> tuple[Plan, ...] | None:
    numbers = {id(x): number for number, x in enumerate(given)}
    plans = []
    for launch, compiled in launched:
        constants = [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        if not isinstance(compiled, CompiledKernel):  # a hook of Triton's kept it from compiling
            return None
        plan = Plan(compiled, (*launch.grid, 1, 1)[:3], [*launch.arguments, *constants], [], [], [])
        try:
            for place, argument in enumerate(launch.arguments):
                _leave(plan, place, argument, numbers)
        except Unknown:
            return None
        plans.append(plan)
    return tuple(plans)


def _leave(plan: Plan, place: int, argument: Any, numbers: dict[int, int]) -> None:
    """Leave the place of an argument that is a tensor, or has one in it, to be filled."""
    if isinstance(argument, Tensor):
        plan.tensors.append((place, _number(argument, numbers)))
    elif hasattr(argument, "base"):  # a descriptor of TMA's
        fields = {name: value for name, value in vars(argument).items() if name != "base"}
        plan.descriptors.append((place, _number(argument.base, numbers), type(argument), fields))
    elif isinstance(argument, tuple) and _has_tensor(argument):
        if any(isinstance(part, tuple) and _has_tensor(part) for part in argument):
            raise Unknown
        inner = [(i, _number(part, numbers)) for i, part in enumerate(argument) if isinstance(part, Tensor)]
        parts = [None if isinstance(part, Tensor) else part for part in argument]
        plan.groups.append((place, type(argument), parts, inner))
    else:
        return
    plan.arguments[place] = None  # which would keep the tensor


def _has_tensor(parts: tuple[Any, ...]) -> bool:
    return any(isinstance(part, Tensor) or (isinstance(part, tuple) and _has_tensor(part)) for part in parts)


def _number(x: Tensor, numbers: dict[int, int]) -> int:
    if id(x) not in numbers:
        raise Unknown
    return numbers[id(x)]


def _filled(plan: Plan, given: Sequence[Tensor | None]) -> list[Any]:
    """The arguments, with these tensors in their places."""
    arguments = plan.arguments.copy()
    for place, number in plan.tensors:
        arguments[place] = given[number]
    for place, number, kind, fields in plan.descriptors:
        described: Any = object.__new__(kind)
        arguments[place] = described
        described.__dict__ = {**fields, "base": given[number]}
    for place, kind, parts, inner in plan.groups:
        parts = parts.copy()
        for i, number in inner:
            parts[i] = given[number]
        arguments[place] = tuple.__new__(kind, parts)
    return arguments
