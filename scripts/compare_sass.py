#!/usr/bin/env python
"""Compare the machine code of the attention kernels at two commits, without a GPU.

    python scripts/compare_sass.py 069f156 .                            # a commit and the working tree
    python scripts/compare_sass.py HEAD~1 HEAD --form 'd128 causal backward'
    python scripts/compare_sass.py HEAD~1 HEAD --kernels triton --form 'sm_90 bf16 d128 causal '

Each side is a commit or a folder that holds a checkout. The script

1. exports each side into a temporary folder;
2. compiles every form that the compile tier of that side knows (``tests/support/attention/compiled.py``): a kernel
   with its tile, dtype, head dimension, mask and features;
3. disassembles the binaries with Triton's cuobjdump, and compares instructions and operands, registers, stack bytes
   and shared memory. Symbol names, line tables and the addresses of constants do not count.

It prints a line for every form that differs and a summary, and exits with 1 if any form differs. Results are kept by
the content of the sources, in a folder under the system's temporary one, so that a second run compiles only what
changed. The machine code depends on Triton's version: put the one that you want first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("flash_train", "tests/__init__.py", "tests/support")
RESOURCES = ("registers", "stack", "shared")

Form = dict[str, Any]  #: "registers", "stack" and "shared" (bytes), and "sass": a list of instructions


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs=2, metavar="COMMIT", help="a commit, or a folder such as . for the working tree")
    parser.add_argument("--form", default="", help="only forms whose name matches this regular expression")
    parser.add_argument("--kernels", choices=("hopper", "triton"), default="hopper", help="triton: the portable ones")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    parser.add_argument("--list", action="store_true", help="print the names of the kinds of call and stop")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N lines of each difference")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "flash-train-sass")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        trees = [export(side, Path(folder) / str(number)) for number, side in enumerate(options.sides)]
        if options.list:
            print("\n".join(list_variants(trees[1], options.kernels)))
            return 0
        a, b = (compile_tree(tree, options.cache, options.kernels, options.form, options.workers) for tree in trees)
    return report(a, b, options.show)


def export(side: str, folder: Path) -> Path:
    """Copy the sources of a commit, or of a checkout's folder, into ``folder``."""
    if Path(side).is_dir():
        for name in SOURCES:
            source, target = Path(side) / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        return folder
    archive = subprocess.run(["git", "archive", side, *SOURCES], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def list_variants(tree: Path, kernels: str) -> list[str]:
    """The kinds of call that the compile tier of ``tree`` compiles these kernels for."""
    # a fresh process, since a process imports one tree only
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_names_of_variants, (str(tree), kernels))


def compile_tree(tree: Path, cache: Path, kernels: str, pattern: str, workers: int) -> dict[str, Form]:
    """Every form of ``tree`` whose name matches ``pattern``, by name."""
    folder = cache / _digest(tree)
    folder.mkdir(parents=True, exist_ok=True)
    forms: dict[str, Form] = {}
    context = multiprocessing.get_context("spawn")
    jobs = [(str(tree), name, pattern, str(folder), str(cache)) for name in list_variants(tree, kernels)]
    # Triton keeps what it compiled: processes are replaced now and then
    with context.Pool(workers, maxtasksperchild=8) as pool:
        for found in pool.imap_unordered(_compile_variant, jobs):
            forms |= found
    return forms


def report(a: dict[str, Form], b: dict[str, Form], show: int = 0) -> int:
    """Print the differences and a summary; 1 where there are any, or where nothing was compared."""
    names = sorted(a.keys() | b.keys())
    different = 0
    for name in names:
        differences = list(compare(a.get(name), b.get(name)))
        different += bool(differences)
        if differences:
            print(f"{name}: {'; '.join(differences)}")
            if show and name in a and name in b:
                lines = difflib.unified_diff(a[name]["sass"], b[name]["sass"], "first", "second", lineterm="", n=1)
                print("\n".join(f"    {line}" for line, _ in zip(lines, range(show), strict=False)))
    print(f"compared {len(names)} forms, {different} differ")
    return int(different > 0 or not names)


