"""A corpus that is tokenised while it is read: rows hold every document, and a resumed run continues."""

import csv
import json
import shutil
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from flash_train.data import ByteTokenizer, HubCorpus, PackedDataModule
from flash_train.data.errors import DataError
from flash_train.data.order.deal import deal
from flash_train.data.packing import PackedIndex, pack
from flash_train.data.stream import StreamedRows, StreamOrder, limit_entries, tokens_of_chunk
from tests.support.data.corpora import StreamedList, random_texts, write_parquet
from tests.support.data.loops import FakeTrainer, StopAtBatch, equal_batches, fit
from tests.support.tiers import slow_after

SEQ_LEN = 16
TEXTS = random_texts(2000, 30, seed=5)  # chunks of 4,096 tokens, which is 256 documents


def make(cache_dir: Path, corpus=None, **options) -> PackedDataModule:
    options = {"seq_len": SEQ_LEN, "batch_size": 3, "seed": 7, "val_fraction": 0.1, **options}
    return PackedDataModule(corpus or StreamedList(TEXTS), ByteTokenizer(), cache_dir=cache_dir, **options)


def pieces(rows) -> list[list[int]]:
    """The tokens of every entry of rows, without padding, sorted."""
    found = []
    for row in rows:
        end = 0
        for length in row["lengths"]:
            tokens = row["tokens"][end : end + length].tolist()
            end += length
            if tokens[0] != ByteTokenizer.pad:
                found.append(tokens)
    return sorted(found)


def pieces_of(texts) -> list[list[int]]:
    whole = [[256, *text, 257] for text in texts]
    return sorted(tokens[i : i + SEQ_LEN] for tokens in whole for i in range(0, len(tokens), SEQ_LEN))


def epoch(rows: StreamedRows) -> list[dict]:
    """The rows of all chunks, once."""
    order, seen = StreamOrder(rows, seed=0), []
    for i in count():
        (place,) = order.rows(i, 1)
        if place in seen:
            return [rows[place] for place in seen]
        seen.append(place)


