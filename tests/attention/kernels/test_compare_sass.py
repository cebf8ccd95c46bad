"""The script that compares machine code finds a changed constant, and nothing in two equal trees."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

ROOT = Path(__file__).parents[3]
FORM = "sm_90 hopper bf16 d64 full prepare"


def compare(a, b, cache):
    command = [sys.executable, "scripts/compare_sass.py", str(a), str(b), "--form", f"^{FORM}$", "--cache", str(cache)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_equal_trees_and_a_changed_constant(tmp_path):
    changed = tmp_path / "changed"
    for name in ("flash_train", "tests/support"):
        shutil.copytree(ROOT / name, changed / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests/__init__.py", changed / "tests/__init__.py")

    same = compare(ROOT, changed, tmp_path / "cache")
    assert (same.returncode, same.stdout) == (0, "compared 1 forms, 0 differ\n"), same.stderr

    score = changed / "flash_train/attention/kernels/device/score.py"
    score.write_text(
        score.read_text().replace("LOG2_E = tl.constexpr(1.4426950408889634)", "LOG2_E = tl.constexpr(1.5)")
    )
    differ = compare(ROOT, changed, tmp_path / "cache")
    assert differ.returncode == 1, differ.stderr
    first, last = differ.stdout.splitlines()
    assert first.startswith(f"{FORM}: instructions ") and last == "compared 1 forms, 1 differ"
