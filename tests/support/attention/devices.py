"""Tests of the kernels that run on a GPU, and on a CPU in the Triton interpreter.

``@on_devices`` passes the device to a test. ``tests.attention.kernels.test_interpreter`` runs each module that uses it
in another process, as ``TRITON_INTERPRET=1 pytest``. Only there the tests have a CPU variant.
"""

import os
from pathlib import Path

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TESTS = Path(__file__).parents[2] / "attention"
#: modules that use ``on_devices``, relative to tests/attention
MODULES = tuple(
    str(path.relative_to(TESTS))
    for path in sorted(TESTS.rglob("test_*.py"))
    if "\n@on_devices" in path.read_text(encoding="utf-8")
)

on_devices = pytest.mark.parametrize("device", [GPU, "cpu"] if INTERPRETING else [GPU])
