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
    """A tensor that was made for one launch alone."""


class Form(NamedTuple):
    """What Triton and TMA are told of a tensor, but for its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  #: bytes of the address past a multiple of 16


class Place(NamedTuple):
    """Where a launch's argument has a tensor: that with this number, by itself or as the base of a descriptor."""

    number: int
    fields: dict[str, Any] | None  #: a descriptor's, but for its base
    kind: type


class Group(NamedTuple):
    """A tuple of arguments with a tensor among them."""

    parts: tuple[Any, ...]
    kind: type


class Plan(NamedTuple):
    """A compiled kernel with its grid; its arguments in the order of its parameters, with places for tensors."""

    compiled: Any
    grid: tuple[int, ...]  #: three
    arguments: tuple[Any, ...]


_plans: dict[tuple[Any, ...], tuple[Plan, ...] | None] = {}


def launch_all(build: Build, tensors: Sequence[Tensor | None], call: Call, *options: Any) -> None:
    """Run the launches of ``build(*tensors, call, *options)``, one after the other.

    Args:
        build: makes them; of ``tensors``, ``call`` and ``options`` alone, and the first time of that form only.
        options: hashable.
    """
    given = (*tensors, call.cu_seqlens_q, call.cu_seqlens_k, call.rng, call.alibi_slopes, call.sinks)
    key = _key(build, given, call, options)
    plans = None if key is None else _plans.get(key)
    if plans is not None:
        for plan in plans:
            plan.compiled[plan.grid](*_filled(plan.arguments, given))
        return
    if key is None or key in _plans:
        for launch in build(*tensors, call, *options):
            launch.run()
        return
    made = [(launch, launch.run()) for launch in build(*tensors, call, *options)]
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = _plan_all(made, given)


def _key(build: Build, given: Sequence[Tensor | None], call: Call, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the launches follow from; None where they are not planned: off CUDA, and for masks with tensors."""
    device = given[0].device
    if device.type != "cuda" or call.block_map is not None or call.term_tensors:
        return None
    firsts: dict[int, int] = {}
    forms: list[Form | int | None] = []
    for number, x in enumerate(given):
        if x is None:
            forms.append(None)
        else:  # given twice, its places are those of the first
            first = firsts.setdefault(id(x), number)
            forms.append(form_of(x) if first == number else first)
    plain = (call.terms, *call.bounds, *call.origin, call.scale, call.softcap, call.keep_threshold)
    instruments = (knobs.runtime.debug, knobs.compilation.instrumentation_mode)  # Triton compiles for them
    return (build, options, device, *instruments, *plain, *forms)


def form_of(x: Tensor) -> Form:
    return Form(x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def _plan_all(made: Sequence[tuple[Launch, Any]], given: Sequence[Tensor | None]) -> tuple[Plan, ...] | None:
    numbers: dict[int, int] = {}
    for number, x in enumerate(given):
        numbers.setdefault(id(x), number)
    plans = []
    for launch, compiled in made:
        constants = [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        try:
            arguments = _emptied((*launch.arguments, *constants), numbers).parts
        except Unknown:
            return None
        if not isinstance(compiled, CompiledKernel):  # a hook of Triton's kept it from compiling
            return None
        plans.append(Plan(compiled, (*launch.grid, 1, 1)[:3], arguments))
    return tuple(plans)


def _emptied(arguments: tuple[Any, ...], numbers: dict[int, int]) -> Any:
    """The arguments with places for their tensors. Raises `Unknown` for a tensor that has no number."""
    parts = tuple(_place(argument, numbers) for argument in arguments)
    return Group(parts, type(arguments))


def _place(argument: Any, numbers: dict[int, int]) -> Any:
    if isinstance(argument, Tensor):
        return Place(_number(argument, numbers), None, Tensor)
    if isinstance(argument, tuple):
        group = _emptied(argument, numbers)
        return group if any(isinstance(part, Place | Group) for part in group.parts) else argument
    if hasattr(argument, "base"):  # a descriptor of TMA's
        fields = {name: value for name, value in vars(argument).items() if name != "base"}
        return Place(_number(argument.base, numbers), fields, type(argument))
    return argument


def _number(x: Tensor, numbers: dict[int, int]) -> int:
    if id(x) not in numbers:
        raise Unknown
    return numbers[id(x)]


def _filled(parts: tuple[Any, ...], given: Sequence[Tensor | None]) -> list[Any]:
    """The arguments, with these tensors in their places."""
    filled = []
    for part in parts:
        kind = type(part)
        if kind is Place:
            x = given[part.number]
            if part.fields is not None:
                described = object.__new__(part.kind)
                described.__dict__.update(part.fields, base=x)
                x = described
            filled.append(x)
        elif kind is Group:
            filled.append(tuple.__new__(part.kind, _filled(part.parts, given)))
        else:
            filled.append(part)
    return filled
