"""The LightningDataModule: corpus → token cache → packed rows → batches, resumable at any optimizer step."""

from pathlib import Path
from typing import Any, cast

import lightning
import torch
from torch.utils.data import DataLoader

from flash_train.checks import at_least, check, within
from flash_train.data.cache import TokenCache, tokenize
from flash_train.data.consumed import ConsumedBatches
from flash_train.data.corpus import Corpus
from flash_train.data.dataset import PackedRows
from flash_train.data.lightning_counts import EpochStart, batches_of_epoch, never_validates
from flash_train.data.loading import BatchStream
from flash_train.data.notice import say
from flash_train.data.packing import PackingStrategy, check_packing_strategy
from flash_train.data.prepare import PreparedRows, prepare_recall, prepare_stream, prepare_text
from flash_train.data.recall import RecallCorpus, RecallRows
from flash_train.data.sampler import EndlessBatchSampler, ShardedBatchSampler, epoch_order
from flash_train.data.split import check_val_fraction
from flash_train.data.stream import StreamedRows, StreamingCorpus, StreamSampler
from flash_train.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from flash_train.data.validation import VAL_ORDER_SEED, Validated


class PackedDataModule(lightning.LightningDataModule):
    """Batches of packed rows from a corpus, for any Lightning Trainer.

    Training is an endless stream: batch i of a rank is a pure function of (seed, i, rank, world size). Validation is
    finite and always uses the same best-fit packed rows, for any `packing` and `seed`, so that losses can be compared.
    `flash_train.data.dataset.collate` describes a batch. Checkpoints contain the number of consumed batches, that is,
    those whose optimizer step is done; a resumed run continues with the next one. `Trainer(overfit_batches=N)` repeats
    the first N training batches. `Trainer.test` and `Trainer.predict` also get the validation rows.

    In a loop without a Trainer, loaders are PyTorch's `DataLoader`, a training batch counts as consumed when it is
    taken from its loader, and the rank comes from `torch.distributed`. With Fabric:

        fabric = lightning.Fabric(devices=2, strategy="ddp")
        fabric.launch()
        data = PackedDataModule(StdlibCorpus(), seq_len=1024, batch_size=1)
        for batch in fabric.setup_dataloaders(data.train_dataloader()):
            ...
            fabric.save("last.ckpt", {"data": data.state_dict()})  # and later: data.load_state_dict(saved["data"])

    A corpus with `streaming` is tokenised while it is read (`flash_train.data.stream`). It works the same way, except
    that rows are shuffled within chunks of some million tokens, and validation uses the first chunk.

    Args:
        corpus: StdlibCorpus, TextCorpus, HubCorpus, RecallCorpus, or another `Corpus`.
        tokenizer: ByteTokenizer (the default) or JsonTokenizer. RecallCorpus makes tokens itself and uses only the size
            of the vocabulary.
        seq_len: tokens per row.
        batch_size: rows per batch on each rank.
        seed: for the order of training rows; for RecallCorpus also for the rows themselves.
        packing: "best_fit", or "concat" for one causal stream per row.
        val_fraction: share of the documents held out for validation.
        val_batches: maximum number of validation batches per rank; None for all.
        val_tokens: validate on this many tokens, of the same documents at every `seq_len`; None for all. RecallCorpus
            uses as many rows as hold them, at least one.
        num_workers: processes that load batches; 0 loads in the training process. The batches are the same.
        cache_dir: folder for tokenised text; None for ~/.cache/flash_train.
        rank, world_size: this process's share of each global batch, `0 <= rank < world_size`. Give them if several
            ranks need the same rows. With None, each rank has its own rows.

    Raises:
        ValueError: an argument is out of range. Errors of the corpus appear in `prepare_data` and `setup`.
    """

    def __init__(
        self,
        corpus: Corpus | RecallCorpus,
        tokenizer: Tokenizer | None = None,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        packing: PackingStrategy = "best_fit",
        val_fraction: float = 0.05,
        val_batches: int | None = None,
        val_tokens: int | None = None,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        check("seq_len", seq_len, at_least(2))
        check("batch_size", batch_size, at_least(1))
        check("seed", seed, at_least(0))
        check("data.val_batches", val_batches, at_least(1), or_none="or null for all")
        check("data.val_tokens", val_tokens, at_least(2), or_none="or null for all")
        check("data.num_workers", num_workers, at_least(0))
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank} world_size={world_size}: must be both, or neither")
        if rank is not None and world_size is not None:
            check("rank", rank, within(0, world_size, "[)"))
        self.rank, self.world_size = rank, world_size
        check_packing_strategy(packing)
        check_val_fraction(val_fraction)
        self.corpus, self.tokenizer = corpus, tokenizer or ByteTokenizer()
        self.seq_len, self.batch_size, self.seed, self.packing = seq_len, batch_size, seed, packing
        self.val_fraction, self.val_batches, self.val_tokens = val_fraction, val_batches, val_tokens
        self.num_workers, self.cache_dir = num_workers, cache_dir
        self._cache: TokenCache | None = None
        self._train: PackedRows | RecallRows | StreamedRows | None = None
        self._val: PackedRows | RecallRows | None = None
        self._info: dict[str, Any] = {}
        self._consumed = ConsumedBatches()

    @property
    def vocab_size(self) -> int:
        """Number of token ids; known before `setup`."""
        return self.tokenizer.vocab_size

    @property
    def info(self) -> dict[str, Any]:
        """A description of the data in plain values, for logging.

        corpus, corpus_hash, tokenizer, seq_len, packing, capacity; under "train" and "val" each: documents, tokens,
        bytes, rows, packing_efficiency, capacity. If `streaming` is True, "train" describes the first chunk. For
        RecallCorpus only corpus, corpus_hash, seq_len, capacity, chance.
        """
        self.setup()
        return self._info

    def validated(self, world_size: int = 1) -> Validated:
        """Count the tokens, rows and documents that one validation reads when `world_size` ranks share it."""
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

        Bits per byte is loss / ln 2 / bytes_per_token, with the mean loss over labels in nats.
        """
        self.setup()
        if isinstance(self._val, RecallRows):
            return None
        part = self._val.part
        return part.bytes / int(part.lengths.sum() - len(part))  # a document's first token is not predicted

    def prepare_data(self) -> None:
        """Tokenise the corpus into the cache if it is not there. Lightning calls this on one rank of each node.

        For a streamed corpus, `setup` tokenises the first chunk instead.
        """
        if not isinstance(self.corpus, RecallCorpus) and not self._is_streamed and self._cache is None:
            self._cache = tokenize(self.corpus, self.tokenizer, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Split and pack the corpus. Later calls do nothing."""
        if self._train is None:
            rows = self._prepare_rows()
            self._train, self._val, self._info = rows.train, rows.val, rows.info

    def train_dataloader(self) -> BatchStream | DataLoader:
        """Return endless batches, from the first one that is not consumed."""
        self.setup()
        self._consumed.begin_stream(self.trainer)
        if self.trainer is None:
            stream = BatchStream(self._train, self._train_sampler, self.num_workers, on_batch=self._consumed.take)
            return stream.as_dataloader()
        if never_validates(self.trainer):
            say(
                "training batches are endless, so an epoch never ends and nothing is validated during training: give "
                "Trainer(val_check_interval=100, check_val_every_n_epoch=None), or another interval"
            )
        epoch_start = EpochStart(self._consumed.begin_epoch)
        return BatchStream(self._train, self._train_sampler, self.num_workers, epoch_start)

    def val_dataloader(self) -> BatchStream | DataLoader:
        """Return all validation rows, or `val_batches` batches, distributed over the ranks without repetition."""
        self.setup()
        stream = BatchStream(self._val, self._val_sampler, self.num_workers)
        return stream.as_dataloader() if self.trainer is None else stream

    def test_dataloader(self) -> BatchStream | DataLoader:
        """Return the same batches as `val_dataloader`: there are no other held-out rows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> BatchStream | DataLoader:
        """Return the same batches as `val_dataloader`."""
        return self.val_dataloader()

    @property
    def consumed_batches(self) -> int:
        """Batches of this rank since the beginning of the run whose optimizer step is done.

        Batches of an unfinished accumulation don't count: no checkpoint has their gradients.
        """
        return self._consumed.count(self.trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: how many batches are consumed, which data they came from, and how to read their tokens.

        For a streamed corpus, "stream" says which documents are consumed. For text: `token_ids` of bos (or None), eos
        and pad, and `tokenizer_file`, the path of a JsonTokenizer's file (None for other tokenizers).
        """
        consumed, rows = self.consumed_batches, self._rows_per_batch
        counts: dict[str, Any] = {"consumed_batches": consumed, "rows_per_batch": rows}
        identity = self._identity()
        if isinstance(self._train, StreamedRows):
            counts["stream"] = self._train.state(consumed * rows)
        return {**counts, **identity, **self._token_reading()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the consumed batches.

        With another batch size or world size, continue at the nearest earlier batch: rows may repeat, but none is
        skipped.

        If the data differ from the checkpoint's data, one line lists all differences.
        """
        own = self._identity()
        saved = {name: state_dict.get(name) for name in own}  # None for entries that another kind of corpus lacks
        own["streaming"], saved["streaming"] = self._is_streamed, "stream" in state_dict
        differing = [f"{name} was {saved[name]} and is {own[name]}" for name in own if saved[name] != own[name]]
        if differing:
            say(f"resuming on different data: {', '.join(differing)}")
        if isinstance(self._train, StreamedRows):
            self._train.restore(state_dict.get("stream"))
        consumed_rows = state_dict["consumed_batches"] * state_dict["rows_per_batch"]
        self._consumed.restore(consumed_rows // self._rows_per_batch, self.trainer)

    def __repr__(self) -> str:
        """Describe the settings of the rows, and their number after `setup`, without reading data."""
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

    __str__ = __repr__  # Lightning's `__str__` needs the length of every loader, and training has none

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

    def _prepare_rows(self) -> PreparedRows:
        if isinstance(self.corpus, RecallCorpus):
            return prepare_recall(self.corpus, seq_len=self.seq_len, seed=self.seed)
        options: dict[str, Any] = {
            "seq_len": self.seq_len,
            "packing": self.packing,
            "val_fraction": self.val_fraction,
            "val_tokens": self.val_tokens,
        }
        if self._is_streamed:
            corpus = cast("StreamingCorpus", self.corpus)
            return prepare_stream(corpus, self.tokenizer, cache_dir=self.cache_dir, **options)
        self.prepare_data()
        return prepare_text(self.corpus.name, self._cache, self.tokenizer, **options)

    def _identity(self) -> dict[str, Any]:
        """Return the values that decide the rows and their order."""
        names = ("corpus_hash", "tokenizer", "seq_len", "packing")
        described = {name: self.info[name] for name in names if name in self.info}
        return {**described, "seed": self.seed, "val_fraction": self.val_fraction}

    def _token_reading(self) -> dict[str, Any]:
        """Return the values that turn tokens back into text; empty for RecallCorpus, which has no text."""
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
        """Return the training stream's first batch; with `overfit_batches`, every epoch begins with the same batch."""
        if self.trainer is not None and self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return batches_of_epoch(self.trainer)
        return self.consumed_batches

    def _val_sampler(self) -> ShardedBatchSampler:
        return ShardedBatchSampler(self._val_rows(self._rows_per_batch), self.batch_size, **self._ranks)

    def _val_rows(self, rows_per_batch: int) -> list[int]:
        # Shuffled, so that the first few batches are a fair sample: packing sorts rows by length.
        rows = epoch_order(len(self._val), VAL_ORDER_SEED, 0).tolist()
        if self.val_tokens is not None and isinstance(self._val, RecallRows):
            rows = rows[: max(1, self.val_tokens // self.seq_len)]
        return rows if self.val_batches is None else rows[: self.val_batches * rows_per_batch]
