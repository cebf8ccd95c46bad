"""Tests of the kernels that run on a GPU, and on a CPU in the Triton interpreter.

``@on_devices`` passes the device to a test. ``tests.attention.kernels.test_interpreter`` runs each module that uses it
in another process, as ``TRITON_INTERPRET=1 pytest``. Only there the tests have a CPU variant.
"""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
#: modules in tests/attention that use ``on_devices``
MODULES = (
    "decoding/test_decode_compiled.py",
    "decoding/test_padding_rows.py",
    "kernels/test_layouts.py",
    "kernels/test_softcap.py",
    "masks/test_custom_term.py",
    "pytorch/test_torch_library.py",
    "pytorch/test_traced.py",
    "test_index_tensors.py",
    "test_nan_inputs.py",
    "test_dropout_shards.py",
)

on_devices = pytest.mark.parametrize("device", [GPU, "cpu"] if INTERPRETING else [GPU])
