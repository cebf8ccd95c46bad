"""Error messages name a page that exists."""

import re

import pytest
from omegaconf import OmegaConf

from flash_train.cli.config.choices import dotted_names
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import OutOfMemoryError, UsageError, fail
from flash_train.cli.config.pages import OUT_OF_MEMORY, PAGES, page_of
from tests.support.pages import ROOT


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted({OUT_OF_MEMORY, *(page for _, page in PAGES)}))
def test_the_pages_exist(page):
    file, _, anchor = page.partition("#")
    assert not anchor or anchor in anchors(file)


@pytest.mark.parametrize(
    ("message", "page"),
    [
        ("parallel.shard=3: must divide 8", "docs/several_gpus.md"),
        ("model.width must be a multiple of 8", "docs/train.md#model-sizes"),
        ("model.rope_scaling.kind is missing", "docs/models.md#start-from-a-model"),
        ("seq_len=1: must be at least 2", "docs/choosing.md#batch-size-and-accumulation"),
        ("find_max.limit=1: must be more", "docs/memory.md#the-longest-row-that-trains"),
        ("trainer.keep_checkpoints=0: must be at least 1", "docs/resume.md#checkpoints"),
        ("trainer.deterministic: needs true or false", "docs/resume.md"),
        ("trainer.accelerator=tpu: must be cpu", "docs/train.md#hardware"),
        ("stop_after=0: must be at least 1", "docs/resume.md"),
        ("validate_only=3: needs true or false", "docs/resume.md#validate-only"),
        ("val_every=0: must be at least 1", "docs/train.md#what-to-measure-on-request"),
        ("force=3: needs true or false", "docs/memory.md#before-a-run"),
        ("trainer.progress_bar: needs true or false", "docs/configuration.md"),
        ("trainer.cuda_graph=true: there is no NVIDIA GPU; allowed: auto or false", "docs/train.md#cuda-graphs"),
        ("stopped", None),
        ("runs/a/precision=fp32/cell.json: another command made what is there", None),
        ("cells/seed=0,precision=fp32: another command made what is there", None),
        ("argument --info/-i: invalid choice: 'hardware=cpu' (choose from 'all')", None),
        ("run 1 (seed=1): precision=fp8: needs a GPU", "docs/train.md#precision-and-optimizer"),
        ("folder=model: has a model already; allowed: --force to replace it", None),
    ],
)
def test_the_page_of_a_message(message, page):
    assert page_of(message) == page


def test_every_key_has_a_page():
    keys = dotted_names(OmegaConf.to_container(compose_config(["hardware=cpu"])))
    assert [key for key in keys if page_of(f"{key}=1: must be more") is None] == []


def test_a_mistake_ends_with_its_page(caplog):
    with pytest.raises(SystemExit) as ended:
        fail(UsageError("seq_len=1: must be\nat least 2"))
    assert ended.value.code == 1
    with pytest.raises(SystemExit):
        fail(OutOfMemoryError("seq_len=9: a step would take 2 GiB"))
    assert [record.getMessage() for record in caplog.records] == [
        "seq_len=1: must be at least 2 (see docs/choosing.md#batch-size-and-accumulation)",
        f"seq_len=9: a step would take 2 GiB (see docs/{OUT_OF_MEMORY})",
    ]
