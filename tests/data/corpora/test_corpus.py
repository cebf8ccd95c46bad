import sysconfig
from pathlib import Path

import numpy as np
import pytest

from flash_train.data import ByteTokenizer, Document, JsonTokenizer, PackedDataModule, StdlibCorpus, load_corpus
from flash_train.data.cache import tokenize
from flash_train.data.split import split
from tests.support.data.corpora import ListCorpus, random_texts
from tests.support.data.tokenizers import write_tokenizer


def write_library(root: Path) -> Path:
    for name in (
        "a.py",
        "pkg/b.py",
        "site-packages/no.py",
        "pkg/dist-packages/no.py",
        "pkg/__pycache__/c.py",
        "data.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    return root


def test_standard_library_leaves_installed_packages_out(tmp_path):
    corpus = StdlibCorpus(write_library(tmp_path))
    assert [document.key for document in corpus.documents()] == ["a.py", "pkg/b.py"]
    assert [document.text for document in corpus.documents()] == [b"# a.py\n", b"# pkg/b.py\n"]


def test_standard_library_of_this_interpreter_is_read(tmp_path, monkeypatch):
    corpus = StdlibCorpus()
    assert corpus.root == Path(sysconfig.get_path("stdlib"))
    assert "json/decoder.py" in corpus.files and not any("site-packages" in name for name in corpus.files)
    data = PackedDataModule(corpus, seq_len=2048, batch_size=1, cache_dir=tmp_path)
    train, val = data.info["train"], data.info["val"]
    assert train["bytes"] + val["bytes"] == sum(len(document.text) for document in corpus.documents())
    assert train["tokens"] == train["bytes"] + 2 * train["documents"]
    assert 0.02 < val["documents"] / (train["documents"] + val["documents"]) < 0.08
    # Nothing is tokenised the second time.
    monkeypatch.setattr(ByteTokenizer, "encode_documents", None)
    again = PackedDataModule(StdlibCorpus(), seq_len=2048, batch_size=1, cache_dir=tmp_path)
    assert again.info == data.info


def test_standard_library_can_be_read_by_a_strict_utf8_tokenizer(tmp_path):
    write_library(tmp_path / "lib")
    declared = "# -*- coding: koi8-r -*-\nx = 'Питон'\n"
    (tmp_path / "lib/declared.py").write_bytes(declared.encode("koi8-r"))
    (tmp_path / "lib/undeclared.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "lib/unknown.py").write_bytes(b"# -*- coding: rot13 -*-\nx = '\xff'\n")
    corpus = StdlibCorpus(tmp_path / "lib")
    assert [document.text for document in corpus.documents()] == [b"# a.py\n", declared.encode(), b"# pkg/b.py\n"]
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]))
    assert len(tokenize(corpus, tokenizer, tmp_path / "cache").keys) == 3
    # The fingerprint does not depend on the tokenizer.
    before = corpus.fingerprint()
    (tmp_path / "lib/declared.py").write_bytes(declared.encode("cp1251"))
    assert StdlibCorpus(tmp_path / "lib").fingerprint() != before
    (tmp_path / "lib/declared.py").write_text(declared)
    assert StdlibCorpus(tmp_path / "lib").fingerprint() == before


def test_default_corpus_can_be_read_by_a_strict_utf8_tokenizer():
    assert all(document.text.decode() is not None for document in StdlibCorpus().documents())


def test_missing_standard_library_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no .py files under"):
        StdlibCorpus(tmp_path)


def test_fingerprint_follows_content_and_names(tmp_path):
    corpus = StdlibCorpus(write_library(tmp_path))
    before = corpus.fingerprint()
    assert StdlibCorpus(tmp_path).fingerprint() == before
    (tmp_path / "a.py").write_text("# A.py\n")
    assert StdlibCorpus(tmp_path).fingerprint() != before
    (tmp_path / "a.py").write_text("# a.py\n")
    (tmp_path / "pkg/b.py").rename(tmp_path / "pkg/c.py")
    assert StdlibCorpus(tmp_path).fingerprint() != before


def parts(tmp_path: Path, texts: list[bytes], val_fraction: float):
    return split(tokenize(ListCorpus(texts), ByteTokenizer(), tmp_path), val_fraction)


def texts_of(part) -> list[bytes]:
    lengths = part.lengths.tolist()
    return [bytes(part.tokens(i, 1, length - 2).tolist()) for i, length in enumerate(lengths)]


def test_split_is_a_partition_near_the_fraction(tmp_path):
    texts = random_texts(2000, 20)
    train, val = parts(tmp_path, texts, 0.1)
    assert sorted(texts_of(train) + texts_of(val)) == sorted(texts)
    assert 130 < len(val) < 270
    assert val.bytes == sum(map(len, texts_of(val)))


def test_a_document_keeps_its_part_when_others_come(tmp_path):
    texts = random_texts(300, 20)
    _, before = parts(tmp_path, texts[:200], 0.1)
    _, after = parts(tmp_path, texts, 0.1)
    assert texts_of(before) == texts_of(after)[: len(before)]


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("val_fraction", [0.001, 0.999])
def test_neither_part_of_a_tiny_corpus_is_empty(tmp_path, n, val_fraction):
    train, val = parts(tmp_path, random_texts(n, 20), val_fraction)
    assert len(train) >= 1 and len(val) >= 1 and len(train) + len(val) == n


def test_the_tail_of_a_single_document_is_held_out(tmp_path):
    (text,) = random_texts(1, 2000, seed=3)
    train, val = parts(tmp_path, [text], 0.1)
    whole = [256, *text, 257]
    assert train.tokens(0, 0, int(train.lengths[0])).tolist() + val.tokens(0, 0, int(val.lengths[0])).tolist() == whole
    assert int(val.lengths[0]) == round(0.1 * len(whole))
    with pytest.raises(ValueError, match="one document of 3 tokens"):
        parts(tmp_path, [b"x"], 0.1)


def test_equal_documents_still_make_two_parts(tmp_path):
    cache = tokenize(ListCorpus([b"same", b"same", b"same"]), ByteTokenizer(), tmp_path)
    cache.__dict__["keys"] = np.zeros(3, dtype=np.uint64)
    train, val = split(cache, 0.5)
    assert len(train) >= 1 and len(val) >= 1


@pytest.mark.parametrize("val_fraction", [0, 1, -0.1])
def test_impossible_fraction_is_named(tmp_path, val_fraction):
    with pytest.raises(ValueError, match="data.val_fraction="):
        parts(tmp_path, [b"a", b"b"], val_fraction)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (("a", "mail 1", "text"), "Document: the text of mail 1 is str: must be bytes, such as text.encode()"),
        (("a", "mail 1", None), "Document: the text of mail 1 is NoneType: must be bytes, such as text.encode()"),
        ((1, "mail 1", b"text"), "Document: key=1: must be a string, such as a path"),
    ],
)
def test_a_document_of_other_types_is_refused(document, message):
    with pytest.raises(TypeError) as caught:
        Document(*document)
    assert str(caught.value) == message


def test_load_corpus_names_the_kinds(tmp_path):
    assert load_corpus("stdlib", root=write_library(tmp_path)).files == ["a.py", "pkg/b.py"]
    with pytest.raises(ValueError, match="data=stdlb: must be one of stdlib, text, hub, recall"):
        load_corpus("stdlb")
