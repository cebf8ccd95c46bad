"""The pages of the site that are made of other files say something about every key, and lead somewhere."""

import re

import pytest
import yaml
from omegaconf import OmegaConf

from flash_train.cli.config.errors import OutOfMemoryError, UnavailableError, UsageError
from tests.support.processes import ROOT
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def site_pages():
    return load_script("site_pages")


def test_every_key_is_described(site_pages):
    from flash_train.cli.config.choices import dotted_names
    from flash_train.cli.config.compose import compose_config
    from flash_train.cli.config.validate import RULES

    described = {key: words for _, keys in site_pages.groups_of_keys() for key, _, _, words in keys}
    assert not [key for key, words in described.items() if not words]
    composed = set(dotted_names(OmegaConf.to_container(compose_config(["hardware=cpu"]))))
    values = {name for name in composed if not any(other.startswith(f"{name}.") for other in composed)}
    assert not (values | set(RULES)) - set(described)
    page = site_pages.configuration_page()
    assert "| `model.n_layers` | integer or null, in [1, 1000] | `null` | transformer blocks |" in page
    assert "| `trainer.devices` | integer, in [1, 1024] | `1` | devices on each node |" in page
    assert "| `find_max` | true or false | `false` |" in page and "| `find_max.attention` |" in page


def test_a_name_is_shown_once_on_a_page(site_pages):
    page = site_pages.interface_page("attention", ["flash_train.attention", "flash_train.attention.masks"])
    members, none = re.findall(r"members: \[(.*)\]", page)
    assert "MAP_BLOCK" in members and "Causal" not in members
    assert none == "" and "::: flash_train.attention.flash_attn.api" in page  # arguments that functions share
    assert "::: flash_train.attention.merge.merge\n" in page  # its module hides it
    assert "options" not in site_pages.interface_page("model", site_pages.MODULES["model"])


def test_long_inline_code_may_break(site_pages):
    path = "flash_train/attention/parallel/method_choice.py"
    html = f"<p><code>{path}</code> <code>{path[:40]}</code></p><pre><code class='x'>{path}</code></pre>"
    breakable = "flash_train/<wbr>attention/<wbr>parallel/<wbr>method_choice.<wbr>py"
    marked = f'<code class="long">{breakable}</code>'
    assert site_pages.on_page_content(html) == html.replace(f"<code>{path}</code>", marked)
    short = "<code>" + "&lt;" * 40 + "</code>"
    assert site_pages.on_page_content(short) == short


def test_a_comment_describes_a_name(tmp_path):
    griffe = pytest.importorskip("griffe", reason="the extra [docs] is not installed")
    comments = load_script("site_comments")
    (tmp_path / "example.py").write_text(
        "#: how it is\n#: stored\nFIRST = (\n    1,\n)\nSECOND = 2  # bytes\nTHIRD = 3  #: of each\nFOURTH = 4\n"
        "#: no name follows\n\nFIFTH = 5\nSIXTH = 6\n'''a docstring'''\n",
        encoding="utf-8",
    )
    extensions = griffe.Extensions(comments.Comments())
    module = griffe.load("example", search_paths=[tmp_path], extensions=extensions)
    found = {name: member.docstring and member.docstring.value for name, member in module.members.items()}
    assert found == {
        "FIRST": "How it is stored", "SECOND": "Bytes", "THIRD": "Of each", "FOURTH": None, "FIFTH": None,
        "SIXTH": "a docstring",
    }  # fmt: skip


def test_every_command_is_described(site_pages, monkeypatch):
    monkeypatch.setattr(site_pages, "help_of", lambda name: f"help of {name}")
    page = site_pages.commands_page()
    commands = [path.stem for path in (ROOT / "flash_train" / "cli").glob("*.py") if path.stem != "__init__"]
    assert len(commands) == 12 and all(f"\n## {name}\n" in page for name in commands)
    assert "`python scripts/profile_memory.py`, `flash-train-memory`" in page
    statuses = {int(number) for number in re.findall(r"^\| (\d+) \|", configuration(), re.MULTILINE)}
    assert statuses == {0, UsageError.status, UnavailableError.status, OutOfMemoryError.status}


def test_the_help_of_a_command(site_pages):
    printed = site_pages.help_of("train")
    assert printed.startswith("Train a decoder-only") and "\nGroups (" in printed
    assert "val_every: null" not in printed
    assert max(map(len, site_pages.help_of("bench_start").splitlines())) <= site_pages.COLUMNS
    block = "words " * 20
    assert site_pages.wrapped(f"{block}\n  an example {block}") == f"{block}\n  an example {block}"


def configuration():
    return (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_every_picture_is_on_a_page(site_pages):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    marks = [name for path in (ROOT / "docs").glob("*.md") for name in site_pages.PICTURE.findall(path.read_text())]
    assert {f"{name}.svg" for name in marks} == set(site_pages.site_pictures.pictures())
    shown = site_pages.PICTURE.sub(site_pages.picture, "<!-- picture:packing -->")
    assert shown.startswith("![Documents of different lengths") and "(assets/pictures/packing.svg)" in shown


def test_the_navigation_has_every_page(site_pages):
    def pages(entries):
        for entry in entries:
            (value,) = entry.values()
            yield from pages(value) if isinstance(value, list) else [value]

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = list(pages(yaml.safe_load(text)["nav"]))
    made = {*site_pages.OUTSIDE.values(), *(f"reference/{name}.md" for name in ("configuration", "commands", "run"))}
    made |= {f"reference/{name}.md" for name in site_pages.MODULES}
    assert sorted(named) == sorted(made | {path.name for path in (ROOT / "docs").glob("*.md")})


@pytest.mark.parametrize(
    ("at", "link", "to"),
    [
        ("index.md", "[a](docs/train.md#files)", "[a](train.md#files)"),
        ("kernels.md", "[a](../flash_train/attention/kernels/README.md)", "[a](kernel_sources.md)"),
        ("train.md", "[a](../CONTRIBUTING.md) [b](memory.md)", "[a](contributing.md) [b](memory.md)"),
        ("train.md", "[a](https://a.b/c.md)", "[a](https://a.b/c.md)"),
    ],
)
def test_links_between_files_lead_to_pages(site_pages, at, link, to):
    class Page:
        class file:
            src_uri = at

    assert site_pages.on_page_markdown(link, Page) == to
