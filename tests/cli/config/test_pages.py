"""Error messages name a page that exists."""

import re

import pytest

from flash_train.cli.config.errors import OutOfMemoryError, UsageError, fail
from flash_train.cli.config.pages import PAGES, page_of
from flash_train.cli.config.validate import RULES
from tests.support.pages import ROOT


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted({page for _, page in PAGES}))
def test_the_pages_exist(page):
    file, _, anchor = page.partition("#")
    assert not anchor or anchor in anchors(file)


@pytest.mark.parametrize(
    ("message", "page"),
    [
        ("parallel.shard=3: must divide 8", "docs/several_gpus.md"),
        ("model.width must be a multiple of 8", "docs/models.md"),
        ("seq_len=1: must be at least 2", "docs/configuration.md"),
        ("trainer.cuda_graph=true: there is no NVIDIA GPU; allowed: auto or false", "docs/train.md#cuda-graphs"),
        ("stopped", None),
        ("folder=model: has a model already; allowed: --force to replace it", None),
    ],
)
def test_the_page_of_a_message(message, page):
    assert page_of(message) == page


def test_every_group_has_a_page():
    groups = {key.partition(".")[0] for key in RULES if "." in key}
    assert not [group for group in groups if group != "trainer" and not any(s.startswith(group) for s, _ in PAGES)]


def test_a_mistake_ends_with_its_page(caplog):
    with pytest.raises(SystemExit) as ended:
        fail(UsageError("seq_len=1: must be\nat least 2"))
    assert ended.value.code == 1
    with pytest.raises(SystemExit):
        fail(OutOfMemoryError("seq_len=9: a step would take 2 GiB"))
    assert [record.getMessage() for record in caplog.records] == [
        "seq_len=1: must be at least 2 (see docs/configuration.md)",
        "seq_len=9: a step would take 2 GiB (see docs/memory.md)",
    ]
