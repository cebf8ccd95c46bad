"""The pages: their code runs, their commands compose, their links and paths lead somewhere."""

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from flash_train.attention import AttentionSpec, Causal, Packing, RngState, attention
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.overrides import read
from flash_train.cli.config.validate import validate
from tests.support.pages import PAGES, ROOT, Block, anchors_of, blocks_of

README = ROOT / "README.md"
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LANGUAGES = {"python", "bash", "yaml", "json", "toml", "diff", "text"}
#: pages whose links and paths must exist; the code of the last three is not run
LINKED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "tests" / "README.md",
    ROOT / "flash_train" / "attention" / "kernels" / "README.md",
]
EXTENDING = ROOT / "docs" / "extending.md"  # test_extending carries its blocks out

#: what makes a page's program small enough for a test
SHORTER = {
    "StdlibCorpus()": f"StdlibCorpus({str(Path(json.__file__).parent)!r})",
    "seq_len=16384": 'seq_len=64, cache_dir="cache"',
    "max_steps=100": "max_steps=2",
    "val_check_interval=50,": "val_check_interval=2, limit_val_batches=1,",
    "every=50": "every=1",
}

#: the effect of each page's program, by a name that it leaves behind
EFFECTS = {
    "README.md": lambda names, folder: (
        names["out"].shape == (2, 1024, 8, 64) and (folder / "checkpoints" / "step-000002.ckpt").is_file()
    ),
    "data.md": lambda names, folder: names["boundaries"][0] == 0 and names["boundaries"][-1] == 4 * 64,
    "own_code.md": lambda names, folder: (
        json.loads((folder / "runs" / "own" / "summary.json").read_text())["status"] == "finished"
        and len(names["losses"]) == 10
        and names["losses"][-1] < names["losses"][0]
        and names["trainer"].global_step == 2
        and (folder / "fabric.ckpt").is_file()
        and "MiB measured" in (folder / "runs" / "memory" / "memory" / "memory.html").read_text(encoding="utf-8")
    ),
    "pytorch.md": lambda names, folder: names["out"].shape == (2, 4, 1024, 64),
    "several_gpus.md": lambda names, folder: names["strategy"].dims.context == 2,
    "transformers.md": lambda names, folder: (
        names["logits"].shape == (1, 12, 256) and (folder / "checkpoints" / "step-000002.ckpt").is_file()
    ),
    "from_flash_attn.md": lambda names, folder: (
        names["padded"].shape == (2, 256, 8, 64)
        and names["masked"][names["mask"]].allclose(names["y_packed"], atol=1e-5)
        and names["loss"] > 0
    ),
    "attention.md": lambda names, folder: (
        names["out"].shape == (2, 1024, 8, 64)
        and names["mask"].terms
        and one_rank_attends(names["attend_together"], folder)
    ),
}