def test_first_batch_needs_only_the_first_chunk(tmp_path):
    corpus = StreamedList(TEXTS)
    data = make(tmp_path, corpus)
    assert len(data.info["val"]) and corpus.read == list(range(256))
    batches = iter(data.train_dataloader())
    next(batches)
    assert corpus.read == list(range(256))
    rows = data.info["train"]["rows"]
    list(islice(batches, rows // 3))
    assert corpus.read == list(range(512)) and corpus.opened == [0]  # the stream continued and was not opened again


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_every_document_outside_validation_is_trained_on_once(tmp_path, packing):
    data = make(tmp_path, packing=packing)
    data.setup()
    rows, val = data._train, list(make(tmp_path, batch_size=1).val_dataloader())
    held_out = {tuple(piece) for piece in pieces({**b, "tokens": b["tokens"][0]} for b in val)}
    val_texts = [text for text in TEXTS if {tuple(p) for p in pieces_of([text])} <= held_out]
    train_texts = [text for text in TEXTS if text not in val_texts]
    assert 10 < len(val_texts) < 60
    if packing == "best_fit":
        assert pieces(epoch(rows)) == pieces_of(train_texts)
    else:
        tokens = torch.cat([row["tokens"] for row in epoch(rows)])
        assert int((tokens != ByteTokenizer.pad).sum()) == sum(len(text) + 2 for text in train_texts)


def test_a_copy_of_a_validation_document_in_a_later_chunk_is_left_out(tmp_path):
    held_out = make(tmp_path / "1")
    held_out.setup()
    text = bytes(held_out._val.part.tokens(0, 1, int(held_out._val.part.lengths[0]) - 2).tolist())
    data = make(tmp_path / "2", StreamedList([*TEXTS, text, text]))
    data.setup()
    assert pieces_of([text])[0] not in pieces(epoch(data._train))


def test_every_pass_has_the_same_rows_in_another_order(tmp_path):
    data = make(tmp_path, batch_size=1)
    data.setup()
    n = len(epoch(data._train))
    places = [chunk_row for ((_, chunk_row),) in islice(data._train_sampler(), 3 * n)]
    first, second, third = places[:n], places[n : 2 * n], places[2 * n :]
    assert sorted(first) == sorted(second) == sorted(third) and first != second != third
    assert [chunk for chunk, _ in first] == [chunk for chunk, _ in second] == sorted(chunk for chunk, _ in first)


def test_batches_depend_on_the_seed_not_on_the_cache(tmp_path):
    first = list(islice(make(tmp_path / "1").train_dataloader(), 500))
    again = list(islice(make(tmp_path / "1").train_dataloader(), 500))
    afresh = list(islice(make(tmp_path / "2").train_dataloader(), 500))
    other = list(islice(make(tmp_path / "1", seed=8).train_dataloader(), 500))
    assert (
        all(map(equal_batches, first, again))
        and all(map(equal_batches, first, afresh))
        and not any(map(equal_batches, first, other))
    )
    assert {batch["cu_seqlens"].shape for batch in first} == {first[0]["cu_seqlens"].shape}


def test_tokenised_chunks_are_reused(tmp_path):
    list(islice(make(tmp_path).train_dataloader(), 300))
    corpus = StreamedList(TEXTS)
    list(islice(make(tmp_path, corpus).train_dataloader(), 300))
    assert corpus.read == []


def test_workers_and_ranks_see_the_same_stream(tmp_path):
    here, there = make(tmp_path / "1", batch_size=4), make(tmp_path / "2", batch_size=4, num_workers=2)
    expected = list(islice(here.train_dataloader(), 300))
    assert all(map(equal_batches, expected, islice(there.train_dataloader(), 300)))
    ranks = [make(tmp_path / "3", batch_size=2) for _ in range(2)]
    for rank, data in enumerate(ranks):
        data.trainer = FakeTrainer(rank, 2)
    for whole, *shards in zip(expected, *(data.train_dataloader() for data in ranks), strict=False):
        assert torch.equal(whole["tokens"], torch.cat([shard["tokens"] for shard in shards]))


@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize(
    "stop", slow_after(1, [150, 3, 700, 1100])
)  # in the first chunk, later, in the last, in the second pass
def test_resumed_run_continues_the_stream(tmp_path, stop, keep_cache):
    rows = make(tmp_path / "0")
    rows.setup()
    assert 700 * 3 < len(epoch(rows._train)) < 1100 * 3
    whole = fit(make(tmp_path / "1"), tmp_path, steps=stop + 20)
    path = tmp_path / "stop.ckpt"
    fit(make(tmp_path / "1"), tmp_path, steps=stop + 20, callbacks=[StopAtBatch(stop, path)])
    if not keep_cache:
        shutil.rmtree(tmp_path / "1")
    corpus = StreamedList(TEXTS)
    assert fit(make(tmp_path / "1", corpus), tmp_path, steps=stop + 20, resume=path) == whole[stop:]
    # Of the earlier chunks, only the first is read again, because it has the validation documents.
    assert (len(corpus.read) <= 4 * 256 and len(corpus.opened) <= 3) if not keep_cache else corpus.read == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_of_a_stream_are_dealt_and_each_chunk_is_packed_once(tmp_path, monkeypatch, num_workers):
    """A step of 40 rows has rows of two or three chunks, in another order than the stream's."""
    monkeypatch.setattr("flash_train.data.cache.BATCH_DOCUMENTS", 8)
    monkeypatch.setattr("flash_train.data.stream.CHUNK_ROWS", 16)
    packed = []
    monkeypatch.setattr("flash_train.data.stream.pack", lambda *given: packed.append(len(given[0])) or pack(*given))
    options = {"batch_size": 5, "accumulate": 4, "rank": 1, "world_size": 2, "row_cost": (0.0, 1.0)}
    data = make(tmp_path, num_workers=num_workers, **options)
    data.setup()
    del packed[:]
    batches = list(islice(data.train_dataloader(), 24))
    rows, n_packed = data._train, len(packed)
    order = StreamOrder(rows, seed=7)
    chunks = {chunk for chunk, _ in order.rows(0, 6 * 40)}
    ahead = 4 if num_workers else 0  # chunks of the next steps, for the batches that workers load ahead
    assert len(chunks) > 10 and len(chunks) <= n_packed <= len(chunks) + ahead
    for step in range(6):
        places = order.rows(step * 40, 40)
        costs = np.array([sum(length**2 for length in rows[place]["lengths"]) for place in places], float)
        for batch, dealt in zip(batches[4 * step :], deal(costs, 2, 5, "micro_batch")[:, 1], strict=False):
            assert torch.equal(batch["tokens"], torch.stack([rows[places[i]]["tokens"] for i in dealt]))


def test_overfit_batches_repeats_the_first_batches_of_a_stream(tmp_path):
    first = [tokens for _, tokens in fit(make(tmp_path / "cache"), tmp_path, steps=3)]
    seen = fit(make(tmp_path / "cache"), tmp_path, steps=6, overfit_batches=3)
    assert [tokens for _, tokens in seen] == 2 * first and first[0] != first[1]


def test_checkpoint_lists_the_consumed_documents(tmp_path):
    path = tmp_path / "stop.ckpt"
    fit(
        make(tmp_path),
        tmp_path,
        steps=400,
        callbacks=[StopAtBatch(300, path)],
    )
    checkpoint = torch.load(path, weights_only=True)
    before, chunk = checkpoint["PackedDataModule"]["stream"]["chunks"]
    assert chunk["documents"] == 256 * chunk["chunk"] == before["documents"] + 256
    assert chunk["position"] == {"next": chunk["documents"]} and before["first"] < chunk["first"] <= 900


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 50)])
def test_another_batch_size_continues_with_the_next_row(tmp_path, before, after):
    data = make(tmp_path, batch_size=1)
    stream = [batch["tokens"] for batch in islice(data.train_dataloader(), 1500)]
    path, consumed = tmp_path / "stop.ckpt", 1200 // before
    fit(make(tmp_path, batch_size=before), tmp_path, steps=2000, callbacks=[StopAtBatch(consumed, path)])
    resumed = make(tmp_path, batch_size=after)
    resumed.load_state_dict(torch.load(path, weights_only=True)["PackedDataModule"])
    first = consumed * before
    assert torch.equal(next(iter(resumed.train_dataloader()))["tokens"], torch.cat(stream[first : first + after]))


