import io
import re
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flash_train.data import (
    HubCorpus,
    JsonTokenizer,
    PackedDataModule,
    RecallCorpus,
    StdlibCorpus,
    TextCorpus,
)
from tests.support.data.corpora import random_texts
from tests.support.data.loops import FakeTrainer, equal_batches
from tests.support.data.tokenizers import write_tokenizer
from tests.support.processes import run_ranks


def test_batches_are_the_same_every_time_and_differ_by_seed(make_data):
    first, second, other = (list(islice(make_data(seed=seed).train_dataloader(), 30)) for seed in (7, 7, 8))
    assert all(map(equal_batches, first, second))
    assert not all(map(equal_batches, first, other))


def test_iterating_does_not_change_the_global_random_state(make_data):
    data = make_data()
    data.setup()
    before = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    assert torch.equal(torch.get_rng_state(), before)


def test_two_ranks_read_the_rows_of_one(make_data):
    alone = make_data(batch_size=4)
    ranks = [make_data(batch_size=2) for _ in range(2)]
    for rank, data in enumerate(ranks):
        data.trainer = FakeTrainer(rank, 2)
    for kind in ("train_dataloader", "val_dataloader"):
        whole = islice(getattr(alone, kind)(), 40)
        shards = zip(*(getattr(data, kind)() for data in ranks), strict=True)
        seen = [torch.cat([batch["tokens"] for batch in shard]) for shard in islice(shards, 40)]
        expected = [batch["tokens"] for batch in whole]
        if kind == "train_dataloader":
            assert all(map(torch.equal, seen, expected))
        else:  # distributed in turn: the same rows, in another order within a batch
            assert [sorted(batch.tolist()) for batch in seen] == [sorted(batch.tolist()) for batch in expected]


def test_workers_do_not_change_batches(make_data):
    here, there = make_data(), make_data(num_workers=2)
    assert all(map(equal_batches, islice(here.train_dataloader(), 12), islice(there.train_dataloader(), 12)))
    assert all(map(equal_batches, here.val_dataloader(), there.val_dataloader()))


def test_info_counts_documents_bytes_and_tokens_of_the_rows(make_data):
    data = make_data()
    info = data.info
    assert info["train"]["documents"] + info["val"]["documents"] == 200
    assert info["train"]["bytes"] == info["train"]["tokens"] - 2 * info["train"]["documents"]
    assert info["train"]["packing_efficiency"] == info["train"]["tokens"] / (info["train"]["rows"] * 64)
    assert info["capacity"] == max(info["train"]["capacity"], info["val"]["capacity"])
    batch = next(iter(data.train_dataloader()))
    assert batch["cu_seqlens"].shape == (3 * info["capacity"] + 1,)
    val = info["val"]
    assert data.bytes_per_token == val["bytes"] / (val["tokens"] - val["documents"])


def test_concat_gives_one_entry_per_row(make_data):
    batch = next(iter(make_data(packing="concat").train_dataloader()))
    assert batch["lengths"] == (64, 64, 64)
    assert batch["cu_seqlens"][:4].tolist() == [0, 64, 128, 192]


def test_resuming_with_another_batch_size_continues_with_the_next_row(make_data):
    data, one = make_data(batch_size=2), make_data(batch_size=1)
    data.load_state_dict({**make_data(batch_size=3).state_dict(), "consumed_rows": 15})
    assert data.consumed_rows == 15 and data.consumed_batches == 7
    rows = torch.cat([batch["tokens"] for batch in islice(one.train_dataloader(), 21)])
    found = torch.cat([batch["tokens"] for batch in islice(data.train_dataloader(), 3)])
    assert torch.equal(found, rows[15:])
    assert data.consumed_rows == 21


def test_checkpoints_of_0_2_continue_with_the_next_row(make_data):
    state = {**make_data(batch_size=3).state_dict(), "consumed_batches": 5, "rows_per_batch": 6}
    del state["consumed_rows"]
    data = make_data(batch_size=2)
    data.load_state_dict(state)
    assert data.consumed_rows == 30 and data.consumed_batches == 15


