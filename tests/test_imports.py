"""What the packages import: none of them loads a library that takes seconds and that it does not need yet."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_train.data
from flash_train.attention.tracing import assume_constant_result

COMPILER = ("torch._dynamo", "torch._inductor")
LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("package", "slow"),
    [
        ("flash_train.attention", (*COMPILER, "lightning", "matplotlib")),
        ("flash_train.model", (*COMPILER, "lightning", "matplotlib")),
        ("flash_train.records", (*COMPILER, "lightning")),
        ("flash_train.data", (*COMPILER, "lightning", "matplotlib", "datasets", "tokenizers", "pyarrow")),
        ("flash_train.cli.train", (*COMPILER, "torch", "lightning", "matplotlib")),
    ],
)
def test_an_import_loads_no_library_that_takes_seconds(package, slow):
    command = [sys.executable, "-c", LOADED, package, *slow]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []


def test_attention_loads_torch_and_triton_only():
    code = """
import sys, torch, triton
before = {name.partition(".")[0] for name in sys.modules}
import flash_train.attention
after = {name.partition(".")[0] for name in sys.modules}
print(*(after - before - set(sys.stdlib_module_names)))
print(*(name for name in sys.modules if name.startswith("flash_train.") and name.count(".") == 1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, ours = done.stdout.splitlines()
    assert loaded == "flash_train"
    assert set(ours.split()) == {"flash_train.attention", "flash_train.checks"}


def test_the_package_itself_exports_its_version_and_says_that_it_is_typed():
    assert flash_train.__all__ == ["__version__"]
    assert Path(flash_train.__file__).with_name("py.typed").is_file()


def test_the_mark_for_the_compiler_is_the_one_that_pytorch_sets():
    def ours():
        return 1

    def theirs():
        return 1

    assert assume_constant_result(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs))


def test_the_data_package_has_every_name_that_it_lists():
    for name in flash_train.data.__all__:
        assert hasattr(flash_train.data, name)
    with pytest.raises(AttributeError, match="no attribute 'PackedData'"):
        flash_train.data.PackedData  # noqa: B018