def test_position_in_other_rows_is_not_reused(tmp_path, capsys):
    data = make(tmp_path)
    batches = list(islice(data.train_dataloader(), 400))
    state = data.state_dict()
    state["consumed_rows"] = 900
    state["stream"] = data._train.state(900)
    other = make(tmp_path, packing="concat")
    other.load_state_dict(state)
    assert "packing was best_fit and is concat" in capsys.readouterr().err
    straight = islice(make(tmp_path, packing="concat").train_dataloader(), 300, 302)
    assert all(map(equal_batches, straight, other.train_dataloader())) and len(batches) == 400


def test_resuming_with_streaming_changed_prints_a_line(tmp_path, capsys):
    class NotStreamed(StreamedList):
        streaming = False

    streamed, whole = make(tmp_path), make(tmp_path, NotStreamed(TEXTS))
    whole.load_state_dict(streamed.state_dict())
    assert capsys.readouterr().err.endswith("streaming was True and is False\n")
    streamed.load_state_dict(whole.state_dict())
    assert capsys.readouterr().err.endswith("streaming was False and is True\n")


@pytest.mark.parametrize("n", [1, 2, 256, 512, 513])  # a single document; corpora that end with a chunk
def test_corpora_that_end_at_a_chunk_or_are_tiny(tmp_path, n):
    texts = [b"%09d abcdef" % i for i in range(n)]  # each as long as a row: 256 make a chunk
    data = make(tmp_path, StreamedList(texts), batch_size=1)
    batches = list(islice(data.train_dataloader(), 2 * n + 3))
    assert all(batch["tokens"].shape == (1, SEQ_LEN) for batch in batches)


def test_an_empty_corpus_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the corpus 'list' is empty"):
        make(tmp_path / "cache", StreamedList([b"", b""])).setup()
    assert list((tmp_path / "cache").iterdir()) == []