def test_resuming_on_other_data_prints_a_line(make_data, capsys):
    state = make_data().state_dict()
    make_data().load_state_dict(state)
    assert capsys.readouterr().err == ""
    make_data(seed=8).load_state_dict(state)
    assert capsys.readouterr().err == "flash-train: data: other data than in the checkpoint: seed was 7 and is 8\n"
    make_data(random_texts(200, 150, seed=1)).load_state_dict(state)
    assert capsys.readouterr().err.startswith("flash-train: data: other data than in the checkpoint: corpus_hash was")
    make_data(seq_len=32, seed=8).load_state_dict(state)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("seq_len was 64 and is 32, seed was 7 and is 8")


def test_resuming_on_another_kind_of_corpus_prints_a_line(make_data, capsys):
    text, recall = make_data(), PackedDataModule(RecallCorpus(n_pairs=8), seq_len=64, batch_size=3, seed=7)
    recall_to_text = "corpus_hash was recall-8-64-64 and is [0-9a-f]+, tokenizer was None and is bytes-259, packing was"
    text.load_state_dict({**recall.state_dict(), "consumed_rows": 12})
    assert re.match(f"flash-train: data: other data than in the checkpoint: {recall_to_text}", capsys.readouterr().err)
    recall.load_state_dict({**text.state_dict(), "consumed_rows": 15})
    assert re.search("corpus_hash was .* and is recall-8-64-64", capsys.readouterr().err)
    assert (text.consumed_batches, recall.consumed_batches) == (4, 5)


def test_checkpoints_store_the_tokenizer_and_its_special_tokens(make_data, tmp_path):
    state = make_data().state_dict()
    assert state["token_ids"] == {"bos": 256, "eos": 257, "pad": 258} and state["tokenizer_file"] is None
    file = write_tokenizer(tmp_path / "tokenizer.json", ["</s>"])
    tokenizer = JsonTokenizer(file, errors="replace")
    state = PackedDataModule(make_data().corpus, tokenizer, seq_len=64, batch_size=3, cache_dir=tmp_path).state_dict()
    assert state["token_ids"] == {"bos": None, "eos": 256, "pad": 256} and state["tokenizer_file"] == str(file)
    torch.save(state, tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == state
    assert (
        not {"token_ids", "tokenizer_file"}
        & PackedDataModule(RecallCorpus(), seq_len=65, batch_size=1).state_dict().keys()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "seq_len=1: must be an integer of at least 2"),
        ({"batch_size": 0}, "batch_size=0: must be an integer of at least 1"),
        ({"seed": -1}, "seed=-1: must be an integer of at least 0"),
        ({"seed": 2**64}, rf"seed={2**64}: must be in \[0, {2**64}\)$"),
        ({"val_batches": 0}, "data.val_batches=0: must be an integer of at least 1"),
        ({"val_tokens": 1}, "data.val_tokens=1: must be an integer of at least 2"),
        ({"num_workers": -1}, "data.num_workers=-1: must be an integer of at least 0"),
        ({"val_fraction": 1.0}, r"data.val_fraction=1.0: must be in \(0, 1\)"),
        ({"val_fraction": "0.1"}, r"data.val_fraction='0.1': must be in \(0, 1\)"),
        ({"seq_len": 256.0}, "seq_len=256.0: must be an integer of at least 2$"),
        ({"batch_size": True}, "batch_size=True: must be an integer of at least 1$"),
        ({"val_tokens": 1e6}, "data.val_tokens=1000000.0: must be an integer of at least 2, or null for all$"),
        ({"rank": 0.0, "world_size": 2}, "rank=0.0: must be an integer of at least 0$"),
        ({"accumulate": 0}, "accumulate=0: must be an integer of at least 1"),
        ({"row_cost": (0, 0)}, r"row_cost=\(0, 0\): must be two numbers of 0 or more, not both 0, or None for rows in"),
        ({"row_cost": (1, -1)}, r"row_cost=\(1, -1\): must be two numbers of 0 or more"),
        ({"row_cost": (1, float("nan"))}, r"row_cost=\(1, nan\): must be two numbers of 0 or more"),
        ({"row_cost": 3}, "row_cost=3: must be two numbers of 0 or more"),
        ({"row_cost": (1,)}, r"row_cost=\(1,\): must be two numbers of 0 or more"),
        ({"synchronise": "never"}, "synchronise='never': must be one of micro_batch, step"),
        ({"packing": "tight"}, "data.packing='tight': must be one of best_fit, concat"),
    ],
)
def test_impossible_options_are_refused(make_data, options, message):
    with pytest.raises(ValueError, match=message):
        make_data(**options)


