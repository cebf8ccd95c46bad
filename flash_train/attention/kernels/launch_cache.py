"""A cache of kernel launches: the first call prepares them, and a later call like it only fills in its own tensors.

Everything in a launch except addresses (grid, tiles, strides, TMA descriptors, the compiled variant of the kernel)
follows from the shapes, strides and dtypes of a call's tensors and from its plain values. Preparing it takes several
times as long as the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.launch import Launch
from flash_train.attention.kernels.launch_options import present_options

Build = Callable[..., Iterable[Launch]]


class UnknownTensor(Exception):
    """A launch has a tensor that is neither the call's nor in ``Launch.made``: a copy made for this launch alone."""


class TensorSignature(NamedTuple):
    """What Triton and TMA use of a tensor, apart from its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  #: the address modulo 16, in bytes


class ArgumentTemplate(NamedTuple):
    """A kernel's list of arguments, or a tuple inside it, without its tensors.

    ``parts`` has None at the place of each tensor and of each tuple that contains tensors. ``tensors`` are pairs
    (place, number of the tensor), and ``groups`` are pairs (place, template of the tuple).
    """

    kind: type
    parts: list[Any]
    tensors: list[tuple[int, int]]
    groups: list[tuple[int, ArgumentTemplate]]


class LaunchPlan(NamedTuple):
    """A compiled kernel with its grid and the template of its arguments.

    Tensors have numbers: first the call's tensors, then those that its launches allocate. ``descriptors`` are the TMA
    descriptors among the arguments: (place, number of the base tensor, class, other fields).
    """

    compiled: Any
    grid: tuple[int, ...]  #: three numbers
    arguments: ArgumentTemplate
    descriptors: list[tuple[int, int, type, dict[str, Any]]]


class CallPlan(NamedTuple):
    """The launches of a call, and the shape and dtype of each tensor that they allocate."""

    plans: tuple[LaunchPlan, ...]
    made: tuple[tuple[torch.Size, torch.dtype], ...]


_plans: dict[tuple[Any, ...], CallPlan | None] = {}  # None: the call cannot be cached


def clear_plans() -> None:
    """Forget all prepared calls."""
    _plans.clear()


def launch_all(
    build: Build,
    inputs: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    call: Call | None = None,
    *options: Any,
) -> None:
    """Run the launches of ``build(*inputs, *made, call, *options)`` in order, without ``call`` if it is None.

    Args:
        build: returns the launches. They must depend on its arguments only; for a cached call it does not run.
        inputs: the caller's tensors; the first is not None.
        made: tensors allocated for this call. Their shapes, strides and dtypes must follow from the other arguments.
        options: hashable.
    """
    first = inputs[0]
    assert first is not None  # see `inputs` above
    key = _key(build, inputs, made, call, options)
    tensors = (*inputs, *made) if call is None else (*inputs, *made, *call.tensors)
    call_plan = None if key is None else _plans.get(key)
    if call_plan is not None:
        if call_plan.made:
            tensors = (*tensors, *(first.new_empty(shape, dtype=dtype) for shape, dtype in call_plan.made))
        for plan in call_plan.plans:
            plan.compiled[plan.grid](*_fill_arguments(plan, tensors))
        return
    if key is None or key in _plans:
        for launch in build(*inputs, *made, *_given(call), *options):
            launch.run()
        return
    distinct = _without_aliases(tensors)
    n_tensors = len(inputs) + len(made)
    call = None if call is None else Call.of(distinct[n_tensors:], call.settings)
    launches = build(*distinct[:n_tensors], *_given(call), *options)
    launched = [(launch, launch.start()) for launch in _in_launch_order(launches)]
    if len(_plans) >= present_options().cached_plans:
        _plans.clear()
    _plans[key] = _make_call_plan(launched, distinct)


def _given(call: Call | None) -> tuple[Call, ...]:
    return () if call is None else (call,)


def _in_launch_order(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Yield every launch after the launches that must run before it."""
    for launch in launches:
        yield from launch.first
        yield launch


