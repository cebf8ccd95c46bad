"""Pages of the documentation site that come from other files; mkdocs.yml names this module as a hook.

The front page is README.md. The references of the configuration, the commands and a run's files come from the code.
The reference of the Python interface comes from docstrings. Links to files of the repository lead to the pages made of
them.
"""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields, is_dataclass
from html import unescape
from pathlib import Path
from typing import Any

from flash_train.cli.config import schema
from flash_train.cli.config.validate import RULES
from flash_train.cli.sweep import find_max_options
from flash_train.records import run_files

HAS_TRITON = importlib.util.find_spec("triton") is not None  # the pictures need the kernels' tiles
if HAS_TRITON:
    import site_pictures

ROOT = Path(__file__).parents[1]
#: files outside docs/, and the pages made of them
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "flash_train/attention/kernels/README.md": "kernel_sources.md",
    "tests/README.md": "tests.md",
}
#: pages of the Python interface, and the modules whose public names they show; a name is shown once on a page
MODULES = {
    "attention": [
        "flash_train.attention", "flash_train.attention.masks", "flash_train.attention.patterns",
        "flash_train.attention.parallel",
    ],
    "nn": ["flash_train.nn"],
    "training": ["flash_train.training", "flash_train.training.callbacks"],
    "model": ["flash_train.model", "flash_train.model.generate", "flash_train.model.fp8"],
    "data": ["flash_train.data"],
    "optim": ["flash_train.optim"],
    "distributed": ["flash_train.distributed.strategy", "flash_train.distributed.dims"],
    "integrations": [
        "flash_train.integrations.transformers", "flash_train.integrations.causal_lm",
        "flash_train.integrations.pytorch", "flash_train.integrations.flash_attn",
        "flash_train.integrations.flash_attn.bert_padding", "flash_train.integrations.hub_kernel",
    ],
}  # fmt: skip
#: modules whose docstring alone is shown, at the end of a page: it describes arguments that functions share
DOCSTRINGS = {"attention": ["flash_train.attention.flash_attn.api"]}
#: type, default and meaning of the keys of `profile_memory.py find_max=true`, which the schema does not have
FIND_MAX = {
    "find_max": ("true or false", "false", "search for the longest row that trains, instead of recording a step"),
    "find_max.limit": (
        "integer", find_max_options.LIMIT,
        f"tokens of the longest row to try, a multiple of {find_max_options.UNIT}; without CUDA the default is "
        f"{find_max_options.LIMIT_OFF_CUDA}",
    ),
    "find_max.memory": (
        "list[text]", f"[{','.join(find_max_options.MODES)}]",
        f"the memory modes to try, of {', '.join(find_max_options.MEMORY)}",
    ),
    "find_max.attention": (
        "list[text]", f"[{','.join(find_max_options.ATTENTION)}]",
        f"the attention backends to try; without CUDA the default is [{','.join(find_max_options.ATTENTION_OFF_CUDA)}]",
    ),
}  # fmt: skip
#: the titles of these pages where the name is not enough
TITLES = {
    "nn": "Modules", "optim": "Optimizer", "distributed": "Several devices",
}  # fmt: skip
CLI = ROOT / "flash_train" / "cli"
#: the commands that come first on their page
COMMANDS = ["train", "profile_memory", "ablate", "export"]
NAMES = {"None": "null", "True": "true", "False": "false", "???": "none: the choice gives it"}
TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "None": "null", "Any": "any"}
COLUMNS = 84  # of a block of code on a page
PICTURES = "assets/pictures"  # where the site has the pictures of site_pictures.py
PICTURE = re.compile(r"^<!-- picture:(\w+) -->$", re.MULTILINE)
#: inline code; blocks have attributes or further tags
INLINE_CODE = re.compile(r"<code>([^<]*)</code>")
LONG_CODE = 40  # characters: as many fit a line of a narrow page
BREAKS = re.compile(r"[/.,]")
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of other files."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in OUTSIDE.items()}
    made["license.md"] = f"# License\n\n```text\n{made['license.md']}```\n"
    made["reference/configuration.md"] = configuration_page()
    made["reference/commands.md"] = commands_page()
    made["reference/run.md"] = run_page()
    made |= {f"reference/{name}.md": interface_page(name, modules) for name, modules in MODULES.items()}
    if HAS_TRITON:
        made |= {f"{PICTURES}/{name}": text for name, text in site_pictures.pictures().items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put pictures where their marks are, and turn links between files of the repository into links between pages."""
    sources = {made: source for source, made in OUTSIDE.items()}
    at = page.file.src_uri
    folder = (ROOT / sources.get(at, f"docs/{at}")).parent

    def replaced(link: re.Match) -> str:
        target = link[2]
        if "://" in target:
            return link[0]
        file = (folder / target).resolve()
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else target
        to = OUTSIDE.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if to is None or "/" in at:
            return link[0]
        return f"{link[1]}{to}{link[3] or ''})"

    return PICTURE.sub(picture, LINK.sub(replaced, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Mark inline code that is too long for a narrow line, and let it break after its separators."""

    def marked(code: re.Match) -> str:
        if len(unescape(code[1])) <= LONG_CODE:
            return code[0]
        breakable = BREAKS.sub(r"\g<0><wbr>", code[1])
        return f'<code class="long">{breakable}</code>'

    return INLINE_CODE.sub(marked, html)


def picture(mark: re.Match) -> str:
    """A picture with its caption, which is also what a screen reader says; nothing where Triton does not exist."""
    if not HAS_TRITON:
        return ""
    name = f"{mark[1]}.svg"
    caption = site_pictures.CAPTIONS[name]
    return f"![{caption}]({PICTURES}/{name})\n\n*{caption}*"


def interface_page(name: str, modules: list[str]) -> str:
    """A page with the public names of modules, for mkdocstrings."""
    text = [f"# {TITLES.get(name, name.capitalize())}", ""]
    shown: set[str] = set()
    for module in modules:
        text.append(f"::: {module}")
        names = exported_names(module)
        if shown & set(names):
            text += ["    options:", f"      members: [{', '.join(name for name in names if name not in shown)}]"]
        shown.update(names)
        text.append("")
        for function in names:  # a module of the same name hides it
            inner = f"{module}.{function}"
            if (ROOT / inner.replace(".", "/")).with_suffix(".py").is_file() and inner not in modules:
                text += [f"::: {inner}.{function}", "    options:", "      heading_level: 3", ""]
    for module in DOCSTRINGS.get(name, ()):
        text += [f"::: {module}", "    options:", "      members: []", ""]
    return "\n".join(text)


def exported_names(module: str) -> list[str]:
    """The names in `__all__`; none if the module has no such list."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def configuration_page() -> str:
    """Every key of the configuration: type, default, allowed values and what it means."""
    text = [
        "# Every key of the configuration",
        "",
        "`python scripts/train.py key=value` sets a key; [Configuration](../configuration.md) explains how.",
        "Where `null` is the default, the meaning says what it stands for; else it is nothing.",
        "",
    ]
    for title, keys in groups_of_keys():
        text += [f"## {title}", "", "| key | values | default | meaning |", "| --- | --- | --- | --- |"]
        for key, kind, default, words in keys:
            cells = (f"`{key}`", values_of(key, kind), f"`{default}`", words.replace(" | ", ", "))
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def values_of(key: str, kind: str) -> str:
    """The type of a key's values, and which of them are allowed."""
    allowed = RULES[key].words if key in RULES else ""
    if allowed.startswith("one of "):  # the values say what type they have
        return allowed + (" or null" if "null" in kind and "null" not in allowed else "")
    return f"{kind}, {allowed}" if allowed else kind


def commands_page() -> str:
    """Every command with its help."""
    names = [path.stem for path in sorted((ROOT / "scripts").glob("*.py")) if (CLI / path.name).is_file()]
    names.sort(key=lambda name: (COMMANDS.index(name) if name in COMMANDS else len(COMMANDS), name))
    installed = {target.split(":")[0].rpartition(".")[2]: name for name, target in installed_commands().items()}
    with ThreadPoolExecutor(2) as pool:
        helps = pool.map(help_of, names)
    text = [
        "# Every command",
        "",
        "Commands with a second name are installed with the package. All have the",
        "[exit statuses](../configuration.md#mistakes) of `train.py`: 0 if all went well, else 1, 3, 4 or 128 and a",
        "signal's number.",
        "",
    ]
    for name, words in zip(names, helps, strict=True):
        second = f", `{installed[name]}`" if name in installed else ""
        text += [f"## {name}", "", f"`python scripts/{name}.py`{second}", "", "```text", words, "```", ""]
    return "\n".join(text)


def help_of(name: str) -> str:
    """What a command prints with --help; without the composed configuration, which has a page of its own."""
    command = [sys.executable, "-m", f"flash_train.cli.{name}", "--help"]
    environment = os.environ | {"COLUMNS": str(COLUMNS)}
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout
    printed = printed.partition("\nThe configuration that these arguments make")[0].rstrip()
    return "\n\n".join(map(wrapped, printed.split("\n\n")))


def wrapped(block: str) -> str:
    """A paragraph in lines that fit the page; lists and examples, which have indented lines, stay as they are."""
    lines = block.split("\n")
    if any(line.startswith(" ") for line in lines) or max(map(len, lines)) <= COLUMNS:
        return block
    return textwrap.fill(" ".join(lines), COLUMNS, break_long_words=False, break_on_hyphens=False)


def installed_commands() -> dict[str, str]:
    """The names of installed commands, and the functions that they run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["scripts"]


def run_page() -> str:
    """Every file of a run, every metric, and every entry of the summary."""
    text = [
        "# Files and metrics of a run",
        "",
        "[Train](../train.md#the-files-of-a-run) says where they are.",
        "",
    ]
    for title, first, entries in (
        ("Files", "file", run_files.FILES),
        ("Metrics", "metric", run_files.METRICS),
        ("Summary", "entry of summary.json", run_files.SUMMARY),
    ):
        text += [f"## {title}", "", f"| {first} | meaning |", "| --- | --- |"]
        text += [f"| `{name}` | {words} |" for name, words in entries.items()] + [""]
    return "\n".join(text)


Key = tuple[str, str, Any, str]


def groups_of_keys() -> Iterator[tuple[str, list[Key]]]:
    """Yield the keys of the run itself, then the keys of each group and of each kind of data and logger."""
    yield "Run", [key for key in keys_of(schema.TrainSchema, "") if "." not in key[0]]
    for entry in fields(schema.TrainSchema):
        if is_dataclass(entry.type):
            yield entry.name, list(keys_of(entry.type, f"{entry.name}."))
    common = {key for key, *_ in keys_of(schema.DataSchema, "data.")}
    for kind in schema.DATA_SCHEMAS:
        own = [key for key in keys_of(kind, "data.") if key[0] not in common]
        if own:
            yield f"data={kind.corpus}", own
    yield "logger=wandb", [key for key in keys_of(schema.WandbSchema, "logger.") if key[0] != "logger.name"]
    yield "Ablations: sweep", list(keys_of(schema.SweepSchema, "sweep."))
    yield "The longest row: find_max", [(key, *FIND_MAX[key]) for key in find_max_options.KEYS]


def keys_of(kind: type, prefix: str) -> Iterator[Key]:
    """Yield the keys of a part of the schema: dotted name, type, default, and the comment next to it."""
    comments = {name: words for each in reversed(kind.__mro__[:-1]) for name, words in schema_comments(each).items()}
    for entry in fields(kind):
        key = f"{prefix}{entry.name}"
        if is_dataclass(entry.type):
            yield from keys_of(entry.type, f"{key}.")
            continue
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        shown = NAMES.get(str(default), default)
        name = entry.type.__name__ if isinstance(entry.type, type) else str(entry.type)
        name = re.sub(r"\w+", lambda word: TYPES.get(word[0], word[0]), name.replace(" | ", " or "))
        words = comments.get(entry.name) or file_comments().get(key, "")
        yield key, name, shown, "" if " | " in words and ";" not in words else words  # `allowed` has the choices


def schema_comments(kind: type) -> dict[str, str]:
    """The comments next to the fields of a dataclass, by field."""
    lines = inspect.getsource(kind).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, comment, words = lines[node.end_lineno - 1].partition("  # ")
            if comment:
                found[node.target.id] = words
    return found


def file_comments() -> dict[str, str]:
    """The comments next to the keys in conf/, by dotted key."""
    found: dict[str, str] = {}
    for file in [ROOT / "conf" / "train.yaml", *sorted((ROOT / "conf").glob("*/*.yaml"))]:
        path: list[tuple[int, str]] = []
        prefix = "" if file.parent.name == "conf" else f"{file.parent.name}."
        for line in file.read_text(encoding="utf-8").splitlines():
            match = re.match(r"( *)(\w+):(.*?)(?:\s# (.*))?$", line)
            if match:
                indent = len(match[1])
                path = [(at, name) for at, name in path if at < indent] + [(indent, match[2])]
                if match[4]:
                    found.setdefault(prefix + ".".join(name for _, name in path), match[4])
    return found
