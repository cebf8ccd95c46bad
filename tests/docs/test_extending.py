"""Each recipe of docs/extending.md, carried out: its files written, its changes made in a copy, its commands run."""

import csv
import json
import mailbox
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks_of
from tests.support.processes import python_path

PAGE = ROOT / "docs" / "extending.md"
BLOCKS = blocks_of(PAGE)
COPIED = ("flash_train", "conf", "scripts")
# Rows of 64 tokens on one layer: a run of a recipe takes seconds.
SMALL = ["hardware=cpu", "callbacks.sample.tokens=0", "trainer.progress_bar=false", "data.cache_dir=cache"]


@dataclass
class Recipe:
    """A section of the page, and the copy of the checkout in which it is carried out."""

    section: str
    folder: Path
    environ: dict[str, str]
    printed: list[str] = field(default_factory=list)

    def follow(self) -> str:
        """Carry out the section's blocks in their order; returns what the last command printed."""
        blocks = [block for block in BLOCKS if block.section == self.section]
        assert blocks
        for block in blocks:
            if block.language == "bash" and block.reason:
                continue
            if block.language == "bash":
                for line in block.code.splitlines():
                    self.printed.append(self.run(line.partition("  #")[0]))
            elif block.language == "diff":
                change(self.folder / block.file, block.code)
            else:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                assert not path.exists(), path
                path.write_text(block.code, encoding="utf-8")
        return self.printed[-1]

    def run(self, line: str) -> str:
        if "scripts/train.py" in line:
            line = " ".join([line, *(text for text in SMALL if text.partition("=")[0] not in line)])
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def fails(self, line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 1, done.stderr
        return done.stderr

    def metrics(self, run_dir: str) -> list[dict[str, str]]:
        with open(self.folder / run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


def change(path: Path, diff: str) -> None:
    """Make the changes of a `diff` block: each place must be found exactly once."""
    text = path.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff.partition("\n")[2], flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert old != new and all(line[0] in " +-" for line in lines), hunk
        assert text.count(old) == 1, f"{path}: {text.count(old)} places for\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Makes the recipe of a section."""
    folder = tmp_path / "checkout"
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    environ = {**os.environ, "PYTHONPATH": python_path(folder), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ.pop("TRITON_INTERPRET", None)

    def make(section: str) -> Recipe:
        return Recipe(section, folder, environ)

    return make


def test_there_is_a_test_for_each_recipe():
    sections = list(dict.fromkeys(block.section for block in BLOCKS))
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(sections) == 10
    assert [name for name in sections if f'recipe("{name}")' not in source] == []
    for block in BLOCKS:
        assert block.language == "bash" or block.file, block.code


@pytest.mark.slow
def test_a_mask_term(recipe):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    found = re.fullmatch(r"largest difference (\S+), pairs (\d+)\n", recipe("A mask term").follow())
    assert float(found[1]) < 1e-5
    assert int(found[2]) == sum(k < 4 or q - k < 40 for q in range(256) for k in range(q + 1))


@pytest.mark.slow
def test_a_corpus(recipe):
    mbox = recipe("A corpus")
    box = mailbox.mbox(mbox.folder / "mails.mbox")
    for i in range(40):
        message = mailbox.mboxMessage()
        message.set_payload(f"Mail {i}: " + "the quick brown fox " * (i + 1))
        box.add(message)
    box.close()
    mbox.follow()
    assert mbox.printed[0] == "mbox (1, 64)\n"
    summary = json.loads((mbox.folder / "run" / "summary.json").read_text())
    assert (summary["status"], summary["data"]["corpus"], summary["steps"]) == ("finished", "mbox", 2)
    assert "must be an mbox file" in mbox.fails(
        "python -c 'from mbox_corpus import MboxCorpus; MboxCorpus(\"nowhere\")'"
    )


@pytest.mark.slow
def test_a_callback(recipe):
    stop = recipe("A callback")
    last = stop.follow().splitlines()[-1]
    steps = int(re.fullmatch(r"stopped after (\d+) steps", last)[1])
    losses = [float(row["train/loss"]) for row in stop.metrics("run") if row["train/loss"]]
    assert 1 < steps == len(losses) < 200
    assert losses[-1] < 5.5 <= min(losses[:-1])


@pytest.mark.slow
def test_a_model_size(recipe):
    size = recipe("A model size")
    size.follow()
    summary = json.loads((size.folder / "run" / "summary.json").read_text())
    assert (summary["model"], summary["steps"]) == ("7m", 1) and summary["parameters"] > 2e6


@pytest.mark.slow
def test_a_kernel_family(recipe):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    family = recipe("A kernel family")
    explained, compared = family.follow().splitlines()
    assert "forward by the plain kernels" in explained and "they have no backward" in explained
    found = re.fullmatch(r"largest difference (\S+), of gradients (\S+)", compared)
    assert float(found[1]) < 1e-5 and float(found[2]) < 1e-4
    shown = family.run("python scripts/train.py --cfg job --package attention attention=plain")
    assert "backend: plain" in shown


def test_a_command(recipe):
    count = recipe("A command")
    (count.folder / "letter.txt").write_text("grüezi", encoding="utf-8")
    assert count.follow() == "7 tokens\n"
    said = count.fails("python -m flash_train.cli.count_tokens nowhere.txt")
    assert said == "flash-train: file=nowhere.txt: must be a file\n"


@pytest.mark.slow
def test_a_memory_mode(recipe):
    mode = recipe("A memory mode")
    mode.follow()
    losses = [[row["train/loss"] for row in mode.metrics(name)] for name in ("products", "none")]
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.slow
def test_a_metric(recipe):
    norm = recipe("A metric")
    norm.follow()
    rows = [row for row in norm.metrics("run") if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [2, 4]
    assert all(float(row["train/weight_norm"]) > 1 for row in rows)


def test_a_tile_table(recipe):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    table = recipe("A tile table")
    before = json.loads((ROOT / "flash_train/attention/kernels/portable/tiles.json").read_text())
    lines = table.follow().splitlines()
    assert "A100 Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)" in lines[0]
    old = {
        row["shared"]: row["forward"]
        for row in before
        if (row["bits"], row["head_dim"], row["variant"]) == (16, 128, "causal") and "major" not in row
    }
    for line, shared in ((lines[1], 99), (lines[2], 227)):
        assert [int(number) for number in re.findall(r"=(\d+)", line)] == old[shared]


@pytest.mark.slow
def test_a_logger(recipe):
    logger = recipe("A logger")
    logger.follow()
    with open(logger.folder / "run" / "csv" / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["train/loss"]) for row in rows if row["train/loss"]] == [
        float(row["train/loss"]) for row in logger.metrics("run") if row["train/loss"]
    ]
    assert "did you mean csv" in logger.fails("python scripts/train.py logger=csw")