CORPORA = "must be a corpus such as TextCorpus(path), HubCorpus(name), StdlibCorpus() or RecallCorpus(); this has no"
TOKENIZERS = (
    "must be ByteTokenizer(), JsonTokenizer(file) with a model's tokenizer.json, or another Tokenizer; this has no"
)


class Unhashed:
    name = "unhashed"

    def documents(self):
        yield from ()


class Streamed(Unhashed):
    """It streams, so it needs no `documents`."""

    streaming, documents = True, None

    def fingerprint(self):
        return "0"

    def stream(self, position=None):
        return iter(())


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("docs", f"corpus='docs': {CORPORA} name, fingerprint, documents"),
        (["a b c"], f"corpus=['a b c']: {CORPORA} name, fingerprint, documents"),
        (["a b c"] * 100, f"corpus=list: {CORPORA} name, fingerprint, documents"),
        (None, f"corpus=None: {CORPORA} name, fingerprint, documents"),
        (StdlibCorpus, "corpus=StdlibCorpus: must be an instance: StdlibCorpus(...)"),
        (RecallCorpus, "corpus=RecallCorpus: must be an instance: RecallCorpus(...)"),
        (Unhashed(), f"{CORPORA} fingerprint"),
    ],
    ids=lambda value: None if isinstance(value, str) and " " in value else type(value).__name__,
)
def test_what_is_no_corpus_is_refused(corpus, message):
    with pytest.raises(TypeError) as caught:
        PackedDataModule(corpus, seq_len=64, batch_size=1)
    assert str(caught.value).endswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("gpt2", f"tokenizer='gpt2': {TOKENIZERS} vocab_size, bos, eos, pad, fingerprint, dtype, encode_documents"),
        ("", f"tokenizer='': {TOKENIZERS} vocab_size, bos, eos, pad, fingerprint, dtype, encode_documents"),
        (JsonTokenizer, "tokenizer=JsonTokenizer: must be an instance: JsonTokenizer(...)"),
        (
            SimpleNamespace(vocab_size=5, bos=None, eos=0, pad=0, dtype=None),
            f"{TOKENIZERS} fingerprint, encode_documents",
        ),
    ],
    ids=["name", "empty", "class", "incomplete"],
)
def test_what_is_no_tokenizer_is_refused(tokenizer, message):
    with pytest.raises(TypeError) as caught:
        PackedDataModule(Streamed(), tokenizer, seq_len=64, batch_size=1)
    assert str(caught.value).endswith(message)


def test_parts_that_have_what_is_read_are_accepted():
    assert PackedDataModule(Streamed(), seq_len=64, batch_size=1).tokenizer.vocab_size == 259
    only_size = SimpleNamespace(vocab_size=300)
    assert PackedDataModule(RecallCorpus(), only_size, seq_len=65, batch_size=1).vocab_size == 300


def test_a_checkpoint_of_numpys_integers_has_plain_values(make_data):
    data = make_data(seq_len=np.int64(64), batch_size=np.int32(2), seed=np.int64(3), accumulate=np.int64(2))
    next(iter(data.train_dataloader()))
    file = io.BytesIO()
    torch.save(data.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["global_batch"] == 4


def test_a_folder_of_text_from_end_to_end(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.md").write_text(f"Document {i} says hello. " * 10)
    data = PackedDataModule(TextCorpus(tmp_path), seq_len=32, batch_size=2, cache_dir=tmp_path / "cache")
    batch = next(iter(data.train_dataloader()))
    assert "says hello." in data.tokenizer.decode(batch["tokens"][0].numpy())


def test_recall_needs_no_cache(tmp_path):
    data = PackedDataModule(RecallCorpus(), seq_len=256, batch_size=2, cache_dir=tmp_path)
    train, val = next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))
    assert train["tokens"].shape == val["tokens"].shape == (2, 256)
    assert data.bytes_per_token is None and data.info["chance"] == data.corpus.chance
    assert list(tmp_path.iterdir()) == []


