"""Tokenised documents as a memory-mapped cache, so that a corpus may be larger than memory.

A cache is a folder ``<corpus>-<key>`` with

    tokens.bin    the tokens of all documents, concatenated, uint16 or uint32
    offsets.npy   int64 (documents + 1,): document i is tokens[offsets[i]:offsets[i + 1]]
    sizes.npy     int64 (documents,): bytes of text of each document
    keys.npy      uint64 (documents,): hash of each document's identity, which decides its part
    meta.json     a description, and a hash of each .npy file; written last, so a cache without it is incomplete

The key covers the corpus's content, the tokenizer and VERSION. When several processes need the same cache, one builds
it and the others wait. It is built in a scratch folder in the same parent and then renamed, so readers see a whole
cache or none. On file systems without locks several processes may build the same cache at once without disturbing each
other. (`flash_train.files.whole_folder` does not fit: it assumes one writer per folder.)
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

from flash_train.checks import brief
from flash_train.data.corpora.corpus import Corpus, Document, hash_file, hash_strings
from flash_train.data.errors import empty_corpus
from flash_train.data.lock import exclusive
from flash_train.data.notice import say, say_if_slow
from flash_train.data.tokenizer import Tokenizer
from flash_train.files import write_json

VERSION = "1"
INDICES = ("offsets.npy", "sizes.npy", "keys.npy")
BATCH_DOCUMENTS, BATCH_BYTES = 256, 4 << 20  # encoded together: enough for the tokenizer's threads, small in memory


def default_cache_dir() -> Path:
    """Return ``~/.cache/flash_train``. Raises OSError if no home folder is known."""
    try:
        return Path.home() / ".cache" / "flash_train"
    except RuntimeError as error:
        raise OSError(
            "data.cache_dir=null: must be a folder, because no home folder is known (HOME is not set)"
        ) from error


@dataclass(frozen=True)
class TokenCache:
    """A built cache.

    Its arrays are memory-mapped on first use, read-only; processes on one machine share the memory. Arrays are not
    pickled.
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
        """The contents of `meta.json`."""
        return json.loads((self.folder / "meta.json").read_text())

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "corpus_hash": self.corpus_hash, "dtype": self.dtype}

    def is_whole(self) -> bool:
        """Whether every file is present and undamaged.

        The indices are hashed. Tokens are only counted, because reading them takes a second or more per GB at every
        start. Counting finds truncated or partly copied files, but not bytes that changed in place.
        """
        try:
            hashes = json.loads((self.folder / "meta.json").read_text())["hashes"]
            if any(hashes[name] != hash_file(self.folder / name).hex() for name in INDICES):
                return False
            tokens = int(np.load(self.folder / "offsets.npy", mmap_mode="r")[-1])
            return (self.folder / "tokens.bin").stat().st_size == tokens * np.dtype(self.dtype).itemsize
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False


def tokenize(corpus: Corpus, tokenizer: Tokenizer, cache_dir: str | Path | None = None) -> TokenCache:
    """Open the cache of `corpus` for `tokenizer`; build it first if it is missing or damaged.

    If another process is building it, wait for this process. Raises ValueError if the corpus has no text, OSError if
    the cache cannot be written.
    """
    with say_if_slow(f"hashing the corpus {corpus.name!r} to find its tokens in the cache"):
        corpus_hash = corpus.fingerprint()
    key = hash_strings([VERSION, corpus_hash, tokenizer.fingerprint])
    folder = Path(cache_dir or default_cache_dir()).expanduser() / f"{corpus.name}-{key}"
    cache = TokenCache(folder, corpus_hash, tokenizer.dtype)

    def write(scratch: Path) -> None:
        write_tokens(scratch, corpus.documents(), tokenizer)
        if len(np.load(scratch / "sizes.npy", mmap_mode="r")) == 0:
            raise empty_corpus(corpus)
        write_meta(scratch, {"corpus": corpus.name, "tokenizer": tokenizer.fingerprint})

    build_if_missing(cache, write)
    return cache


def build_if_missing(cache: TokenCache, write: Callable[[Path], None]) -> None:
    """Build a cache if it is missing or damaged: `write` fills the folder that it is given.

    If another process is building the cache, wait for this process. Raises the errors of `write`, and OSError if the
    folder is full or cannot be written.
    """
    folder = cache.folder
    with _name_cache_dir_in_errors(folder):
        if cache.is_whole():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that tokenises into {folder}"
        with exclusive(folder.with_name(f".{folder.name}.lock"), waiting) as is_locked:
            if not cache.is_whole():  # another process may have built it meanwhile
                if is_locked:
                    _remove_leftovers(folder)
                with say_if_slow(f"tokenising into {folder}"):
                    _build(cache, write)


