"""Corpora for tests: random texts, and files of rows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flash_train.data import Document
from flash_train.data.corpora.corpus import hash_strings


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


@dataclass
class StreamedList(ListCorpus):
    """Streams texts; records which were read, and from which positions."""

    read: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    streaming = True

    def stream(self, position=None):
        self.opened.append(position["next"] if position else 0)
        return ListStream(self, self.opened[-1])


class ListStream:
    def __init__(self, corpus: StreamedList, at: int) -> None:
        self.corpus, self.at = corpus, at

    def __iter__(self):
        while self.at < len(self.corpus.texts):
            self.at += 1
            self.corpus.read.append(self.at - 1)
            text = self.corpus.texts[self.at - 1]
            yield Document(key=text.hex(), source=f"text {self.at - 1}", text=text)

    def position(self):
        return {"next": self.at}


def random_texts(n: int, longest: int, seed: int = 0) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(int(length)) for length in random.integers(1, longest, size=n)]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(path)
    return path