def _without_aliases(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors with a new object for each repeated one: the next call may pass two different tensors."""
    first = {id(x): number for number, x in reversed([*enumerate(tensors)])}
    return [x if x is None or first[id(x)] == number else x.detach() for number, x in enumerate(tensors)]


def _key(
    build: Build,
    inputs: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    call: Call | None,
    options: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Return everything that determines the launches.

    None if they are not cached: the device is not CUDA, or the ``LaunchOptions`` allow no cached plans.
    """
    tensors = inputs if call is None else (*inputs, *call.tensors)
    first, planning = inputs[0], present_options()
    assert first is not None
    device = first.device
    if device.type != "cuda" or not planning.cached_plans:
        return None
    return (
        build,
        options,
        planning.of_plans,
        device,
        knobs.runtime.debug,  # this and the next knob change the compiled code
        knobs.compilation.instrumentation_mode,
        None if call is None else call.settings,
        *[x is None for x in made],
        # the fields of `signature_of`, as a plain tuple because that is faster
        *[x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors],
    )


def signature_of(x: Tensor) -> TensorSignature:
    return TensorSignature(x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def _make_call_plan(launched: Sequence[tuple[Launch, Any]], tensors: Sequence[Tensor | None]) -> CallPlan | None:
    """Make the plan of a call from its (launch, compiled kernel) pairs; None if the call cannot be cached."""
    made = [x for launch, _ in launched for x in launch.made]
    numbers = {id(x): number for number, x in enumerate((*tensors, *made))}
    plans = []
    for launch, compiled in launched:
        constants = [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        if not isinstance(compiled, CompiledKernel):  # a Triton hook skipped the compilation
            return None
        plain = [None if hasattr(x, "base") else x for x in launch.arguments]
        try:
            arguments = _make_template(list, [*plain, *constants], numbers)
            descriptors = [
                (place, _number(x.base, numbers), type(x), {k: v for k, v in vars(x).items() if k != "base"})
                for place, x in enumerate(launch.arguments)
                if hasattr(x, "base")  # only TMA descriptors have it
            ]
        except UnknownTensor:
            return None
        plans.append(LaunchPlan(compiled, (*launch.grid, 1, 1)[:3], arguments, descriptors))
    return CallPlan(tuple(plans), tuple((x.shape, x.dtype) for x in made))


def _make_template(kind: type, parts: Iterable[Any], numbers: dict[int, int]) -> ArgumentTemplate:
    template = ArgumentTemplate(kind, list(parts), [], [])
    for place, part in enumerate(template.parts):
        if isinstance(part, Tensor):
            template.tensors.append((place, _number(part, numbers)))
        elif isinstance(part, tuple) and _has_tensor(part):
            template.groups.append((place, _make_template(type(part), part, numbers)))
        else:
            continue
        template.parts[place] = None  # the cache must not keep the tensor alive
    return template


def _has_tensor(parts: tuple[Any, ...]) -> bool:
    return any(isinstance(part, Tensor) or (isinstance(part, tuple) and _has_tensor(part)) for part in parts)


def _number(x: Tensor, numbers: dict[int, int]) -> int:
    if id(x) not in numbers:
        raise UnknownTensor
    return numbers[id(x)]


def _fill_arguments(plan: LaunchPlan, tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the kernel's arguments with these tensors."""
    arguments = _fill_template(plan.arguments, tensors)
    for place, number, kind, fields in plan.descriptors:
        descriptor: Any = object.__new__(kind)
        arguments[place] = descriptor
        descriptor.__dict__ = {**fields, "base": tensors[number]}
    return arguments


def _fill_template(template: ArgumentTemplate, tensors: Sequence[Tensor | None]) -> list[Any]:
    parts = template.parts.copy()
    for place, number in template.tensors:
        parts[place] = tensors[number]
    for place, inner in template.groups:
        parts[place] = tuple.__new__(inner.kind, _fill_template(inner, tensors))
    return parts
