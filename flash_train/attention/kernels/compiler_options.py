"""Options of Triton's compiler that only some releases have."""

from typing import Any

from triton.backends.nvidia.compiler import CUDAOptions

#: From Triton 3.9 on, a launch has to ask for fused multiply-adds, or the compiler warns.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}

#: From Triton 3.9 on, LLVM orders the instructions of some portable kernels for 16 bits such that they need more
#: registers than there are. With this option they fit. Kernels for fp32, and for head dimensions that 16 does not
#: divide, fit only without it.
FEW_REGISTERS: dict[str, Any] = {"sched4reg": True} if hasattr(CUDAOptions, "sched4reg") else {}
