"""The Triton interpreter, without most of the time that it spends on preparing calls."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any


def interpret() -> None:
    """Make Triton interpret the kernels of this process and of those that it starts.

    Raises:
        RuntimeError: Triton is imported already, and compiles kernels.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("interpret() comes too late: Triton reads TRITON_INTERPRET when it is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    interpreter._patch_builtin = functools.partial(_patch_once, interpreter, {})
    interpreter._get_np_dtype = functools.partial(_numpy_type, interpreter.tl, interpreter._get_np_dtype, {})


def _patch_once(interpreter: Any, names: dict[Any, list[str]], package: Any, builder: Any, scope: Any) -> None:
    """Replace the built-in functions of a part of `triton.language`, unless they are replaced already.

    Triton's own function searches each part at every call of a device function, for a third of the time.
    """
    is_builtin = interpreter.tl.core.is_builtin
    if package not in names:
        names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
    for name in names[package]:
        member = getattr(package, name)
        if not is_builtin(member):
            return
        interpreter._patch_attr(package, name, member, builder, scope)


def _numpy_type(tl: Any, plain: Callable[[Any], Any], known: dict[Any, Any], triton_type: Any) -> Any:
    """Look the NumPy type of a Triton type up; Triton's own function builds a table at every call."""
    if isinstance(triton_type, tl.block_type):
        triton_type = triton_type.element_ty
    if isinstance(triton_type, tl.pointer_type):
        return plain(triton_type)
    if triton_type not in known:
        known[triton_type] = plain(triton_type)
    return known[triton_type]