def compare(a: Form | None, b: Form | None) -> Iterator[str]:
    if a is None or b is None:
        yield f"only the {'second' if a is None else 'first'} side has it"
        return
    for name in RESOURCES:
        if a[name] != b[name]:
            yield f"{name} {a[name]} -> {b[name]}"
    if a["sass"] != b["sass"]:
        changed = sum(x != y for x, y in zip(a["sass"], b["sass"], strict=False))
        yield f"instructions {len(a['sass'])} -> {len(b['sass'])}, {changed} lines differ"


def normalized(listing: str) -> list[str]:
    """Instructions and operands of a listing of cuobjdump.

    Constants are numbered by their first use in each bank: two listings that differ only in where constants lie are the
    same, and two that read different constants are not. The kernel's name becomes ``KERNEL``.
    """
    name = re.search(r"Function : (\S+)", listing)
    if name is not None:
        listing = listing.replace(name[1], "KERNEL")
    numbers: dict[str, dict[str, int]] = {}

    def number(match: re.Match[str]) -> str:
        bank = numbers.setdefault(match[1], {})
        return f"c[{match[1]}][#{bank.setdefault(match[2], len(bank))}]"

    code = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", listing)
    return [re.sub(r"c\[(0x[0-9a-f]+)\]\[(0x[0-9a-f]+)\]", number, " ".join(line.split())) for line in code]


def read_binary(kernel: Any) -> Form:
    """Resources and instructions of a kernel that Triton compiled."""
    triton = importlib.import_module("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump gives no registers: {listing[:200]}")
    resources = dict(zip(RESOURCES, (int(found[1]), int(found[2]), kernel.metadata.shared), strict=True))
    return {**resources, "sass": normalized(listing)}


def _digest(tree: Path) -> str:
    """Of Triton's version and of every source that may reach a binary."""
    digest = hashlib.sha256(_triton_version().encode())
    for path in sorted([*tree.glob("flash_train/attention/**/*.py"), *tree.glob("tests/support/attention/*.py")]):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _triton_version() -> str:
    return str(importlib.import_module("triton").__version__)


def _compile_tier(tree: str) -> Any:
    if sys.path[0] != tree:
        sys.path.insert(0, tree)
    return importlib.import_module("tests.support.attention.compiled")


def _names_of_variants(tree: str, kernels: str) -> list[str]:
    return [str(variant) for variant in _compile_tier(tree).all_variants() if variant.kernels == kernels]


def _compile_variant(job: tuple[str, str, str, str, str]) -> dict[str, Form]:
    """The forms of one kind of call, from the cache where all of them are there."""
    tree, variant_name, pattern, folder, cache = job
    os.environ.setdefault("TRITON_CACHE_DIR", f"{cache}/triton")
    kept = Path(folder) / f"{variant_name.replace(' ', '_')}.json"
    forms: dict[str, Form] = json.loads(kept.read_text()) if kept.exists() else {}
    tier = _compile_tier(tree)
    variant = next(variant for variant in tier.all_variants() if str(variant) == variant_name)
    hopper = variant.kernels == "hopper"
    all_launches = list(tier.hopper_launches(variant) if hopper else tier.launches(variant, variant.tiles()))
    wanted = {name for name, _, _ in all_launches if re.search(pattern, f"{variant_name} {name}")}
    missing = [entry for entry in all_launches if entry[0] in wanted and f"{variant_name} {entry[0]}" not in forms]
    if missing:
        with (
            patch.object(tier, "hopper_launches" if hopper else "launches", lambda *arguments: iter(missing)),
            patch.object(tier, "resources_of", read_binary),  # the compile tier hands every compiled kernel to it
            patch.object(tier, "problems_of", lambda variant, resources: []),
        ):
            compiled_forms = tier.compile_variant(variant)
        for compiled in compiled_forms:
            if compiled.problems:
                raise RuntimeError(f"{compiled}: {'; '.join(compiled.problems)}")
            forms[f"{variant_name} {compiled.kernel}"] = compiled.resources
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(forms))
        part.replace(kept)
    return {name: form for name, form in forms.items() if re.search(pattern, name)}


if __name__ == "__main__":
    sys.exit(main())