def test_later_chunks_with_shorter_documents_have_no_more_entries_in_a_row(tmp_path):
    texts = [bytes([i % 256]) * 60 for i in range(600)] + [b"%d" % i for i in range(2000)]
    data = make(tmp_path, StreamedList(texts), seq_len=64, batch_size=2)
    batches = list(islice(data.train_dataloader(), 700))
    assert {batch["cu_seqlens"].shape for batch in batches} == {batches[0]["cu_seqlens"].shape}
    assert max(len(batch["lengths"]) for batch in batches) > 2 * 8


def test_rows_with_too_many_segments_are_cut():
    index = pack(np.array([2] * 40 + [20, 20]), 20)
    cut = limit_entries(index, 8)
    assert int(np.diff(cut.row_offsets).max()) == 7 and cut.lengths.tolist() == index.lengths.tolist()
    assert set(index.row_offsets) <= set(cut.row_offsets) and cut.capacity == 8
    assert isinstance(cut, PackedIndex) and len(limit_entries(pack(np.array([], int), 20, "concat"), 8)) == 0


@pytest.mark.parametrize("seq_len", [16, 1024, 16_384, 131_072, 1 << 20])
def test_chunk_size_is_bounded_in_rows_and_tokens(seq_len):
    tokens = tokens_of_chunk(seq_len)
    assert tokens >= 16 * seq_len and (tokens == 256 * seq_len or tokens >= 4 << 20)
    assert tokens <= max(4 << 20, 16 * seq_len)


def write_rows(folder: Path, kind: str) -> None:
    folder.mkdir()
    for shard in range(3):
        rows = [{"n": i, "text": f"{shard} {i}" if i % 7 else None} for i in range(60)]
        if kind == "parquet":
            write_parquet(folder / f"train-{shard}.parquet", rows)
        elif kind == "csv":
            with open(folder / f"train-{shard}.csv", "w") as file:
                writer = csv.DictWriter(file, ["n", "text"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            (folder / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])  # csv goes through `datasets`, like a data set on the hub
def test_hub_stream_continues_at_its_position(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    write_rows(tmp_path / "set", kind)
    corpus = HubCorpus(str(tmp_path / "set"), streaming=True)
    whole = list(corpus.documents())
    assert len(whole) == 3 * 51
    for taken in (0, 1, 50, 51, 52, 130, 153):
        stream = corpus.stream()
        assert len(list(islice(stream, taken))) == taken
        position = json.loads(json.dumps(stream.position()))
        assert list(corpus.stream(position)) == whole[taken:], taken


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_resumed_run_continues_a_hub_stream(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr("flash_train.data.cache.BATCH_DOCUMENTS", 8)
    monkeypatch.setattr("flash_train.data.stream.CHUNK_ROWS", 4)
    write_rows(tmp_path / "set", kind)

    def data() -> PackedDataModule:
        return make(tmp_path / "cache", HubCorpus(str(tmp_path / "set"), streaming=True))

    whole, path = fit(data(), tmp_path, steps=40), tmp_path / "stop.ckpt"
    fit(data(), tmp_path, steps=40, callbacks=[StopAtBatch(15, path)])
    shutil.rmtree(tmp_path / "cache")
    assert fit(data(), tmp_path, steps=40, resume=path) == whole[15:]


class Breaking(StreamedList):
    """Its documents from number `good` on cannot be read."""

    good = 400

    def stream(self, position=None):
        return BreakingStream(self, super().stream(position))


class BreakingStream:
    def __init__(self, corpus, stream):
        self.corpus, self.stream, self.position = corpus, stream, stream.position

    def __iter__(self):
        for document in self.stream:
            if len(self.corpus.read) > self.corpus.good:
                raise ValueError("data.path: broken.jsonl cannot be read as jsonl: line 6")
            yield document


def test_an_error_in_a_later_chunk_is_one_of_the_data(tmp_path):
    data = make(tmp_path, Breaking(TEXTS))
    with pytest.raises(DataError, match="next documents of the stream cannot be read: data.path: broken.jsonl cannot"):
        for _ in islice(data.train_dataloader(), 1000):
            pass
    corpus = Breaking(TEXTS)
    corpus.good = 3
    with pytest.raises(ValueError, match="broken") as raised:  # before training, the caller names the key
        make(tmp_path / "other", corpus).setup()
    assert not isinstance(raised.value, DataError)
