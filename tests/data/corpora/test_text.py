from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from flash_train.data import HubCorpus, PackedDataModule, TextCorpus
from tests.support.data.corpora import write_jsonl, write_parquet


def texts(corpus) -> list[bytes]:
    return [document.text for document in corpus.documents()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    write_jsonl(root / "c.jsonl", [{"text": "row 0", "n": 1}, {"text": None, "n": 2}, {"text": "row 2 é", "n": 3}])
    write_parquet(root / "d.parquet", [{"text": "parquet 0"}, {"text": "parquet 1"}])
    (root / "sub").mkdir()
    (root / ".git").mkdir()
    for name, text in {
        "a.txt": "txt",
        "sub/b.MD": "md",
        "e.rst": "no",
        ".git/x.txt": "no",
        "sub/empty.txt": "",
    }.items():
        (root / name).write_text(text)
    return root


def test_folders_are_searched_recursively(folder):
    expected = [b"txt", b"row 0", "row 2 é".encode(), b"parquet 0", b"parquet 1", b"md", b""]
    assert texts(TextCorpus(folder)) == expected
    assert [document.key for document in TextCorpus(folder).documents()][::5] == ["a.txt", "sub/b.MD"]


def test_rows_without_text_are_counted(folder, capsys):
    assert len(texts(TextCorpus(folder))) == 7
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flash-train: data: ")]
    assert first == f"flash-train: data: data.path={folder}: not read: e.rst (another kind of file); .git (hidden)"
    assert second == f"flash-train: data: data.text_field=text: rows of {folder / 'c.jsonl'} without text, left out: 1"


def test_files_globs_and_lists(folder):
    assert texts(TextCorpus(folder / "a.txt")) == [b"txt"]
    assert texts(TextCorpus(f"{folder}/*.txt")) == [b"txt"]
    assert texts(TextCorpus(f"{folder}/**/*.[mM][dD]")) == [b"md"]
    assert texts(TextCorpus([folder / "sub" / "b.MD", f"{folder}/*.txt", folder / "a.txt"])) == [b"md", b"txt"]


def test_row_keys_depend_on_content_only(tmp_path):
    one = write_jsonl(tmp_path / "1.jsonl", [{"text": "a"}, {"text": "b"}])
    other = write_jsonl(tmp_path / "2.jsonl", [{"text": "b"}, {"text": "c"}])
    (_, b_of_one), (b_of_other, _) = ([d.key for d in TextCorpus(path).documents()] for path in (one, other))
    assert b_of_one == b_of_other


def test_the_text_field_can_be_chosen(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"body": "hello", "n": 1}])
    assert texts(TextCorpus(path, text_field="body")) == [b"hello"]
    with pytest.raises(ValueError, match="data.text_field=text: .*x.jsonl has only body, n"):
        texts(TextCorpus(path))
    with pytest.raises(ValueError, match="data.text_field=n: line 1 of .*x.jsonl holds int: must be text"):
        texts(TextCorpus(path, text_field="n"))


def test_rows_that_are_not_utf8(tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "bad \xff"}\n')
    with pytest.raises(ValueError, match="line 2 of .*bad.jsonl is not UTF-8; convert it, or set data.errors=repl"):
        texts(TextCorpus(path))
    assert texts(TextCorpus(path, errors="replace")) == [b"good", "bad \ufffd".encode()]
    assert texts(TextCorpus(path, errors="skip")) == [b"good"]
    assert (
        capsys.readouterr().err
        == f"flash-train: data: data.errors=skip: rows of {path} that are not UTF-8, left out: 1\n"
    )


def test_malformed_rows_name_the_file(tmp_path):
    (tmp_path / "x.jsonl").write_text("not json\n")
    with pytest.raises(ValueError, match="data.path: .*x.jsonl cannot be read as json"):
        texts(TextCorpus(tmp_path / "x.jsonl"))
    (tmp_path / "x.parquet").write_text("not parquet\n")
    with pytest.raises(ValueError, match="data.path: .*x.parquet cannot be read as parquet"):
        texts(TextCorpus(tmp_path / "x.parquet"))


def test_missing_and_unreadable_paths_are_errors(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="data.path=.*nowhere"):
        TextCorpus(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"data.path=.*\*.html"):
        TextCorpus(f"{folder}/*.html")
    with pytest.raises(ValueError, match=r"data.path=.*e.rst: nothing to read there .*; readable are files in .txt"):
        TextCorpus(folder / "e.rst")
    with pytest.raises(ValueError, match=r"data.path=\[\]: must be a file"):
        TextCorpus([])