@contextmanager
def _name_cache_dir_in_errors(folder: Path) -> Iterator[None]:
    """Add `data.cache_dir` to an OSError about a cache, its scratch folder, its lock or a parent folder.

    Other errors pass unchanged, for example those about the corpus, which is read in the same block.
    """
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        cache_dir = folder.parent
        in_cache = path is not None and any(name.lstrip(".").startswith(folder.name) for name in path.parts)
        if path is None or not (in_cache or cache_dir.is_relative_to(path)):
            raise
        raise type(error)(
            f"data.cache_dir={cache_dir}: must be a folder that can be written ({error.strerror}: {path})"
        ) from error


def _build(cache: TokenCache, write: Callable[[Path], None]) -> None:
    """Write a cache into a scratch folder, then rename the folder."""
    scratch = _scratch_path(cache.folder)
    scratch.mkdir()
    try:
        write(scratch)
        _move_into_place(scratch, cache)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{os.strerror(error.errno)} while tokenising into {cache.folder}"
        raise OSError(f"{reason}; give another folder by data.cache_dir=") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_tokens(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, min_tokens: int | None = None
) -> bool:
    """Write the tokens and indices of `documents` into `folder`; return whether all documents were written.

    With `min_tokens` it stops after the batch of documents that reaches this number of tokens, without reading the
    next one. Raises ValueError if the tokenizer returns something other than its ids.
    """
    offsets, sizes, keys = array("q", [0]), array("q"), array("Q")
    is_end, skipped = True, 0
    with open(folder / "tokens.bin", "wb") as file:
        for batch in _batches(document for document in documents if document.text):
            encoded = tokenizer.encode_documents([d.text for d in batch], [d.source for d in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                if tokens is not None:
                    ids = _as_stored(tokens, tokenizer, document.source)
                    file.write(ids.data)
                    offsets.append(offsets[-1] + len(ids))
                    sizes.append(len(document.text))
                    keys.append(_key_hash(document.key))
                else:
                    skipped += 1
            if min_tokens is not None and offsets[-1] >= min_tokens:
                is_end = False
                break
        file.flush()
        os.fsync(file.fileno())  # else a crash of the machine could leave a file with the right size and wrong content
    if skipped:
        say(f"data.errors=skip: documents that are not UTF-8, left out: {skipped:,}")
    for name, index in zip(INDICES, (offsets, sizes, keys), strict=True):
        _save_index(folder / name, np.asarray(index))  # int64 or uint64, as the array is; not copied
    return is_end


def _as_stored(tokens: Any, tokenizer: Tokenizer, source: str) -> np.ndarray:
    """Return a document's ids in the tokenizer's dtype, whatever integers the tokenizer returned: (tokens,).

    Raises ValueError unless they are one or more ids of the vocabulary.
    """
    ids = np.asarray(tokens)
    is_list = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
    if not is_list or ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        given = f"ids from {ids.min()} to {ids.max()}" if is_list else brief(tokens)
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__}: encode_documents gave {given} for {source}: "
            f"must be one or more integers from 0 to {tokenizer.vocab_size - 1}"
        )
    return np.ascontiguousarray(ids, dtype=tokenizer.dtype)


def _save_index(file: Path, index: np.ndarray) -> None:
    """Write an array as `np.save` does, whose error does not say that a disk is full."""
    with open(file, "wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(index))
        stream.write(index.data)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write `meta.json`, the cache's last file: the description `meta`, and a hash of each index."""
    hashes = {name: hash_file(folder / name).hex() for name in INDICES}
    write_json(folder / "meta.json", {"version": VERSION, **meta, "hashes": hashes})


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield groups of documents, limited in number and in bytes; a larger document is a group by itself."""
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
    """Rename `scratch` to the cache's folder, unless another process has built a whole cache there meanwhile."""
    while True:
        try:
            os.rename(scratch, cache.folder)
            return
        except OSError:
            if not cache.folder.exists():
                raise
        if cache.is_whole():
            return
        _remove_cache(cache.folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove a damaged cache, and the scratch folders of killed builders; call it only with the lock held.

    Scratch folders of other hosts stay: file locks may not reach across hosts, so those may still be in use.
    """
    for scratch in folder.parent.glob(glob.escape(_scratch_prefix(folder)) + "*"):
        shutil.rmtree(scratch, ignore_errors=True)
    if folder.exists():
        _remove_cache(folder)


def _remove_cache(folder: Path) -> None:
    """Remove a damaged cache. It is renamed first, so that a whole one can be put there at once."""
    renamed = _scratch_path(folder)
    with suppress(FileNotFoundError):  # another process renamed it first
        os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _scratch_path(folder: Path) -> Path:
    """Return a new hidden name next to `folder`."""
    return folder.with_name(_scratch_prefix(folder) + secrets.token_hex(4))


def _scratch_prefix(folder: Path) -> str:
    return f".{folder.name}.{platform.node()}."


def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
