"""Imports: no package loads a slow library before it needs it, and there are no import cycles."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import flash_train
import flash_train.data
from flash_train.attention.tracing import assume_constant_result

PACKAGE = Path(flash_train.__file__).parent
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


def test_help_does_not_import_pytorch():
    code = "import sys; from flash_train.cli.train import main; main(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Precedence: command line, experiment, hardware, defaults." in done.stdout


def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {full[name] if full[name] in known else node.module for name in full}
    return names & known.keys()


def test_there_are_no_import_cycles():
    """Imports inside functions and for type checking count too."""
    known = modules()
    graph = {name: imported(path, known) - {name} for name, path in known.items()}
    assert graph["flash_train.cli.run.command"] >= {"flash_train.cli.run.build", "flash_train.cli.config.errors"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imported by each other: {' <- '.join(error.args[1])}")


def test_allow_in_graph_mark_equals_pytorchs():
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