def test_repr_shows_the_options(make_data, tmp_path):
    data = make_data()
    assert (
        str(data)
        == repr(data)
        == (
            "PackedDataModule(corpus=list, tokenizer=bytes-259, seq_len=64, batch_size=3, packing=best_fit, seed=7; "
            "not set up)"
        )
    )
    train, val = data.info["train"], data.info["val"]
    assert str(data).endswith(
        f"; train: {train['documents']} documents, {train['tokens']:,} tokens in {train['rows']} rows; "
        f"val: {val['documents']} documents, {val['tokens']:,} tokens in {val['rows']} rows)"
    )
    recall = PackedDataModule(RecallCorpus(), seq_len=256, batch_size=2, cache_dir=tmp_path)
    recall.setup()
    assert str(recall) == (
        "PackedDataModule(corpus=recall, seq_len=256, batch_size=2, packing=best_fit, seed=0; set up)"
    )
    streamed = PackedDataModule(HubCorpus("nowhere", streaming=True), seq_len=64, batch_size=3)
    assert "corpus=hub (streamed; train is its first chunk), " in str(streamed)


# -- loops without a Trainer


def test_loader_in_a_users_own_loop_continues(make_data):
    whole = list(islice(make_data().train_dataloader(), 9))
    data = make_data()
    loader = data.train_dataloader()
    assert isinstance(loader, DataLoader) and isinstance(data.val_dataloader(), DataLoader)
    seen = list(islice(loader, 4))
    assert data.consumed_batches == 4
    seen += islice(loader, 2)  # another iteration over the same loader
    state = data.state_dict()
    other = make_data()
    other.load_state_dict(state)
    seen += islice(other.train_dataloader(), 3)
    assert len(seen) == 9 and all(map(equal_batches, seen, whole)) and other.consumed_batches == 9


def test_loader_in_a_users_own_loop_does_not_change_the_random_state(make_data):
    loader = make_data().train_dataloader()
    before = torch.get_rng_state()
    batch = next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before) and isinstance(batch["lengths"], tuple)


def test_given_ranks_override_the_trainers(make_data):
    """The ranks of a context-parallel group get the same rows, independent of the Trainer's ranks."""
    shares = [make_data(batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    alone = make_data(batch_size=4)
    for data in shares:
        data.trainer = FakeTrainer(3, 4)
    for batches in islice(zip(*(data.train_dataloader() for data in (alone, *shares)), strict=True), 20):
        whole, *parts = (batch["tokens"] for batch in batches)
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"rank": 1}, "rank=1 world_size=None: must be both, or neither"),
        ({"rank": 2, "world_size": 2}, r"rank=2: must be in \[0, 2\)"),
        ({"rank": -1, "world_size": 2}, r"rank=-1: must be in \[0, 2\)"),
    ],
)
def test_impossible_ranks_are_refused(make_data, ranks, message):
    with pytest.raises(ValueError, match=message):
        make_data(**ranks)


@pytest.mark.slow
def test_two_ranks_under_fabric_have_the_rows_of_one(make_data, tmp_path):
    alone = make_data(random_texts(200, 150), batch_size=4)
    run_ranks("tests.support.data.fabric_run", 2, tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    train = [batch["tokens"] for batch in islice(alone.train_dataloader(), 6)]
    for *shares, whole in zip(*(rank["train"] for rank in ranks), train, strict=True):
        assert torch.equal(torch.cat(shares), whole)
    assert not torch.equal(ranks[0]["train"][0], ranks[1]["train"][0])
    rows = sorted(row.tolist() for rank in ranks for tokens in rank["val"] for row in tokens)
    expected = sorted(row.tolist() for batch in alone.val_dataloader() for row in batch["tokens"])
    assert [row for row in rows if set(row) != {258}] == [row for row in expected if set(row) != {258}]
    assert ranks[0]["consumed"] == ranks[1]["consumed"] == 6
    assert torch.equal(ranks[0]["weight"], ranks[1]["weight"])  # Fabric's DDP averaged their gradients
    assert not torch.equal(ranks[0]["loss"], ranks[1]["loss"])
