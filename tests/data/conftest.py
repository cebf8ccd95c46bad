"""A small corpus whose documents are shorter than, as long as, and longer than a row."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flash_train.data import ByteTokenizer, Document, PackedDataModule
from flash_train.data.corpus import hash_strings


@dataclass
class ListCorpus:
    """Texts held in memory."""

    texts: list[bytes]
    name = "list"

    def fingerprint(self) -> str:
        return hash_strings([text.hex() for text in self.texts])

    def documents(self) -> Iterator[Document]:
        for i, text in enumerate(self.texts):
            yield Document(key=str(i), source=f"text {i}", text=text)


def random_texts(n: int, longest: int, seed: int = 0) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(int(length)) for length in random.integers(1, longest, size=n)]


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., PackedDataModule]:
    """PackedDataModule over 200 random documents of up to 150 bytes, rows of 64 tokens."""

    def make(texts: list[bytes] | None = None, **options) -> PackedDataModule:
        options = {"seq_len": 64, "batch_size": 3, "seed": 7, "val_fraction": 0.2, "cache_dir": tmp_path, **options}
        return PackedDataModule(ListCorpus(texts or random_texts(200, 150)), ByteTokenizer(), **options)

    return make
