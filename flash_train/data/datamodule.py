"""The LightningDataModule: corpus → token cache → packed rows → batches, resumable at any optimizer step."""

import math
from pathlib import Path
from typing import Any, cast, get_args

import lightning
from torch.utils.data import DataLoader

from flash_train.checks import Allowed, as_integer, check, check_name, within
from flash_train.data.cache import TokenCache, tokenize
from flash_train.data.corpora.corpus import Corpus, check_corpus
from flash_train.data.dataset import Batch, PackedRows, PlacedRows
from flash_train.data.errors import DataError
from flash_train.data.loading import BatchStream
from flash_train.data.notice import say
from flash_train.data.order.consumed import ConsumedRows
from flash_train.data.order.deal import Synchronise
from flash_train.data.order.lightning_counts import EpochStart, batches_of_epoch, never_validates
from flash_train.data.order.sampler import (
    DealtBatchSampler,
    EndlessBatchSampler,
    ShardedBatchSampler,
)
from flash_train.data.order.training_order import TrainingOrder
from flash_train.data.packing import PackingStrategy, check_packing_strategy
from flash_train.data.prepare import PreparedRows, prepare_recall, prepare_stream, prepare_text
from flash_train.data.recall import RecallCorpus, RecallRows
from flash_train.data.split import check_val_fraction
from flash_train.data.stream import StreamedRows, StreamingCorpus
from flash_train.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, check_tokenizer
from flash_train.data.validation import Validated, ValidationRows
from flash_train.distributed.agreement import difference_between_ranks
from flash_train.distributed.dims import data_share

ROW_COST = Allowed(
    lambda pair: len(pair) == 2 and min(pair) >= 0 and 0 < sum(pair) < math.inf,
    "two numbers of 0 or more, not both 0",
)