def one_rank_attends(attend_together, folder: Path) -> bool:
    """Whether a group of one rank gets the attention over the whole row."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        q, k, v = (torch.randn(96, heads, 16) for heads in (4, 2, 2))
        out, positions = attend_together(q, k, v, [50, 30], dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    boundaries = torch.tensor([0, 50, 80], dtype=torch.int32)
    spec, packing = AttentionSpec(Causal(), dropout=0.1), Packing(boundaries, boundaries)
    expected = attention(q, k, v, spec, packing=packing, rng=RngState(0), backend="reference")
    return torch.allclose(out, expected[positions], atol=1e-5)


def programs() -> dict[Path, str]:
    """The Python of each page, one program."""
    found: dict[Path, str] = {}
    for block in BLOCKS:
        if block.language == "python" and block.reason is None and block.page != EXTENDING:
            found[block.page] = found.get(block.page, "") + "\n" + block.code
    return found


def command_lines(block: Block) -> list[str]:
    lines = block.code.replace("\\\n", " ").splitlines()
    return [text for line in lines if (text := re.split(r"(?:^|\s)#\s", line)[0].strip())]


COMMANDS = [
    pytest.param(line, id=f"{block.page.stem}: {line[:70]}")
    for block in BLOCKS
    if block.language == "bash" and block.reason is None and block.page != EXTENDING
    for line in command_lines(block)
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page.stem}: {block.section}")
def test_every_block_says_its_language_and_is_carried_out_or_says_why_not(block):
    assert block.language in LANGUAGES
    assert block.reason is None or len(block.reason.split()) >= 3


@pytest.mark.parametrize("page", programs(), ids=lambda page: page.stem)
def test_a_pages_python_runs(page, tmp_path, monkeypatch):
    code = programs()[page]
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    program = tmp_path / "program.py"  # a file, since Triton reads the source of its kernels
    program.write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(program))
    assert EFFECTS[page.name](names, tmp_path)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_a_page_is_one(line):
    for part in re.split(r" && | \| ", line):
        check(shlex.split(part.replace("…", "x")))


def check(words: list[str]) -> None:
    """Raises where a command does not exist, or its overrides do not compose."""
    program, *arguments = words
    if program == "torchrun":  # it starts a script on several ranks
        script = next(i for i, word in enumerate(arguments) if word.endswith(".py"))
        started = dict(zip(arguments[:script:2], arguments[1:script:2], strict=True))
        sizes = {"trainer.devices": started["--nproc-per-node"], "trainer.num_nodes": started.get("--nnodes", "1")}
        is_training = arguments[script] == "scripts/train.py"
        return check(
            ["python", *arguments[script:], *(f"{key}={value}" for key, value in sizes.items() if is_training)]
        )
    if program in ("pip", "pytest", "make", "git", "ruff", "mypy", "lint-imports"):
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        return
    if program == "python" and arguments[0] == "-m":
        assert (ROOT / (arguments[1].replace(".", "/") + ".py")).is_file()
        return
    script = arguments.pop(0) if program == "python" else program
    assert (ROOT / script).is_file(), script
    if script in ("scripts/train.py", "scripts/profile_memory.py", "scripts/ablate.py"):
        sweep = [text for text in arguments if text.startswith("sweep.")]
        compose_config(sweep, name="ablate")
        compose([text for text in arguments if not text.startswith(("sweep.", "find_max"))])


def compose(arguments: list[str]) -> None:
    if "--version" in arguments:
        return
    line = read(arguments)
    overrides = [text.split(",")[0] for text in line.overrides] if line.multirun else line.overrides
    validate(compose_config(overrides, line.config_dir))


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in ("yaml", "json", "toml")], ids=lambda b: b.section
)
def test_a_blocks_data_can_be_read(block):
    {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[block.language](block.code)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target
    if page.name == "CHANGELOG.md":  # it also names modules that have moved
        return
    for code in re.findall(r"`([^`\n]+)`", text):  # a path, or a command with paths: `pytest tests/data`
        for path in re.findall(r"(?<!\S)(?:flash_train|conf|scripts|tests|docs)/[\w./-]*\w(?![\w<*])", code):
            assert (ROOT / path).exists(), path


def test_the_readme_is_short_and_has_the_two_commands():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert "pip install -e . && python scripts/train.py seq_len=16384\n" in text
    assert "pip install -e '.[test]' && pytest\n" in text  # .ci/run reads this line


def test_the_readme_leads_to_every_page():
    """Directly, or by way of the pages that it links to."""
    found, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page in found:
            continue
        found.add(page)
        for target in re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8")):
            if not target.startswith("https://"):
                waiting.append((page.parent / target).resolve())
    assert [page for page in PAGES if page not in found] == []


def test_contributing_says_what_the_linter_says():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    for contract in contracts:
        for line in contract.get("layers", contract.get("source_modules", [])):
            for module in line.split(" | "):
                assert module in text, module
        for module in contract.get("forbidden_modules", []):
            assert f"`{module}`" in text, module


def test_every_command_and_script_is_documented():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    scripts = [path.name for path in (ROOT / "scripts").iterdir() if path.suffix in (".py", ".sh")]
    assert [name for name in scripts if f"scripts/{name}" not in text] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [name for name in project["scripts"] if f"`{name}`" not in text] == []
