"""The LightningDataModule: corpus → token cache → packed rows → batches, resumable at any optimizer step."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from torch.utils.data import DataLoader

from flash_train.data.cache import TokenCache, tokenize
from flash_train.data.corpus import Corpus
from flash_train.data.dataset import PackedRows
from flash_train.data.loading import BatchStream
from flash_train.data.notice import say
from flash_train.data.packing import PackedIndex, PackingName, check_packing, pack
from flash_train.data.progress import (
    EpochStart,
    batches_of_epoch,
    begin_a_whole_step,
    drop_loader,
    never_validates,
    pending_batches,
    processed_batches,
)
from flash_train.data.recall import RecallCorpus, RecallRows
from flash_train.data.sampler import EndlessBatchSampler, ShardedBatchSampler, epoch_order
from flash_train.data.split import Part, check_val_fraction, split
from flash_train.data.stream import StreamedRows, StreamingCorpus, StreamSampler
from flash_train.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from flash_train.data.validation import VAL_ORDER_SEED, Validated, read_for_validation


@dataclass(frozen=True)
class _Anchor:
    """Where a training stream begins: at batch `start`, when `trainer` has processed `processed` batches.

    `processed` is None until the trainer's first epoch begins: before, its counts may not be restored.
    """

    trainer: lightning.Trainer | None
    processed: int | None
    start: int


class PackedDataModule(lightning.LightningDataModule):
    """Batches of packed rows from a corpus, for any Lightning Trainer.

    Training is an endless stream: batch i of a rank is a pure function of (seed, i, rank, world size). Validation is
    finite and always the same best-fit packed rows, whatever `packing` and `seed`, so that losses can be compared.
    Batches are as `flash_train.data.dataset.collate` describes. Checkpoints carry the count of consumed batches, those
    whose optimizer step is done, and a resumed run continues with the next one. `Trainer(overfit_batches=N)` repeats
    the first N training batches. Held-out rows are also what `Trainer.test` and `Trainer.predict` get.

    In a loop without a Trainer, loaders are PyTorch's `DataLoader`, a training batch counts as consumed when it is
    taken from its loader, and `torch.distributed` says which rank it is. With Fabric:

        fabric = lightning.Fabric(devices=2, strategy="ddp")
        fabric.launch()
        data = PackedDataModule(StdlibCorpus(), seq_len=1024, batch_size=1)
        for batch in fabric.setup_dataloaders(data.train_dataloader()):
            ...
            fabric.save("last.ckpt", {"data": data.state_dict()})  # and later: data.load_state_dict(saved["data"])

    A corpus with `streaming` is tokenised as it is read (`flash_train.data.stream`): the same holds, but rows are
    shuffled within chunks of some million tokens, and validation is of the first chunk.

    Args:
        corpus: StdlibCorpus, TextCorpus, HubCorpus, RecallCorpus, or another `Corpus`.
        tokenizer: ByteTokenizer (the default) or JsonTokenizer. RecallCorpus makes tokens itself and takes from it the
            size of the vocabulary only.
        seq_len: tokens in a row.
        batch_size: rows in a batch, of each rank.
        seed: of the order of training rows; and of the rows themselves for RecallCorpus.
        packing: "best_fit", or "concat" for one causal stream per row.
        val_fraction: share of the documents held out for validation.
        val_batches: at most so many validation batches per rank; None for all.
        val_tokens: validate on so many tokens, of the same documents at every `seq_len`; None for all. RecallCorpus has
            as many rows as hold them, at least one.
        num_workers: processes that load batches; 0 loads in the training process. Batches are the same.
        cache_dir: where tokenised text is kept; None for ~/.cache/flash_train.
        rank, world_size: which share of each global batch is this process's, `0 <= rank < world_size`: to be given
            where several ranks need the same rows. None: each rank has rows of its own.

    Raises ValueError for values that cannot be; errors of the corpus show up in `prepare_data` and `setup`.
    """

    def __init__(
        self,
        corpus: Corpus | RecallCorpus,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        packing: PackingName = "best_fit",
        val_fraction: float = 0.05,
        val_batches: int | None = None,
        val_tokens: int | None = None,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        at_least = {"seq_len": (seq_len, 2), "batch_size": (batch_size, 1), "seed": (seed, 0)}
        at_least["data.val_batches"] = (1 if val_batches is None else val_batches, 1)
        at_least["data.val_tokens"] = (2 if val_tokens is None else val_tokens, 2)
        at_least["data.num_workers"] = (num_workers, 0)
        for key, (value, least) in at_least.items():
            if value < least:
                raise ValueError(f"{key}={value}: allowed is {least} or more")
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank} world_size={world_size}: give both, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: must be from 0 to below world_size={world_size}")
        self.rank, self.world_size = rank, world_size
        check_packing(packing)
        check_val_fraction(val_fraction)
        self.corpus, self.tokenizer = corpus, tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size, self.seed, self.packing = seq_len, batch_size, seed, packing
        self.val_fraction, self.val_batches, self.val_tokens = val_fraction, val_batches, val_tokens
        self.num_workers, self.cache_dir = num_workers, cache_dir
        self._cache: TokenCache | None = None
        self._train: PackedRows | RecallRows | StreamedRows | None = None
        self._val: PackedRows | RecallRows | None = None
        self._info: dict[str, Any] = {}
        self._resume_at = 0
        self._anchor: _Anchor | None = None
        self._taken = 0  # batches since `_anchor`, in a loop without a Trainer

    @property
    def vocab_size(self) -> int:
        """Number of token ids; known before `setup`."""
        return self.tokenizer.vocab_size

    @property
    def info(self) -> dict[str, Any]:
        """What the data are, in plain values to be logged.

        corpus, corpus_hash, tokenizer, seq_len, packing, capacity; under "train" and "val" each: documents, tokens,
        bytes, rows, packing_efficiency, capacity. Where `streaming` is True, "train" is the first chunk alone. For
        RecallCorpus only corpus, corpus_hash, seq_len, capacity, chance.
        """
        self.setup()
        return self._info

    def validated(self, world_size: int = 1) -> Validated:
        """What a validation reads where `world_size` ranks share it."""
        self.setup()
        rows = self._val_rows(self.batch_size * world_size)
        if isinstance(self._val, RecallRows):
            return Validated(len(rows) * self.seq_len, len(rows), None)
        segments = [segment for row in rows for segment in self._val.index.row(row)]
        documents = {document for document, _, _ in segments}
        return Validated(sum(length for _, _, length in segments), len(rows), len(documents))

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per predicted token of the validation part; None for RecallCorpus, which has no text.

        Bits per byte is loss / ln 2 / bytes_per_token, `loss` being the mean over labels in nats.
        """
        self.setup()
        if isinstance(self._val, RecallRows):
            return None
        part = self._val.part
        return part.bytes / int(part.lengths.sum() - len(part))  # a document's first token is not predicted

    def prepare_data(self) -> None:
        """Tokenises the corpus into the cache, unless it is there. Lightning calls this on one rank of each node.

        Of a corpus that is streamed, `setup` tokenises the first chunk.
        """
        if not isinstance(self.corpus, RecallCorpus) and not self._is_streamed and self._cache is None:
            self._cache = tokenize(self.corpus, self.tokenizer, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Splits and packs. Does nothing the second time."""
        if self._train is not None:
            return
        if isinstance(self.corpus, RecallCorpus):
            self._setup_recall(self.corpus)
        elif self._is_streamed:
            self._setup_stream()
        else:
            self.prepare_data()
            self._setup_text(self._cache)

    def train_dataloader(self) -> BatchStream | DataLoader:
        """Endless batches, from the first one not consumed yet."""
        self.setup()
        self._anchor = _Anchor(self.trainer, None, self.consumed_batches)
        self._resume_at = self._taken = 0
        if self.trainer is None:
            return BatchStream(self._train, self._train_sampler, self.num_workers, on_batch=self._take).as_dataloader()
        if never_validates(self.trainer):
            say(
                "training batches have no end, so the end of an epoch never comes and nothing is validated while "
                "training runs: give Trainer(val_check_interval=100, check_val_every_n_epoch=None), or another interval"
            )
        return BatchStream(self._train, self._train_sampler, self.num_workers, EpochStart(self._begin_epoch))

    def val_dataloader(self) -> BatchStream | DataLoader:
        """The validation rows, or `val_batches` batches of them, dealt to the ranks without repetition."""
        self.setup()
        stream = BatchStream(self._val, self._val_sampler, self.num_workers)
        return stream.as_dataloader() if self.trainer is None else stream

    def test_dataloader(self) -> BatchStream | DataLoader:
        """The batches of `val_dataloader`: there are no other held-out rows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> BatchStream | DataLoader:
        """The batches of `val_dataloader`."""
        return self.val_dataloader()

    @property
    def consumed_batches(self) -> int:
        """Batches of this rank, since the run's beginning, whose optimizer step is done.

        Batches of an accumulation still under way don't count: their gradients are in no checkpoint.
        """
        anchor = self._anchor
        if anchor is None or anchor.trainer is not self.trainer:
            return self._resume_at
        if self.trainer is None:
            return anchor.start + self._taken
        if anchor.processed is None:
            return anchor.start
        processed = processed_batches(self.trainer) - anchor.processed
        return anchor.start + processed - min(pending_batches(self.trainer), processed)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the batches consumed, what they were batches of, and how to read their tokens.

        Of a corpus that is streamed, "stream" says which documents are consumed. For text alone: `token_ids` of bos
        (or None), eos and pad, and `tokenizer_file`, the path of a JsonTokenizer's file (None for other tokenizers).
        """
        consumed, rows = self.consumed_batches, self._rows_per_batch
        counts: dict[str, Any] = {"consumed_batches": consumed, "rows_per_batch": rows}
        identity = self._identity()
        if isinstance(self._train, StreamedRows):
            counts["stream"] = self._train.state(consumed * rows)
        return {**counts, **identity, **self._reading()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the consumed batches; with another batch size or world size, at the nearest batch before.

        Says, in one line, all ways in which the data differ from those of the checkpoint, since the run then isn't
        the same.
        """
        own = self._identity()
        saved = {name: state_dict.get(name) for name in own}  # what says nothing to the other kind of corpus: None
        own["streaming"], saved["streaming"] = self._is_streamed, "stream" in state_dict
        differing = [f"{name} was {saved[name]} and is {own[name]}" for name in own if saved[name] != own[name]]
        if differing:
            say(f"resuming on others than before: {', '.join(differing)}")
        if isinstance(self._train, StreamedRows):
            self._train.restore(state_dict.get("stream"))
        self._resume_at = state_dict["consumed_batches"] * state_dict["rows_per_batch"] // self._rows_per_batch
        if self.trainer is not None and self._anchor is not None and self._anchor.trainer is self.trainer:
            drop_loader(self.trainer)
        self._anchor = None

    def __repr__(self) -> str:
        """What the rows are made of; how many there are once it is set up. Reads nothing."""
        tokenizer = "" if isinstance(self.corpus, RecallCorpus) else f"tokenizer={self.tokenizer.fingerprint}, "
        options = f"seq_len={self.seq_len}, batch_size={self.batch_size}, packing={self.packing}, seed={self.seed}"
        parts = [
            f"{name}: {part['documents']:,} documents, {part['tokens']:,} tokens in {part['rows']:,} rows"
            for name in ("train", "val")
            if (part := self._info.get(name))
        ]
        state = "; ".join(parts) or ("set up" if self._info else "not set up")
        streamed = " (streamed; train is its first chunk)" if self._is_streamed else ""
        return f"{type(self).__name__}(corpus={self.corpus.name}{streamed}, {tokenizer}{options}; {state})"

    __str__ = __repr__  # Lightning's own asks the dataloaders for their lengths, and training has none

    @property
    def _is_streamed(self) -> bool:
        return getattr(self.corpus, "streaming", False)

    @property
    def _ranks(self) -> dict[str, int]:
        if self.rank is not None and self.world_size is not None:
            return {"rank": self.rank, "world_size": self.world_size}
        if self.trainer is not None:
            return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
        return {"rank": 0, "world_size": 1}

    @property
    def _rows_per_batch(self) -> int:
        return self.batch_size * self._ranks["world_size"]

    def _take(self) -> None:
        self._taken += 1

    def _begin_epoch(self) -> None:
        """Note what the trainer has processed as its first epoch of a fit begins, in whole optimizer steps."""
        anchor = self._anchor
        if anchor is not None and anchor.processed is None and anchor.trainer is not None:
            begin_a_whole_step(anchor.trainer)
            self._anchor = replace(anchor, processed=processed_batches(anchor.trainer))

    def _identity(self) -> dict[str, Any]:
        """What decides the rows and their order."""
        names = ("corpus_hash", "tokenizer", "seq_len", "packing")
        described = {name: self.info[name] for name in names if name in self.info}
        return {**described, "seed": self.seed, "val_fraction": self.val_fraction}

    def _reading(self) -> dict[str, Any]:
        """What turns tokens back into text: nothing for RecallCorpus, which makes them itself."""
        tokenizer = self.tokenizer
        if isinstance(self.corpus, RecallCorpus):
            return {}
        file = str(tokenizer.path.resolve()) if isinstance(tokenizer, JsonTokenizer) else None
        ids = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.pad}
        return {"token_ids": ids, "tokenizer_file": file}

    def _train_sampler(self) -> EndlessBatchSampler | StreamSampler:
        if isinstance(self._train, StreamedRows):
            start = self._first_batch()
            return self._train.sampler(self.batch_size, seed=self.seed, start_batch=start, **self._ranks)
        return EndlessBatchSampler(
            len(self._train),
            self.batch_size,
            seed=self.seed,
            start_batch=self._first_batch(),
            shuffle=isinstance(self._train, PackedRows),
            **self._ranks,
        )

    def _first_batch(self) -> int:
        """With which the training stream begins; one that overfits begins each epoch with the same."""
        if self.trainer is not None and self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return batches_of_epoch(self.trainer)
        return self.consumed_batches

    def _val_sampler(self) -> ShardedBatchSampler:
        return ShardedBatchSampler(self._val_rows(self._rows_per_batch), self.batch_size, **self._ranks)

    def _val_rows(self, rows_per_batch: int) -> list[int]:
        # In an order of its own, so that the first few batches are a fair sample: packing sorts by length.
        rows = epoch_order(len(self._val), VAL_ORDER_SEED, 0).tolist()
        if self.val_tokens is not None and isinstance(self._val, RecallRows):
            rows = rows[: max(1, self.val_tokens // self.seq_len)]
        return rows if self.val_batches is None else rows[: self.val_batches * rows_per_batch]

    def _setup_recall(self, corpus: RecallCorpus) -> None:
        self._train = RecallRows(corpus, self.seq_len, self.seed, "train")
        self._val = RecallRows(corpus, self.seq_len, self.seed, "val")
        capacity = self._val.capacity = self._train.capacity  # one for both: shapes never change
        self._info = {
            "corpus": corpus.name,
            "corpus_hash": corpus.fingerprint(),
            "seq_len": self.seq_len,
            "capacity": capacity,
            "chance": corpus.chance,
        }

    def _setup_stream(self) -> None:
        rows = StreamedRows(
            cast("StreamingCorpus", self.corpus),
            self.tokenizer,
            seq_len=self.seq_len,
            packing=self.packing,
            val_fraction=self.val_fraction,
            val_tokens=self.val_tokens,
            cache_dir=self.cache_dir,
        )
        self._train, self._val = rows, rows.val
        self._describe_text(rows.corpus_hash, (rows.first_part, rows.first_index), rows.held_out)
        self._info["streaming"] = True

    def _setup_text(self, cache: TokenCache) -> None:
        train, val = split(cache, self.val_fraction)
        read = read_for_validation(val, self.val_tokens)
        train_index, val_index = pack(train.lengths, self.seq_len, self.packing), pack(read.lengths, self.seq_len)
        capacity = max(train_index.capacity, val_index.capacity)  # one for both: shapes never change
        self._train = PackedRows(train, train_index, self.tokenizer.pad, capacity)
        self._val = PackedRows(read, val_index, self.tokenizer.pad, capacity)
        self._describe_text(cache.corpus_hash, (train, train_index), val)

    def _describe_text(self, corpus_hash: str, train: tuple[Part, PackedIndex], val: Part) -> None:
        """`val` is all that is held out; a validation may read less of it."""
        self._info = {
            "corpus": self.corpus.name,
            "corpus_hash": corpus_hash,
            "tokenizer": self.tokenizer.fingerprint,
            "seq_len": self.seq_len,
            "packing": self.packing,
            "capacity": self._train.capacity,
            "train": _describe(*train),
            "val": _describe(val, pack(val.lengths, self.seq_len)),
        }


def _describe(part: Part, index: PackedIndex) -> dict[str, int | float]:
    return {
        "documents": len(part),
        "tokens": int(part.lengths.sum()),
        "bytes": part.bytes,
        "rows": len(index),
        "packing_efficiency": index.efficiency,
        "capacity": index.capacity,
    }
