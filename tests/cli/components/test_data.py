"""Corpora from the command line: the line that describes them, globs, unreadable files, streaming."""

import json
import shutil
from pathlib import Path

import pytest

from flash_train.cli.run.report import describe_data
from flash_train.data import ByteTokenizer, PackedDataModule, TextCorpus
from tests.support.cli.runs import losses_of, summary_of
from tests.support.processes import start_ranks

PART = {"documents": 1234, "tokens": 5_000_000, "bytes": 1, "rows": 80, "packing_efficiency": 0.95, "capacity": 8}
INFO = {"corpus": "text", "corpus_hash": "0123456789abcdef", "seq_len": 16384, "train": PART}


@pytest.fixture
def hub(tmp_path: Path, tiny, monkeypatch) -> list[str]:
    """Overrides of a streamed run on 6,000 short rows; each chunk has about 256 rows of 64 tokens."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    rows = "".join(json.dumps({"body": f"row {i} " * (1 + i % 5), "n": i}) + "\n" for i in range(6000))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(rows)
    tiny = [text for text in tiny if not text.startswith(("data=text", "data.path"))]
    return [*tiny, "data=hub", f"data.name={tmp_path / 'set'}", "data.streaming=true", "data.text_field=body"]


def test_the_data_line_has_the_documents_held_out_for_validation():
    val = {**PART, "documents": 1, "tokens": 999, "rows": 2}
    assert describe_data({**INFO, "val": val}) == (
        "text, 1,234 documents, 5.0M tokens in 80 rows of 16,384 (95.00% used); "
        "held out for validation: 1 document, 999 tokens in 2 rows; hash 0123456789ab"
    )
    assert describe_data({**INFO, "val": val, "streaming": True}).startswith(
        "text, streamed, its first chunk has 1,234 documents, 5.0M tokens"
    )


def test_a_run_counts_its_documents(in_process, tiny, corpus, tmp_path):
    out = in_process(*tiny)
    data = PackedDataModule(
        TextCorpus(corpus), ByteTokenizer(), seq_len=64, batch_size=2, cache_dir=tmp_path / "cache"
    ).info
    (line,) = [line for line in out.splitlines() if line.startswith("data: ")]
    train, val = data["train"]["documents"], data["val"]["documents"]
    assert train + val == 40 and f" {train} documents, " in line
    assert f"held out for validation: {val} document" in line
    assert summary_of(tmp_path / "run")["data"]["val"]["documents"] == val


def test_a_glob_of_folders_of_any_depth_is_found(in_process, tiny, corpus, tmp_path):
    in_process(*tiny, f"data.path='{corpus}/**/*.txt'")
    assert summary_of(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("pattern", ["{corpus}/**/*.rst", "{corpus}/nowhere/**/*.txt", "{corpus}/no*/**/*.txt"])
def test_glob_without_matches_ends_in_one_line(flash_train, tiny, corpus, pattern):
    for name in ("one", "two"):  # links in which `glob` would never end
        (corpus / name).symlink_to(corpus)
    pattern = pattern.format(corpus=corpus)
    code, lines = flash_train(*tiny, f"data.path='{pattern}'")
    assert code == 1 and len(lines) == 1, lines
    assert f"data.path={pattern}: no such file or folder, and no glob that matches any" in lines[0]


@pytest.mark.slow
def test_a_streamed_run_is_resumed_exactly(in_process, hub, tmp_path):
    hub = [*hub, "max_steps=40", "batch_size=30", "model.residual_dropout=0.1"]
    out = in_process(*hub, f"run_dir={tmp_path / 'whole'}")
    assert "data: hub, streamed, its first chunk has " in out
    in_process(*hub, f"run_dir={tmp_path / 'parts'}", "stop_after=25")
    shutil.rmtree(tmp_path / "cache")
    in_process(*hub, f"run_dir={tmp_path / 'parts'}", "resume=last")
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole") and len(losses_of(tmp_path / "whole")) == 40
    chunks = sorted(path.name[-6:] for path in (tmp_path / "cache").iterdir())
    assert chunks == ["000000", "000002", "000003"]  # the second is not read again


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "half \\ud83d"}\n', ["data.path: line 1 of ", "a.jsonl holds half a surrogate pair"]),
        ("a.csv", b"body\nx\n", ["data.text_field=text: ", "a.csv has only body"]),
        ("a.json", b"{", ["data.path: ", "a.json cannot be read as json: row 0"]),
        ("a.jsonl.gz", b"x", ["data.path: ", "a.jsonl.gz cannot be read as jsonl: Not a gzipped file"]),
        ("a.parquet", b"", ["data.path: ", "a.parquet cannot be read as parquet"]),
        ("a.rst", b"x", ["data.path=", "nothing to read there", "a.rst (another kind of file)", ".csv"]),
    ],
)
def test_files_that_cannot_be_read_end_in_one_line(flash_train, tiny, tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    code, lines = flash_train(*tiny, f"data.path={tmp_path / name}")
    assert code == 1 and len(lines) == 1, lines
    assert all(words in lines[0] for words in says), lines


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_breaks_later_ends_in_one_line(flash_train, hub, tmp_path, workers):
    (tmp_path / "set" / "train.jsonl").rename(tmp_path / "set" / "train-00000-of-00002.jsonl")
    (tmp_path / "set" / "train-00001-of-00002.jsonl").write_text('{"body": "good"}\n{"body": broken}\n')
    options = ["max_steps=200", "batch_size=40", f"data.num_workers={workers}"]
    code, lines = flash_train(*hub, *options)
    assert code == 1 and len(lines) == 1, lines
    assert "the next documents of the stream cannot be read: data.path: " in lines[0]
    assert "train-00001-of-00002.jsonl cannot be read as jsonl: line 2" in lines[0]
    assert f"; once it is repaired, run_dir={tmp_path / 'run'} resume=last continues the run" in lines[0]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name > "step-000001.ckpt"


def test_ranks_with_other_data_are_refused(tiny, tmp_path):
    for rank in range(2):
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(f'{{"text": "{rank} {i}"}}\n' for i in range(400)))
    tiny = [text for text in tiny if not text.startswith("data.path")]
    path = f"data.path='{tmp_path}/rank${{oc.env:LOCAL_RANK}}.jsonl'"
    processes = start_ranks("flash_train.cli.train", 2, *tiny, path, "trainer.devices=2", "parallel=ddp")
    ended = ["".join(process.communicate(timeout=200)) for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "the ranks read different data: rank 1 has other values than rank 0: corpus_hash " in "".join(ended), ended
    assert "Traceback" not in "".join(ended)


def test_a_file_is_no_data_set_of_the_hub(flash_train, hub, tmp_path):
    file = tmp_path / "set" / "train.jsonl"
    code, lines = flash_train(*hub, f"data.name={file}")
    assert code == 1 and len(lines) == 1, lines
    assert f"data.name={file}: is a file; give its folder, or data=text data.path={file}" in lines[0]
