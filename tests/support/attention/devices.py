"""Tests of the kernels that are written once: on a GPU, and on a CPU in a process that interprets them.

``@on_devices`` gives a test the device. ``tests.attention.kernels.test_interpreter`` runs each module that uses it once
more, as ``TRITON_INTERPRET=1 pytest``: there, the tests for the CPU exist.
"""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
#: modules that use it, below tests/attention
MODULES = (
    "decoding/test_decode_compiled.py",
    "test_index_tensors.py",
    "kernels/test_layouts.py",
    "test_library.py",
    "test_not_a_number.py",
    "decoding/test_padding_rows.py",
    "test_shards.py",
    "kernels/test_softcap.py",
    "test_traced.py",
)

on_devices = pytest.mark.parametrize("device", [GPU, "cpu"] if INTERPRETING else [GPU])
