"""Each record of docs/results has a source: a command that exists, and a page with its tables."""

import json
import re
from pathlib import Path

import pytest

from flash_train.profiling.sources import SOURCES, facts_of, index, source_line
from tests.support.pages import anchors_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def test_facts_come_from_an_entry_or_from_its_versions():
    own = {"gpu": "a card", "torch": "2.11.0+cu130", "triton": "3.6.0", "commit": "0123456789-dirty"}
    within = {"device": "a processor", "versions": {"torch": "2.12.0", "triton": None, "commit": "0123456"}}
    facts = facts_of([own, within, own])
    assert facts.cards == ("a card", "a processor") and facts.commits == ("0123456-dirty", "0123456")
    assert facts.versions == ["torch 2.11.0, 2.12.0", "triton 3.6.0"]
    line = source_line("start", [own])
    assert line.startswith(
        "Record: `docs/results/start.json`, a card, torch 2.11.0, triton 3.6.0, commit 0123456-dirty."
    )
    assert line.replace("\n", " ").endswith("Made by `scripts/measure.sh OUT start`. ")


def test_the_index_has_every_record_and_says_which_are_missing(tmp_path):
    (tmp_path / "start.json").write_text(json.dumps({"records": [{"gpu": "a card", "triton": "3.6.0"}]}))
    lines = index(tmp_path).splitlines()[2:]
    assert len(lines) == len(SOURCES)
    (start,) = (line for line in lines if line.startswith("| [`start`]("))
    assert "| a card | triton 3.6.0 |" in start
    assert sum("| not measured yet |" in line for line in lines) == len(SOURCES) - 1
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="other"):
        index(tmp_path)


@pytest.mark.parametrize("name", SOURCES)
def test_the_page_of_a_record_exists(name):
    page, _, section = SOURCES[name].page.partition("#")
    assert not section or section in anchors_of(ROOT / "docs" / page)
    if (RESULTS / f"{name}.json").is_file():
        assert f"<!-- results:{name}" in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_sources_have_every_part_of_measure():
    script = (ROOT / "scripts" / "measure.sh").read_text(encoding="utf-8")
    parts = set(re.findall(r"^    (\w+)\)", script, re.MULTILINE))
    assert parts - {"collect"} == {part for source in SOURCES.values() for part in source.parts}
    named = re.search(r"parts: ([\w ]+)\}", script)
    assert named and set(named[1].split()) == parts


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.commands])
def test_a_command_of_a_source_exists(name):
    for command in SOURCES[name].commands:
        for path in re.findall(r"scripts/\S+", command):
            assert (ROOT / path).is_file()
        for module in re.findall(r"-m (\S+)", command):
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
