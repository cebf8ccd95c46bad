"""Tokenised documents as a memory-mapped cache, so that a corpus may be larger than memory.

A cache is a folder ``<corpus>-<key>`` with

    tokens.bin    the tokens of all documents after one another, uint16 or uint32
    offsets.npy   int64 (documents + 1,): document i is tokens[offsets[i]:offsets[i + 1]]
    sizes.npy     int64 (documents,): bytes of text of each document
    keys.npy      uint64 (documents,): hash of each document's identity, which decides its part
    meta.json     what the cache is, and a hash of each .npy file: written last, so a cache without it is not one

The key covers the corpus's content, the tokenizer and VERSION. One process builds a cache, others that need the same
wait for it. It is built in a scratch folder beside its place and renamed: a reader sees a whole one or none, and where
files cannot be locked, processes that build the same at once do not disturb each other.
"""

import errno
import glob
import hashlib
import json
import os
import platform
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flash_train.data.corpus import Corpus, Document, hash_file, hash_strings
from flash_train.data.lock import exclusive
from flash_train.data.notice import say, say_if_slow
from flash_train.data.tokenizer import Tokenizer

VERSION = "1"
INDICES = ("offsets.npy", "sizes.npy", "keys.npy")
BATCH_DOCUMENTS, BATCH_BYTES = 256, 4 << 20  # encoded at once: enough for the tokenizer's threads, small in memory


def default_cache_dir() -> Path:
    """``~/.cache/flash_train``. Raises OSError where no home folder is known."""
    try:
        return Path.home() / ".cache" / "flash_train"
    except RuntimeError as error:
        raise OSError(
            "data.cache_dir=null: tokens are kept in the home folder, and none is known (HOME is not set); "
            "allowed: data.cache_dir=FOLDER"
        ) from error