class PackedDataModule(lightning.LightningDataModule):
    """Batches of packed rows from a corpus, for any Lightning Trainer.

    Training is an endless stream of rows, whose order is a pure function of the seed. Each optimizer step takes the
    next rows, and each batch of each rank is a pure function of the step's rows, the rank and the world size. Ranks
    that share a row (`flash_train.distributed.dims.data_share`) count as one, so they get the same batches. Validation
    is finite and always uses the same best-fit packed rows, for any `packing` and `seed`, so that losses can be
    compared. `flash_train.data.dataset.collate` describes a batch. `Trainer(overfit_batches=N)` repeats the first N
    training batches. `Trainer.test` and `Trainer.predict` also get the validation rows.

    Checkpoints contain the number of consumed rows, that is, those whose optimizer step is done. A resumed run
    continues with the next row, also on another number of ranks or with another batch size. If an optimizer step has
    as many rows as before, each step has the same rows as before.

    `row_cost` balances the work of the ranks: it deals the rows of each optimizer step to micro-batches and ranks by
    their predicted cost (`flash_train.data.order.deal`). The step has the same rows, so its gradient is the same up to
    rounding. It also works for streamed rows; the rows of RecallCorpus keep their order.

    In a loop without a Trainer, loaders are PyTorch's `DataLoader`, an optimizer step counts as done when its
    `accumulate` batches are taken from the loader, and the rank comes from `torch.distributed`. With Fabric:

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
            ranks need the same rows. With None, the Trainer's strategy decides, and without a Trainer each rank has its
            own rows.
        accumulate: batches per optimizer step in a loop without a Trainer. A Trainer's `accumulate_grad_batches` counts
            instead.
        row_cost: (a, b) predicts that a row costs `a * seq_len + b * sum(length**2)` over its documents' lengths, in
            any unit. None keeps the rows' order. For the FLOPs of a `flash_train.model.Transformer` with full causal
            attention, a is `model.model_flops(1, 0)` and b is half of `model.model_flops(0, 1)`.
        synchronise: when ranks wait for each other: in every "micro_batch" (FSDP), or at the end of a "step" (DDP).

    Raises:
        TypeError: the corpus lacks what a `Corpus` has, or the tokenizer what a `Tokenizer` has.
        ValueError: an argument is out of range. Errors in the corpus's content appear in `prepare_data` and `setup`.
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
        accumulate: int = 1,
        row_cost: tuple[float, float] | None = None,
        synchronise: Synchronise = "micro_batch",
    ) -> None:
        super().__init__()
        tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        if isinstance(corpus, RecallCorpus):
            check_tokenizer(tokenizer, ("vocab_size",))
        else:
            check_corpus(corpus)
            check_tokenizer(tokenizer)
        self.corpus, self.tokenizer = corpus, tokenizer
        self.seq_len = as_integer("seq_len", seq_len, 2)
        self.batch_size = as_integer("batch_size", batch_size, 1)
        self.seed = as_integer("seed", seed, 0)
        check("seed", self.seed, within(0, 2**64, "[)"))
        self.val_batches = as_integer("data.val_batches", val_batches, 1, or_none="or null for all")
        self.val_tokens = as_integer("data.val_tokens", val_tokens, 2, or_none="or null for all")
        self.num_workers = as_integer("data.num_workers", num_workers, 0)
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank} world_size={world_size}: must be both, or neither")
        if rank is not None and world_size is not None:
            world_size = as_integer("world_size", world_size, 1)
            check("rank", rank, within(0, world_size, "[)"))
            rank = as_integer("rank", rank, 0)
        self.rank, self.world_size = rank, world_size
        self.accumulate = as_integer("accumulate", accumulate, 1)
        check("row_cost", row_cost, ROW_COST, or_none="or None for rows in their order")
        check_name("synchronise", synchronise, get_args(Synchronise))
        self.row_cost, self.synchronise = row_cost, synchronise
        check_packing_strategy(packing)
        check_val_fraction(val_fraction)
        self.packing, self.val_fraction, self.cache_dir = packing, val_fraction, cache_dir
        self._cache: TokenCache | None = None
        self._train: PackedRows | RecallRows | StreamedRows | None = None
        self._val: PackedRows | RecallRows | None = None
        self._info: dict[str, Any] = {}
        self._consumed = ConsumedRows()
        self._order: TrainingOrder | None = None
        self._is_compared = False  # with the data of other ranks

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
        """Count the tokens, rows and documents of one validation that `world_size` ranks with different rows share."""
        return self._validation.size(self.batch_size * world_size)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per predicted token of the validation part; None for RecallCorpus, which has no text.

        Bits per byte is loss / ln 2 / bytes_per_token, with the mean loss over labels in nats.
        """
        return self._validation.bytes_per_token

    def prepare_data(self) -> None:
        """Tokenise the corpus into the cache if it is not there. Lightning calls this on one rank of each node.

        For a streamed corpus, `setup` tokenises the first chunk instead.
        """
        if not isinstance(self.corpus, RecallCorpus) and not self._is_streamed and self._cache is None:
            self._cache = tokenize(self.corpus, self.tokenizer, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Split and pack the corpus; later calls do nothing. In a training, all ranks call it together.

        Raises:
            DataError: the ranks read different data.
        """
        if self._train is None:
            rows = self._prepare_rows()
            self._train, self._val, self._info = rows.train, rows.val, rows.info
            self._order = TrainingOrder(self._train, seq_len=self.seq_len, seed=self.seed)
        if self.trainer is not None and not self._is_compared:
            self._is_compared = True
            if difference := difference_between_ranks(self._identity()):
                raise DataError(f"the ranks read different data: {difference}; give all of them equal files")

    def train_dataloader(self) -> BatchStream | DataLoader:
        """Return endless batches, from the first row that is not consumed.

        Raises:
            ValueError: rows are dealt, and `limit_train_batches` would end an epoch within an optimizer step.
        """
        self.setup()
        self._check_whole_steps()
        self._consumed.begin_stream(self.trainer, self._rows_per_batch, self._accumulate)
        assert self._train is not None
        rows = PlacedRows(self._train)
        if self.trainer is None:
            stream = BatchStream(rows, self._train_sampler, self.num_workers, on_batch=self._consumed.take)
            return stream.as_dataloader()
        if never_validates(self.trainer):
            say(
                "training batches are endless, so an epoch never ends and nothing is validated during training: give "
                "Trainer(val_check_interval=100, check_val_every_n_epoch=None), or another interval"
            )
        epoch_start = EpochStart(self._consumed.begin_epoch)
        return BatchStream(rows, self._train_sampler, self.num_workers, epoch_start)

    def rows_at(self, place: int, n: int) -> Batch:
        """Return the rows at the places ``place, …, place + n - 1`` of the training order as a batch, on any rank.

        `flash_train.data.dataset.collate` describes it. Training does not count these rows as consumed.
        """
        self.setup()
        assert self._order is not None
        return self._order.batch(place, n)

    def val_dataloader(self) -> BatchStream | DataLoader:
        """Return all validation rows, or `val_batches` batches, distributed over the ranks without repetition."""
        stream = BatchStream(self._validation.rows, self._val_sampler, self.num_workers)
        return stream.as_dataloader() if self.trainer is None else stream

    def test_dataloader(self) -> BatchStream | DataLoader:
        """Return the same batches as `val_dataloader`: there are no other held-out rows."""
        return self.val_dataloader()

    def predict_dataloader(self) -> BatchStream | DataLoader:
        """Return the same batches as `val_dataloader`."""
        return self.val_dataloader()

    @property
    def consumed_rows(self) -> int:
        """Rows of all ranks since the beginning of the run whose optimizer step is done.

        Rows of an unfinished accumulation don't count: no checkpoint has their gradients.
        """
        return self._consumed.count(self.trainer, self._rows_per_batch, self._accumulate)

    @property
    def consumed_batches(self) -> int:
        """Whole batches of this rank, at the present batch size and number of ranks, in `consumed_rows`."""
        return self.consumed_rows // self._rows_per_batch

    @property
    def imbalance(self) -> float | None:
        """Predicted time of the newest optimizer step over its time on ranks that never wait for each other.

        `flash_train.data.order.deal.imbalance` defines it. None if rows are not dealt, or before the first step.
        """
        return None if self._order is None else self._order.imbalance(self._step_begin())

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: how many rows are consumed, which data they came from, and how to read their tokens.

        "global_batch" is the number of rows in an optimizer step, over all ranks.
        "consumed_batches" and "rows_per_batch" are for version 0.2, which reads no other count.

        For a streamed corpus, "stream" says which documents are consumed. For text: `token_ids` of bos (or None), eos
        and pad, and `tokenizer_file`, the path of a JsonTokenizer's file (None for other tokenizers).
        """
        rows = self.consumed_rows
        counts: dict[str, Any] = {
            "consumed_rows": rows,
            "consumed_batches": self.consumed_batches,
            "rows_per_batch": self._rows_per_batch,
            "global_batch": self._rows_per_batch * self._accumulate,
        }
        identity = self._identity()
        if isinstance(self._train, StreamedRows):
            counts["stream"] = self._train.state(rows)
        return {**counts, **identity, **self._token_reading()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the consumed rows, with any batch size and number of ranks.

        If the data differ from the checkpoint's data, one line lists all differences.
        """
        own = self._identity()
        saved = {name: state_dict.get(name) for name in own}  # None for entries that another kind of corpus lacks
        own["streaming"], saved["streaming"] = self._is_streamed, "stream" in state_dict
        differing = [f"{name} was {saved[name]} and is {own[name]}" for name in own if saved[name] != own[name]]
        if differing:
            say(f"other data than in the checkpoint: {', '.join(differing)}")
        if isinstance(self._train, StreamedRows):
            self._train.restore(state_dict.get("stream"))
        rows = state_dict.get("consumed_rows")
        if rows is None:  # written by version 0.2 or earlier
            rows = state_dict["consumed_batches"] * state_dict["rows_per_batch"]
        self._consumed.restore(rows, self.trainer)

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
    def _validation(self) -> ValidationRows:
        self.setup()
        assert self._val is not None
        return ValidationRows(self._val, self.seq_len, self.val_tokens, self.val_batches)

    @property
    def _is_streamed(self) -> bool:
        return getattr(self.corpus, "streaming", False)

    @property
    def _ranks(self) -> dict[str, int]:
        if self.rank is not None and self.world_size is not None:
            return {"rank": self.rank, "world_size": self.world_size}
        rank, world_size = data_share(None if self.trainer is None else self.trainer.strategy)
        return {"rank": rank, "world_size": world_size}

    @property
    def _rows_per_batch(self) -> int:
        return self.batch_size * self._ranks["world_size"]

    @property
    def _accumulate(self) -> int:
        return self.accumulate if self.trainer is None else self.trainer.accumulate_grad_batches

    @property
    def _unfinished(self) -> int:
        """How many batches of the present optimizer step a loop without a Trainer has taken."""
        return self._consumed.unfinished(self.trainer, self._accumulate)

    @property
    def _is_dealt(self) -> bool:
        return self.row_cost is not None and not isinstance(self.corpus, RecallCorpus)

    def _check_whole_steps(self) -> None:
        limit = None if self.trainer is None else self.trainer.limit_train_batches
        if self._is_dealt and isinstance(limit, int) and limit % self._accumulate:
            raise ValueError(
                f"limit_train_batches={limit}: must be a multiple of accumulate_grad_batches={self._accumulate}, "
                "because row_cost deals the rows of whole optimizer steps"
            )

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
        assert self._cache is not None
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

    def _train_sampler(self) -> EndlessBatchSampler | DealtBatchSampler:
        assert self._order is not None
        if self.row_cost is None or not self._is_dealt:
            return self._order.in_turn(self.batch_size, first_row=self._next_row(), **self._ranks)
        return self._order.dealt(
            self.batch_size,
            row_cost=self.row_cost,
            synchronise=self.synchronise,
            accumulate=self._accumulate,
            first_row=self._step_begin(),
            skipped=self._unfinished,
            **self._ranks,
        )

    def _step_begin(self) -> int:
        """Return the place of an optimizer step's first row; with `overfit_batches`, all epochs have the same rows."""
        if self.trainer is not None and self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return batches_of_epoch(self.trainer) * self._rows_per_batch
        return self.consumed_rows

    def _next_row(self) -> int:
        return self._step_begin() + self._unfinished * self._rows_per_batch

    def _val_sampler(self) -> ShardedBatchSampler:
        indices = self._validation.indices(self._rows_per_batch)
        return ShardedBatchSampler(indices, self.batch_size, **self._ranks)
