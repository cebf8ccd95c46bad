"""Runs a kernel as ordinary Python: its functions, with the emulator's objects as globals."""

from __future__ import annotations

import builtins
import inspect
import itertools
import random
import types

import torch
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITFunction

from flash_train.attention.kernels.hopper import gluon_compat
from tests.support.gluon import barriers, memory, operations, pointers, reductions
from tests.support.gluon import hopper as emulated_hopper
from tests.support.gluon.schedule import Program, current
from tests.support.gluon.values import EmulationError, Value, cast, scalar, to_tensor


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    if len(worker_num_warps) != len(functions_and_args) - 1:
        raise EmulationError(f"{len(worker_num_warps)} worker_num_warps for {len(functions_and_args) - 1} workers")
    if worker_num_regs is not None and len(worker_num_regs) != len(worker_num_warps):
        raise EmulationError("worker_num_regs and worker_num_warps differ in length")
    calls = [lambda function=function, args=args: function(*args) for function, args in functions_and_args]
    names = [getattr(function, "__name__", str(function)) for function, _ in functions_and_args]
    names = [f"{name} (partition {i})" for i, name in enumerate(names)]
    return current().program.specialize(calls, names, worker_num_warps)


_SAME_NAME = """add arange broadcast broadcast_to cdiv ceil clamp convert_layout cos device_assert div_rn dot dot_fma
    erf exp exp2 expand_dims fdiv floor fma full full_like gather inline_asm_elementwise join log log2 maximum minimum
    mul num_ctas num_programs num_warps permute program_id ravel reshape rsqrt set_auto_layout sin split sqrt sqrt_rn
    static_assert static_range sub trans umulhi where zeros zeros_like"""
_POINTERS = "load store atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor atomic_xchg atomic_cas"
_LANGUAGE = {
    **{name: getattr(operations, name) for name in _SAME_NAME.split()},
    **{name: getattr(reductions, name) for name in ("argmax", "argmin", "cumsum", "reduce", "reduce_or", "xor_sum")},
    **{name: getattr(pointers, name) for name in _POINTERS.split()},
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), operations.same),
    **dict.fromkeys(("assume", "device_print", "static_print", "debug_barrier"), operations.ignored),
    **dict.fromkeys(("barrier", "thread_barrier"), operations.barrier),
    "abs": operations.absolute,
    "max": reductions.reduce_max,
    "min": reductions.reduce_min,
    "sum": reductions.reduce_sum,
    "range": operations.runtime_range,
    "cast": cast,
    "to_tensor": to_tensor,
    "constexpr": lambda value: value,
    "tensor": Value,
    "shared_memory_descriptor": memory.SharedView,
    "allocate_shared_memory": memory.allocate_shared_memory,
    "warp_specialize": warp_specialize,
}
_BARRIERS = {name: getattr(barriers, name) for name in ("init", "invalidate", "expect", "arrive", "wait")}
_BARRIERS["allocate_mbarrier"] = memory.allocate_mbarrier
_TMA = {"make_tensor_descriptor": emulated_hopper.make_tensor_descriptor}
_COMPAT = {
    "arrive_no_sync": lambda barrier, pred=True: barriers.expect(barrier, 0, pred),
    "reinterpret": memory.SharedView.reinterpret,
    "sync_warps": operations.barrier,
    "tma_add": emulated_hopper.async_atomic_add,
    "tma_load": emulated_hopper.async_load,
    "tma_store": emulated_hopper.async_store,
    "tma_store_wait": emulated_hopper.store_wait,
}
_HOPPER = {
    name: getattr(emulated_hopper, name)
    for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait")
}
_EMULATED = {
    id(getattr(module, name)): function
    for module, functions in (
        (tl, _LANGUAGE),
        (tl.math, _LANGUAGE),
        (gl, _LANGUAGE),
        (gluon_core, _LANGUAGE),
        (ampere.mbarrier, _BARRIERS),
        (hopper.mbarrier, _BARRIERS),
        (hopper.tma, _TMA),
        (hopper, _HOPPER),
        (gluon_compat, _COMPAT),
    )
    for name, function in functions.items()
    if hasattr(module, name)
}
# builtins of Python that mean something else inside a kernel
_BUILTINS = {"range": operations.runtime_range, "min": operations.builtin_min, "max": operations.builtin_max}


_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}


