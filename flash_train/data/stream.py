"""Rows of a corpus that is tokenised in chunks while the run trains.

A chunk consists of consecutive documents with at least `chunk_tokens` tokens together. It is split, packed and shuffled
by itself, and stored as its own token cache, so that several ranks, workers and runs share it. The previous chunk's
cache stores where a chunk begins; the checkpoint stores it for the current chunk. The rows depend only on the corpus,
the tokenizer and the settings: sample g of the stream is always the same row.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset

from flash_train.data.cache import (
    VERSION,
    TokenCache,
    build_if_missing,
    default_cache_dir,
    write_meta,
    write_tokens,
)
from flash_train.data.corpora.corpus import Document, hash_strings
from flash_train.data.dataset import PackedRows, Row
from flash_train.data.errors import DataError, empty_corpus
from flash_train.data.notice import say_if_slow
from flash_train.data.order.sampler import epoch_order
from flash_train.data.packing import PackedIndex, PackingStrategy, pack
from flash_train.data.split import split, train_part_after
from flash_train.data.tokenizer import Tokenizer
from flash_train.data.validation import validation_documents

# A chunk has 256 rows of tokens, or CHUNK_TOKENS if that is less, but at least 16 rows.
CHUNK_ROWS, CHUNK_TOKENS, MIN_CHUNK_ROWS = 256, 4 << 20, 16
KEPT_CHUNKS = 2  # packed chunks in memory: samples are read in order, and a batch may span two chunks


class DocumentStream(Protocol):
    """Documents in order, with the position of the next one."""

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents from the stream's position on."""

    def position(self) -> dict[str, Any]:
        """Return where to continue after the last document: plain values."""


class StreamingCorpus(Protocol):
    """A corpus that can be read from any position."""

    name: str

    def fingerprint(self) -> str:
        """Return a hash of the content (see `Corpus.fingerprint`)."""

    def stream(self, position: dict[str, Any] | None = None) -> DocumentStream:
        """Return the documents from `position` on; None is the beginning."""


@dataclass(frozen=True)
class ChunkStart:
    """Where a chunk begins: sample `first` of the stream is its first sample, in pass `epoch` over the corpus.

    `position` is the position of its first document in the corpus, after `documents` others; None is the beginning.
    """

    epoch: int
    chunk: int
    first: int
    documents: int
    position: dict[str, Any] | None


BEGINNING = ChunkStart(epoch=0, chunk=0, first=0, documents=0, position=None)


def tokens_of_chunk(seq_len: int) -> int:
    """Return the minimum number of tokens in a chunk, except the last one."""
    return min(CHUNK_ROWS * seq_len, max(CHUNK_TOKENS, MIN_CHUNK_ROWS * seq_len))