def test_an_empty_corpus_is_an_error(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    data = PackedDataModule(TextCorpus(tmp_path / "*.*"), seq_len=8, batch_size=1, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"data.path=.*\*\.\*: the corpus is empty: it has no document with any text"):
        data.prepare_data()
    assert list((tmp_path / "cache").iterdir()) == []


def test_fingerprint_follows_content_and_field(folder):
    before = TextCorpus(folder).fingerprint()
    assert TextCorpus(folder).fingerprint() == before != TextCorpus(folder, text_field="n").fingerprint()
    (folder / "a.txt").write_text("TXT")
    assert TextCorpus(folder).fingerprint() != before


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_hub_reads_a_local_folder(tmp_path, monkeypatch, write, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    suffix = write.__name__.removeprefix("write_")
    write(tmp_path / "set" / f"train.{suffix}", [{"body": "one", "n": 1}, {"body": "two", "n": 2}])
    write(tmp_path / "set" / f"test.{suffix}", [{"body": "three", "n": 3}])
    corpus = HubCorpus(str(tmp_path / "set"), text_field="body", streaming=streaming)
    test = HubCorpus(str(tmp_path / "set"), split="test", text_field="body", streaming=streaming)
    assert texts(corpus) == [b"one", b"two"] and texts(test) == [b"three"]
    assert corpus.fingerprint() != test.fingerprint()
    before = corpus.fingerprint()
    write(tmp_path / "set" / f"train.{suffix}", [{"body": "uno", "n": 1}, {"body": "two", "n": 2}])
    assert corpus.fingerprint() != before
    assert texts(corpus) == [b"uno", b"two"]


def test_hub_errors_name_the_data_set(tmp_path):
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": "one"}])
    with pytest.raises(FileNotFoundError, match="data.name=.*nowhere"):
        texts(HubCorpus(str(tmp_path / "nowhere"), streaming=True))
    with pytest.raises(ValueError, match="data.name=.*set: .*tset"):
        texts(HubCorpus(str(tmp_path / "set"), split="tset", streaming=True))
    with pytest.raises(ValueError, match="data.text_field=body: .*set/train.jsonl has only text"):
        texts(HubCorpus(str(tmp_path / "set"), text_field="body", streaming=True))


def test_hub_reads_a_folder_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": "one"}])
    assert texts(HubCorpus("~/set")) == [b"one"]
    assert HubCorpus("~/set").fingerprint() == HubCorpus(str(tmp_path / "set")).fingerprint()


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_says_what_to_do_with_a_data_set_of_save_to_disk(tmp_path, streaming):
    from datasets import Dataset

    Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "set")
    corpus = HubCorpus(str(tmp_path / "set"), streaming=streaming)
    for read in (corpus.fingerprint, lambda: texts(corpus)):
        with pytest.raises(ValueError, match="set: `save_to_disk` wrote it, .*; write it by `to_parquet`"):
            read()


def test_hub_lists_files_that_it_does_not_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    write_jsonl(tmp_path / "set" / "a.jsonl", [{"text": "one"}])
    write_jsonl(tmp_path / "set" / "b.jsonl", [{"text": "two"}])
    corpus = HubCorpus(str(tmp_path / "set"))
    (tmp_path / "set" / "README.md").write_text("# a card")
    corpus.fingerprint()
    assert "not read" not in capsys.readouterr().err
    write_parquet(tmp_path / "set" / "c.parquet", [{"text": "three"}])
    write_jsonl(tmp_path / "far" / "d.jsonl", [{"text": "four"}])
    (tmp_path / "set" / "link").symlink_to(tmp_path / "far")
    corpus.fingerprint()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flash-train: data: ")]
    reason = "`datasets` reads files of one kind, and follows no links to folders"
    assert line == (
        f"flash-train: data: data.name={tmp_path / 'set'}: not read: c.parquet, link/d.jsonl ({reason}); "
        f"data=text data.path={tmp_path / 'set'} reads every kind"
    )
    assert texts(corpus) == [b"one", b"two"]
    assert texts(TextCorpus(tmp_path / "set"))[:4] == [b"# a card", b"one", b"two", b"three"]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_reads_only_the_text_field_of_local_files(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "types"
    write_jsonl(folder / "a.jsonl", [{"text": "x" * 1000, "o": 1}] * 11_000 + [{"text": "last", "o": {"a": [1]}}])
    assert len(texts(HubCorpus(str(folder), streaming=streaming))) == 11_001
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "null")}), write_parquet_folder(tmp_path))
    assert texts(HubCorpus(str(tmp_path / "shards"), streaming=streaming)) == [b"one"]
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "a.jsonl").write_text('{"text": "half \\ud83d"}\n{"text": "good"}\n')
    with pytest.raises(ValueError, match="line 1 of .*half/a.jsonl holds half a surrogate pair"):
        texts(HubCorpus(str(tmp_path / "half"), streaming=streaming))
    skipping = HubCorpus(str(tmp_path / "half"), streaming=streaming, errors="skip")
    assert texts(skipping) == [b"good"]
    assert skipping.fingerprint() != HubCorpus(str(tmp_path / "half"), streaming=streaming).fingerprint()


def write_parquet_folder(tmp_path: Path) -> Path:
    """Makes a folder with a shard that has rows; returns the path for another shard that sorts before it."""
    write_parquet(tmp_path / "shards" / "1.parquet", [{"text": "one", "n": 1}])
    return tmp_path / "shards" / "0.parquet"


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_names_a_data_set_that_datasets_cannot_read(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.csv").write_text('text,n\na,1\n"b\n')
    with pytest.raises(ValueError, match="data.name=.*set: ") as raised:
        texts(HubCorpus(str(tmp_path / "set"), streaming=streaming))
    assert "\n" not in str(raised.value) and "generating the dataset" not in str(raised.value)
