"""Tests of the kernels that are written once: on a GPU, and on a CPU in a process that interprets them.

``@on_devices`` gives a test the device. A module that uses it is run again by ``tests.attention.test_interpreter``, as
``TRITON_INTERPRET=1 pytest``, where the tests for the CPU exist.
"""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
#: modules of which only the tests for the interpreter are run there
MODULES = (
    "test_decode_compiled.py",
    "test_index_tensors.py",
    "test_layouts.py",
    "test_library.py",
    "test_not_a_number.py",
    "test_padding_rows.py",
    "test_shards.py",
    "test_softcap.py",
    "test_traced.py",
)

on_devices = pytest.mark.parametrize("device", [GPU, "cpu"] if INTERPRETING else [GPU])