class _Module:
    """A module with the emulator's objects as attributes."""

    def __init__(self, launch, module):
        self._launch, self._module = launch, module

    def __getattr__(self, name):
        found = self._launch.emulate(getattr(self._module, name))
        setattr(self, name, found)
        return found


class _Function:
    """A jitted function as a Python function."""

    def __init__(self, launch, jitted):
        self.launch, self.jitted, self.python = launch, jitted, None
        self.__name__ = jitted.fn.__name__
        self.constants = {parameter.name for parameter in jitted.params if parameter.is_constexpr}
        self.signature = inspect.signature(jitted.fn)

    def __call__(self, *args, **kwargs):
        if self.python is None:
            self.python = self.launch.python(self.jitted.fn)
        if self.constants:
            for name, value in self.signature.bind(*args, **kwargs).arguments.items():
                if name in self.constants and isinstance(value, Value):
                    raise EmulationError(f"{self.__name__}: {name} is constexpr, and gets a run-time value")
        return self.python(*args, **kwargs)


class Launch:
    def __init__(self, grid, assembly):
        self.grid, self.assembly = grid, assembly
        self.functions = {}

    def emulate(self, x):
        """The emulator's counterpart of an object that a kernel uses."""
        if id(x) in _EMULATED:
            return _EMULATED[id(x)]
        if isinstance(x, JITFunction):
            if id(x) not in self.functions:
                self.functions[id(x)] = _Function(self, x)
            return self.functions[id(x)]
        if isinstance(x, tl.constexpr):
            return self.emulate(x.value)
        if isinstance(x, types.ModuleType):
            return _Module(self, x)
        if isinstance(x, (tuple, list)):
            items = [self.emulate(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if isinstance(x, types.FunctionType) and hasattr(x, "__triton_builtin__"):
            return _missing(f"{x.__module__}.{x.__name__}")
        if isinstance(x, ConstexprFunction):
            return x.fn
        return x

    def python(self, function):
        """The function with emulated globals, closure and defaults."""
        names = {
            name: self.emulate(function.__globals__[name])
            for name in _names(function.__code__)
            if name in function.__globals__
        }
        cells = tuple(types.CellType(self.emulate(cell.cell_contents)) for cell in function.__closure__ or ())
        scope = {"__name__": function.__module__, "__builtins__": vars(builtins) | _BUILTINS, **names}
        defaults = self.emulate(function.__defaults__)
        copy = types.FunctionType(function.__code__, scope, function.__name__, defaults, cells)
        copy.__kwdefaults__ = {k: self.emulate(v) for k, v in (function.__kwdefaults__ or {}).items()}
        return copy

    def argument(self, x, name):
        """The emulated value of a run-time argument."""
        if isinstance(x, torch.Tensor):
            return pointers.pointer(x, name)
        if isinstance(x, TensorDescriptor):
            return pointers.Descriptor(x, name)
        if isinstance(x, (tuple, list)):
            items = [self.argument(item, f"{name}[{i}]") for i, item in enumerate(x)]
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        if isinstance(x, (bool, int)):
            return scalar(x)
        if isinstance(x, float):
            return scalar(x, tl.float32)
        return self.emulate(x)


def _names(code):
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _missing(name):
    def call(*_, **__):
        raise NotImplementedError(f"the emulator has no {name}")

    return call


def launch(kernel, grid, *args, seed=0, num_warps=4, assembly=None, in_order=False, **constants):
    """Run all programs of ``kernel[grid](*args, **constants)``, one after another.

    Args:
        seed: determines the order of programs, partitions and copies; run a kernel with several seeds.
        assembly: maps the text of inline assembly to a function of numpy arrays.
        in_order: run programs in order, for a kernel whose programs wait for programs of lower numbers.
    """
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    grid += (1,) * (3 - len(grid))
    run = Launch(grid, assembly or {})
    function = run.emulate(kernel)
    constants["num_warps"] = num_warps
    for option in _OPTIONS - set(function.signature.parameters):
        constants.pop(option, None)  # options of the compiler
    bound = function.signature.bind(*args, **constants)
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        bound.arguments[name] = run.emulate(value) if name in function.constants else run.argument(value, name)
    rng = random.Random(seed)
    programs = list(itertools.product(*map(range, grid)))
    if not in_order:
        rng.shuffle(programs)
    for ids in programs:
        program = Program(run, ids, rng)
        program.shared = memory.SharedMemory()
        program.run(lambda: function(*bound.args, **bound.kwargs), num_warps)
