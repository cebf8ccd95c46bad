"""Tokenised documents as a memory-mapped cache, so that a corpus may be larger than memory.

A cache is a folder ``<corpus>-<key>`` with

    tokens.bin    the tokens of all documents after one another, uint16 or uint32
    offsets.npy   int64 (documents + 1,): document i is tokens[offsets[i]:offsets[i + 1]]
    sizes.npy     int64 (documents,): bytes of text of each document
    keys.npy      uint64 (documents,): hash of each document's identity, which decides its part
    meta.json     what the cache is, and a hash of each file: written last, so a cache without it is not one

The key covers the corpus's content, the tokenizer and VERSION. A cache is built in a temporary folder beside its place
and renamed: a reader sees a whole one or none, and processes that build the same at once do not disturb each other.
"""

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from flash_train.data.corpus import Corpus, Document, hash_file, hash_strings
from flash_train.data.tokenizer import Tokenizer

VERSION = "1"
DATA_FILES = ("tokens.bin", "offsets.npy", "sizes.npy", "keys.npy")
BATCH_DOCUMENTS, BATCH_BYTES = 256, 4 << 20  # encoded at once: enough for the tokenizer's threads, small in memory


def default_cache_dir() -> Path:
    """``~/.cache/flash_train``."""
    return Path.home() / ".cache" / "flash_train"


@dataclass(frozen=True)
class TokenCache:
    """A built cache. Its arrays are opened on first use in each process, and are not pickled."""

    folder: Path
    corpus_hash: str
    dtype: np.dtype

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, memory-mapped read-only: (tokens,) uint16 or uint32."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where documents begin and end: (documents + 1,) int64."""
        return np.load(self.folder / "offsets.npy")

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of text of each document: (documents,) int64."""
        return np.load(self.folder / "sizes.npy")

    @cached_property
    def keys(self) -> np.ndarray:
        """Hash of each document's identity: (documents,) uint64."""
        return np.load(self.folder / "keys.npy")

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "corpus_hash": self.corpus_hash, "dtype": self.dtype}


def tokenize(corpus: Corpus, tokenizer: Tokenizer, cache_dir: str | Path | None = None) -> TokenCache:
    """Opens the cache of `corpus` under `tokenizer`, building it first where it is missing or damaged.

    Raises ValueError if the corpus has no text.
    """
    corpus_hash = corpus.fingerprint()
    key = hash_strings([VERSION, corpus_hash, tokenizer.fingerprint])
    folder = Path(cache_dir or default_cache_dir()).expanduser() / f"{corpus.name}-{key}"
    cache = TokenCache(folder, corpus_hash, tokenizer.dtype)
    if not is_whole(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _build(building, corpus, tokenizer)
            _move_into_place(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return cache


def is_whole(folder: Path) -> bool:
    """Whether `folder` holds a cache with every file as it was written."""
    try:
        hashes = json.loads((folder / "meta.json").read_text())["hashes"]
        return all(hashes[name] == hash_file(folder / name).hex() for name in DATA_FILES)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    offsets, sizes, keys = array("q", [0]), array("q"), array("Q")
    with open(folder / "tokens.bin", "wb") as file:
        for batch in _batches(document for document in corpus.documents() if document.text):
            encoded = tokenizer.encode_documents([d.text for d in batch], [d.source for d in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                if tokens is not None:
                    file.write(tokens.data)
                    offsets.append(offsets[-1] + len(tokens))
                    sizes.append(len(document.text))
                    keys.append(_key_hash(document.key))
    if not sizes:
        raise ValueError(f"the corpus {corpus.name!r} is empty: it has no document with any text in it")
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    np.save(folder / "sizes.npy", np.array(sizes, dtype=np.int64))
    np.save(folder / "keys.npy", np.array(keys, dtype=np.uint64))
    hashes = {name: hash_file(folder / name).hex() for name in DATA_FILES}
    meta = {"version": VERSION, "corpus": corpus.name, "tokenizer": tokenizer.fingerprint, "hashes": hashes}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups bounded in number and, but for one large document, in bytes."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _move_into_place(building: Path, folder: Path) -> None:
    """Renames `building` to `folder`, unless another process has put a whole cache there meanwhile."""
    while True:
        try:
            os.rename(building, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if is_whole(folder):
            return
        with tempfile.TemporaryDirectory(prefix=".damaged.", dir=folder.parent, ignore_cleanup_errors=True) as aside:
            try:
                os.rename(folder, Path(aside) / "cache")
            except FileNotFoundError:
                continue  # another process moved it first


def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