class StreamedRows(Dataset):
    """Training rows by (chunk, row), in the format of `PackedRows`; and the validation rows, from the first chunk.

    `val_fraction` of the first chunk's documents are for validation; their copies in later chunks are skipped. A row
    has at most `capacity` entries, twice as many as any row of the first chunk; a row with more is cut.
    """

    def __init__(
        self,
        corpus: StreamingCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        packing: PackingStrategy,
        val_fraction: float,
        val_tokens: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.seq_len, self.packing, self.val_fraction = seq_len, packing, val_fraction
        with say_if_slow(f"hashing the corpus {corpus.name!r} to find its tokens in the cache"):
            self.corpus_hash = corpus.fingerprint()
        self.chunk_tokens = tokens_of_chunk(seq_len)
        key = hash_strings([VERSION, "stream", self.corpus_hash, tokenizer.fingerprint, str(self.chunk_tokens)])
        self._folder = Path(cache_dir or default_cache_dir()).expanduser() / f"{corpus.name}-{key}"
        self._identity = hash_strings([key, str(seq_len), packing, str(val_fraction)])
        self._starts = {(BEGINNING.epoch, BEGINNING.chunk): BEGINNING}
        self._positions: dict[int, dict[str, Any] | None] = {0: None}  # by chunk, of its first document in the corpus
        self._open: tuple[int, DocumentStream, Iterator[Document]] | None = None  # the next chunk, and its documents
        self._packed: dict[int, PackedRows] = {}
        self._kept_chunks = KEPT_CHUNKS
        self._first = self._cache(0)
        train, self.held_out = split(self._first, val_fraction)
        val = validation_documents(self.held_out, val_tokens)
        self.first_index, val_index = pack(train.lengths, seq_len, packing), pack(val.lengths, seq_len)
        one_stream = self.first_index.one_stream
        self.capacity = max(self.first_index.capacity * (1 if one_stream else 2), val_index.capacity)
        self.first_part = train
        self.val = PackedRows(val, val_index, tokenizer.pad, self.capacity)

    def __getitem__(self, index: tuple[int, int]) -> Row:
        chunk, row = index
        return self.chunk(chunk)[row]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_packed": {}}

    def chunk(self, chunk: int) -> PackedRows:
        """Return the training rows of a chunk; tokenise it first if it is not in the cache."""
        if chunk not in self._packed:
            cache = self._cache(chunk)
            part = self.first_part if chunk == 0 else train_part_after(self._first, cache, self.val_fraction)
            index = limit_entries(pack(part.lengths, self.seq_len, self.packing), self.capacity)
            while len(self._packed) >= self._kept_chunks:
                del self._packed[next(iter(self._packed))]
            self._packed[chunk] = PackedRows(part, index, self.tokenizer.pad, self.capacity)
        return self._packed[chunk]

    def squared_lengths(self, indices: list[tuple[int, int]]) -> np.ndarray:
        """Return the sum of the squares of each row's entry lengths: int64 (indices,)."""
        return np.array([self.chunk(chunk).index.squared_lengths[row] for chunk, row in indices])

    def keep_chunks(self, rows: int) -> None:
        """Keep enough packed chunks in memory that `rows` consecutive rows can be read in any order."""
        self._kept_chunks = max(self._kept_chunks, KEPT_CHUNKS + rows * self.seq_len // self.chunk_tokens)

    def start_before(self, sample: int) -> ChunkStart:
        """Return the last known chunk start at or before a sample."""
        return self._starts_before(sample)[-1]

    def start_after(self, start: ChunkStart) -> ChunkStart:
        """Return the start of the chunk after `start`; after the last chunk comes the first one again."""
        cache, first = self._cache(start.chunk), start.first + len(self.chunk(start.chunk))
        if cache.meta["is_last"]:
            following = ChunkStart(start.epoch + 1, 0, first, 0, None)
        else:
            documents = start.documents + len(cache.keys)
            following = ChunkStart(start.epoch, start.chunk + 1, first, documents, cache.meta["next"])
        self._remember(following)
        return following

    def state(self, sample: int) -> dict[str, Any]:
        """Return which documents are consumed at a sample, as plain values.

        "chunks" holds the current chunk last: all documents before it are consumed, and its rows up to `sample`. The
        previous chunk is stored too: version 0.2 with another batch size may begin in it.
        """
        starts = self._starts_before(sample)[-2:]
        return {"rows": self._identity, "chunks": [asdict(start) for start in starts]}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore a value of `state`. A state of other rows is ignored, because their chunks begin elsewhere."""
        if state and state["rows"] == self._identity:
            for values in state["chunks"]:
                self._remember(ChunkStart(**values))

    def _starts_before(self, sample: int) -> list[ChunkStart]:
        return [start for _, start in sorted(self._starts.items()) if start.first <= sample]

    def _remember(self, start: ChunkStart) -> None:
        self._starts[start.epoch, start.chunk] = start
        self._positions[start.chunk] = start.position

    def _cache(self, chunk: int) -> TokenCache:
        """Return the token cache of a chunk; build it first if it is missing or damaged."""
        folder = self._folder.with_name(f"{self._folder.name}-{chunk:06d}")
        cache = TokenCache(folder, self.corpus_hash, self.tokenizer.dtype)
        try:
            build_if_missing(cache, lambda scratch: self._write(chunk, scratch))
        except (ValueError, OSError) as error:
            if chunk == 0:  # before training, where the caller names the key
                raise
            text = " ".join(str(error).split())
            raise DataError(f"the next documents of the stream cannot be read: {text}") from error
        return cache

    def _write(self, chunk: int, folder: Path) -> None:
        stream, documents = self._documents(chunk)
        self._open = None  # after an error the stream would be in the middle of a chunk
        is_last = write_tokens(folder, documents, self.tokenizer, self.chunk_tokens)
        if chunk == 0 and len(np.load(folder / "sizes.npy", mmap_mode="r")) == 0:
            raise empty_corpus(self.corpus)
        description = {"corpus": self.corpus.name, "tokenizer": self.tokenizer.fingerprint}
        write_meta(folder, {**description, "is_last": is_last, "next": stream.position()})
        self._open = chunk + 1, stream, documents

    def _documents(self, chunk: int) -> tuple[DocumentStream, Iterator[Document]]:
        """Return the documents from a chunk on: the stream that is open after the previous chunk, or a new one."""
        if self._open and self._open[0] == chunk:
            return self._open[1:]
        if chunk not in self._positions:
            self._positions[chunk] = self._cache(chunk - 1).meta["next"]
        stream = self.corpus.stream(self._positions[chunk])
        return stream, iter(stream)


class StreamOrder:
    """The order of streamed rows, as (chunk, row): chunks in the corpus's order, each with its rows shuffled.

    The permutation of a chunk depends on (seed, epoch, chunk). Reading a place tokenises its chunk.
    """

    def __init__(self, streamed: StreamedRows, *, seed: int) -> None:
        self.streamed, self.seed = streamed, seed
        self._start: ChunkStart | None = None  # of the chunk that was read last
        self._order = np.empty(0, dtype=np.int64)  # of its rows

    def rows(self, first: int, n: int) -> list[tuple[int, int]]:
        """Return (chunk, row) of the samples ``first, …, first + n - 1``."""
        return [self._place(sample) for sample in range(first, first + n)]

    def _place(self, sample: int) -> tuple[int, int]:
        start, previous = self._start, self._start
        if start is None or sample < start.first:
            start = self.streamed.start_before(sample)
        while sample >= start.first + len(self.streamed.chunk(start.chunk)):
            start = self.streamed.start_after(start)
        if start != previous:
            n_rows = len(self.streamed.chunk(start.chunk))
            self._start, self._order = start, epoch_order(n_rows, self.seed, (start.epoch << 32) + start.chunk)
        return start.chunk, int(self._order[sample - start.first])


def limit_entries(index: PackedIndex, capacity: int) -> PackedIndex:
    """Cut rows so that each has fewer than `capacity` segments, which leaves an entry for the padding."""
    if index.one_stream:
        return index
    cuts = [
        np.arange(begin, end, capacity - 1)
        for begin, end in zip(index.row_offsets, index.row_offsets[1:], strict=False)
        if end - begin > capacity - 1
    ]
    return replace(index, row_offsets=np.unique(np.concatenate([index.row_offsets, *cuts])))
