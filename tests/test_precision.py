"""The table of precisions agrees with torch and with Lightning."""

import subprocess
import sys
from typing import get_args

import pytest
import torch
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR

from flash_train.precision import PRECISIONS, lightning_compute_dtype


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_is_known_to_lightning_and_has_the_bytes_of_its_dtypes(name):
    precision = PRECISIONS[name]
    assert precision.lightning in get_args(_PRECISION_INPUT_STR)
    assert precision.weight_dtype.itemsize == precision.weight_bytes
    assert precision.compute_dtype.itemsize == precision.activation_bytes
    assert lightning_compute_dtype(precision.lightning) is precision.compute_dtype


def test_precisions_of_lightning_that_are_not_ours():
    assert lightning_compute_dtype("16-true") is torch.float16
    assert lightning_compute_dtype("transformer-engine") is None


def test_the_tables_for_the_command_line_import_no_torch():
    code = "import sys, flash_train.precision, flash_train.checks, flash_train.files; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
