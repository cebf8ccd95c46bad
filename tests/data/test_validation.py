"""The rows of a validation: the same documents in every run, whatever its seed, packing and length of rows."""

from collections import Counter

import pytest
import torch

from flash_train.data import (
    IGNORE_INDEX,
    PackedDataModule,
    RecallCorpus,
    Validated,
)
from tests.support.data.loops import FakeTrainer, equal_batches


def test_validation_is_every_document_once_whatever_the_seed_and_packing(make_data):
    data, other = make_data(), make_data(seed=8, packing="concat")
    assert len(data.val_dataloader()) == len(list(data.val_dataloader()))
    batches = list(data.val_dataloader())
    labels = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    assert labels == data.info["val"]["tokens"] - data.info["val"]["documents"]
    assert {batch["tokens"].shape for batch in batches} == {(3, 64)}
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(batches, other.val_dataloader(), strict=True))


def test_val_batches_limits_validation(make_data):
    all_of_it, some = list(make_data().val_dataloader()), list(make_data(val_batches=2).val_dataloader())
    assert len(some) == 2 and all(map(equal_batches, some, all_of_it))


def labelled(data):
    """How often each (token, label) pair is at a labelled position of the validation rows."""
    pairs = Counter()
    for batch in data.val_dataloader():
        seen = batch["labels"] != IGNORE_INDEX
        pairs.update(zip(batch["tokens"][seen].tolist(), batch["labels"][seen].tolist(), strict=True))
    return pairs


@pytest.mark.parametrize("tokens", [2, 3, 500, 1000])
def test_validation_reads_the_same_tokens_at_every_length(make_data, tokens):
    expected = None
    for seq_len, batch_size in ((16, 1), (64, 3), (2048, 2)):
        data = make_data(seq_len=seq_len, batch_size=batch_size, val_tokens=tokens, seed=seq_len)
        found = data.validated()
        assert tokens - 1 <= found.tokens <= tokens  # one token of the next document would have no label
        assert sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in data.val_dataloader()) == (
            found.tokens - found.documents
        )
        expected = expected or labelled(data)
        assert labelled(data) == expected and expected.total() > 0


def test_validation_on_more_tokens_than_there_are_reads_all(make_data):
    whole, asked = make_data(), make_data(val_tokens=10**6)
    assert asked.validated() == whole.validated() and whole.validated().tokens == whole.info["val"]["tokens"]
    assert labelled(asked) == labelled(whole)
    assert asked.info == whole.info and asked.bytes_per_token == whole.bytes_per_token


@pytest.mark.parametrize("world_size", [1, 2])
def test_validated_counts_equal_what_the_ranks_read(make_data, world_size):
    read = 0
    for rank in range(world_size):
        data = make_data(val_batches=2)
        data.trainer = FakeTrainer(rank, world_size)
        read += sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in data.val_dataloader())
    found = data.validated(world_size)
    assert found.rows == 2 * 3 * world_size and found.tokens > read > found.tokens - found.rows * 8


@pytest.mark.parametrize(("seq_len", "rows"), [(128, 7), (256, 3), (2048, 1)])
def test_recall_is_validated_on_enough_rows_for_the_tokens(seq_len, rows):
    data = PackedDataModule(RecallCorpus(), seq_len=seq_len, batch_size=1, val_tokens=1000)
    assert data.validated() == Validated(rows * seq_len, rows, None) and len(list(data.val_dataloader())) == rows