@dataclass(frozen=True)
class TokenCache:
    """A built cache. Its arrays are mapped on first use in each process, read-only: processes of one machine share the
    memory. They are not pickled.
    """

    folder: Path
    corpus_hash: str
    dtype: np.dtype

    @cached_property
    def tokens(self) -> np.ndarray:
        """All tokens: (tokens,) uint16 or uint32."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where documents begin and end: (documents + 1,) int64."""
        return np.load(self.folder / "offsets.npy", mmap_mode="r")

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of text of each document: (documents,) int64."""
        return np.load(self.folder / "sizes.npy", mmap_mode="r")

    @cached_property
    def keys(self) -> np.ndarray:
        """Hash of each document's identity: (documents,) uint64."""
        return np.load(self.folder / "keys.npy", mmap_mode="r")

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What `meta.json` says."""
        return json.loads((self.folder / "meta.json").read_text())

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "corpus_hash": self.corpus_hash, "dtype": self.dtype}

    def is_whole(self) -> bool:
        """Whether every file is there as it was written.

        The indices are hashed. Tokens are only counted, since reading them takes a second or more per GB at every
        start: that finds files cut off or copied in part, not bytes that changed in place.
        """
        try:
            hashes = json.loads((self.folder / "meta.json").read_text())["hashes"]
            if any(hashes[name] != hash_file(self.folder / name).hex() for name in INDICES):
                return False
            tokens = int(np.load(self.folder / "offsets.npy", mmap_mode="r")[-1])
            return (self.folder / "tokens.bin").stat().st_size == tokens * self.dtype.itemsize
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False


def tokenize(corpus: Corpus, tokenizer: Tokenizer, cache_dir: str | Path | None = None) -> TokenCache:
    """Opens the cache of `corpus` under `tokenizer`, building it first where it is missing or damaged.

    Waits for a process that is building it. Raises ValueError if the corpus has no text, OSError where it cannot write.
    """
    with say_if_slow(f"hashing the corpus {corpus.name!r}, by which its tokens are found"):
        corpus_hash = corpus.fingerprint()
    key = hash_strings([VERSION, corpus_hash, tokenizer.fingerprint])
    folder = Path(cache_dir or default_cache_dir()).expanduser() / f"{corpus.name}-{key}"
    cache = TokenCache(folder, corpus_hash, tokenizer.dtype)

    def write(scratch: Path) -> None:
        write_tokens(scratch, corpus.documents(), tokenizer)
        if len(np.load(scratch / "sizes.npy", mmap_mode="r")) == 0:
            raise ValueError(f"the corpus {corpus.name!r} is empty: it has no document with any text in it")
        write_meta(scratch, {"corpus": corpus.name, "tokenizer": tokenizer.fingerprint})

    build_if_missing(cache, write)
    return cache


def build_if_missing(cache: TokenCache, write: Callable[[Path], None]) -> None:
    """Builds a cache that is missing or damaged by `write`, which fills a folder; waits for a process that builds it.

    Raises what `write` raises; OSError where the folder is full or cannot be written.
    """
    folder = cache.folder
    with _naming_the_place(folder):
        if cache.is_whole():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that tokenises into {folder}"
        with exclusive(folder.with_name(f".{folder.name}.lock"), waiting) as is_alone:
            if not cache.is_whole():  # by now another process may have built it
                if is_alone:
                    _make_room(folder)
                with say_if_slow(f"tokenising into {folder}"):
                    _build(cache, write)


@contextmanager
def _naming_the_place(folder: Path) -> Iterator[None]:
    """An OSError about a cache, its scratch folder, its lock or a folder above names `data.cache_dir`.

    Others pass unchanged: those about the corpus, which is read meanwhile.
    """
    try:
        yield
    except OSError as error:
        about = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        place = folder.parent
        own = about is not None and any(name.lstrip(".").startswith(folder.name) for name in about.parts)
        if about is None or not (own or place.is_relative_to(about)):
            raise
        raise type(error)(
            f"data.cache_dir={place}: tokens can't be kept there ({error.strerror}: {about}); "
            "allowed: a folder to write in"
        ) from error


def _build(cache: TokenCache, write: Callable[[Path], None]) -> None:
    """Writes a cache in a scratch folder and moves it into its place."""
    scratch = _scratch(cache.folder)
    scratch.mkdir()
    try:
        write(scratch)
        _move_into_place(scratch, cache)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{os.strerror(error.errno)} while tokenising into {cache.folder}"
        raise OSError(f"{reason}; data.cache_dir= names another place") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_tokens(folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, enough: int | None = None) -> bool:
    """Writes the tokens and indices of `documents` into `folder`; whether it came to their end.

    It stops after the batch of documents that brings the tokens to `enough`, and has taken none after it.
    """
    offsets, sizes, keys = array("q", [0]), array("q"), array("Q")
    is_end, skipped = True, 0
    with open(folder / "tokens.bin", "wb") as file:
        for batch in _batches(document for document in documents if document.text):
            encoded = tokenizer.encode_documents([d.text for d in batch], [d.source for d in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                if tokens is not None:
                    file.write(tokens.data)
                    offsets.append(offsets[-1] + len(tokens))
                    sizes.append(len(document.text))
                    keys.append(_key_hash(document.key))
                else:
                    skipped += 1
            if enough is not None and offsets[-1] >= enough:
                is_end = False
                break
        file.flush()
        os.fsync(file.fileno())  # or a crash of the machine might leave a file of the right size without its content
    if skipped:
        say(f"data.errors=skip: documents that are not UTF-8, left out: {skipped:,}")
    for name, index in zip(INDICES, (offsets, sizes, keys), strict=True):
        np.save(folder / name, np.asarray(index))  # int64 or uint64, as the array is; not copied
    return is_end


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes what a cache is, with a hash of each index: the last of its files."""
    hashes = {name: hash_file(folder / name).hex() for name in INDICES}
    (folder / "meta.json").write_text(json.dumps({"version": VERSION, **meta, "hashes": hashes}, indent=2))


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


def _move_into_place(scratch: Path, cache: TokenCache) -> None:
    """Renames `scratch` to the cache's folder, unless another process has put a whole cache there meanwhile."""
    while True:
        try:
            os.rename(scratch, cache.folder)
            return
        except OSError:
            if not cache.folder.exists():
                raise
        if cache.is_whole():
            return
        _remove(cache.folder)


def _make_room(folder: Path) -> None:
    """Removes a damaged cache, and what builders that were killed have left; only for who builds alone.

    What another host has left stays: its locks may not reach this one, and it may be building.
    """
    for left in folder.parent.glob(glob.escape(_scratch_prefix(folder)) + "*"):
        shutil.rmtree(left, ignore_errors=True)
    if folder.exists():
        _remove(folder)


def _remove(folder: Path) -> None:
    """Removes a damaged cache; it is out of the way in one move, so that a whole one can take its place at once."""
    aside = _scratch(folder)
    with suppress(FileNotFoundError):  # another process moved it first
        os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _scratch(folder: Path) -> Path:
    """A new name beside `folder`, for what is not a cache yet or no longer."""
    return folder.with_name(_scratch_prefix(folder) + secrets.token_hex(4))


def _scratch_prefix(folder: Path) -> str:
    return f".{folder.name}.{platform.node()}."


def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
