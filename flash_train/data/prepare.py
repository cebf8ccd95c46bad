"""From a corpus to the rows of both parts, train and validation, and a description of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_train.data.cache import TokenCache
from flash_train.data.dataset import PackedRows
from flash_train.data.packing import PackedIndex, PackingStrategy, pack
from flash_train.data.recall import RecallCorpus, RecallRows
from flash_train.data.split import Part, split
from flash_train.data.stream import StreamedRows, StreamingCorpus
from flash_train.data.tokenizer import Tokenizer
from flash_train.data.validation import validation_documents


@dataclass(frozen=True)
class PreparedRows:
    """Rows of both parts; `info` describes them in plain values (see `PackedDataModule.info`)."""

    train: PackedRows | RecallRows | StreamedRows
    val: PackedRows | RecallRows
    info: dict[str, Any]


def prepare_recall(corpus: RecallCorpus, *, seq_len: int, seed: int) -> PreparedRows:
    """Make the rows of associative recall."""
    train = RecallRows(corpus, seq_len, seed, "train")
    val = RecallRows(corpus, seq_len, seed, "val")
    val.capacity = train.capacity  # the same for both, so that shapes never change
    info = {
        "corpus": corpus.name,
        "corpus_hash": corpus.fingerprint(),
        "seq_len": seq_len,
        "capacity": train.capacity,
        "chance": corpus.chance,
    }
    return PreparedRows(train, val, info)


def prepare_text(
    corpus_name: str,
    cache: TokenCache,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    packing: PackingStrategy,
    val_fraction: float,
    val_tokens: int | None,
) -> PreparedRows:
    """Make the rows of a tokenised corpus."""
    train, held_out = split(cache, val_fraction)
    val = validation_documents(held_out, val_tokens)
    train_index, val_index = pack(train.lengths, seq_len, packing), pack(val.lengths, seq_len)
    capacity = max(train_index.capacity, val_index.capacity)  # the same for both, so that shapes never change
    train_rows = PackedRows(train, train_index, tokenizer.pad, capacity)
    info = _text_info(
        corpus_name, cache.corpus_hash, tokenizer, packing, capacity, train=(train, train_index), held_out=held_out
    )
    return PreparedRows(train_rows, PackedRows(val, val_index, tokenizer.pad, capacity), info)


def prepare_stream(
    corpus: StreamingCorpus,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    packing: PackingStrategy,
    val_fraction: float,
    val_tokens: int | None,
    cache_dir: str | Path | None,
) -> PreparedRows:
    """Make the rows of a corpus that is tokenised while the run trains."""
    rows = StreamedRows(
        corpus,
        tokenizer,
        seq_len=seq_len,
        packing=packing,
        val_fraction=val_fraction,
        val_tokens=val_tokens,
        cache_dir=cache_dir,
    )
    first_chunk = rows.first_part, rows.first_index
    info = _text_info(
        corpus.name,
        rows.corpus_hash,
        tokenizer,
        packing,
        rows.capacity,
        train=first_chunk,
        held_out=rows.held_out,
    )
    return PreparedRows(rows, rows.val, {**info, "streaming": True})


def _text_info(
    corpus_name: str,
    corpus_hash: str,
    tokenizer: Tokenizer,
    packing: PackingStrategy,
    capacity: int,
    *,
    train: tuple[Part, PackedIndex],
    held_out: Part,
) -> dict[str, Any]:
    """Describe the data for `PreparedRows.info`. `held_out` are all held-out documents; a validation may read fewer."""
    part, index = train
    return {
        "corpus": corpus_name,
        "corpus_hash": corpus_hash,
        "tokenizer": tokenizer.fingerprint,
        "seq_len": index.seq_len,
        "packing": packing,
        "capacity": capacity,
        "train": _part_info(part, index),
        "val": _part_info(held_out, pack(held_out.lengths, index.seq_len)),
    }


def _part_info(part: Part, index: PackedIndex) -> dict[str, int | float]:
    return {
        "documents": len(part),
        "tokens": int(part.lengths.sum()),
        "bytes": part.bytes,
        "rows": len(index),
        "packing_efficiency": index.efficiency,
        "capacity": index.capacity,
    }
