"""A small corpus whose documents are shorter than, as long as, and longer than a row."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flash_train.data import ByteTokenizer, PackedDataModule
from tests.support.data.corpora import ListCorpus, random_texts


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., PackedDataModule]:
    """PackedDataModule over 200 random documents of up to 150 bytes, rows of 64 tokens."""

    def make(texts: list[bytes] | None = None, **options) -> PackedDataModule:
        options = {"seq_len": 64, "batch_size": 3, "seed": 7, "val_fraction": 0.2, "cache_dir": tmp_path, **options}
        return PackedDataModule(ListCorpus(texts or random_texts(200, 150)), ByteTokenizer(), **options)

    return make
