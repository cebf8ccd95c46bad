"""Rows of files in every format: their text, with any content in other columns, and their place in the file."""

import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from flash_train.data import ByteTokenizer, JsonTokenizer, TextCorpus
from flash_train.data.cache import tokenize
from flash_train.data.corpora import rows
from flash_train.data.corpora.corpus import hash_files, hash_strings
from tests.support.data.tokenizers import write_tokenizer

EXPECTED = [b"one", "zwei\nü".encode(), b'three, "four"', b"five"]
TEXTS = [text.decode() for text in EXPECTED]


def documents(path: Path, **options) -> list[tuple[str, bytes]]:
    """(where, text) of each document of a file; `where` without the file's name."""
    found = TextCorpus(path, **options).documents()
    return [(document.source.removesuffix(f" of {path}"), document.text) for document in found]


def texts(path: Path, **options) -> list[bytes]:
    return [text for _, text in documents(path, **options)]


def said(capsys) -> list[str]:
    lines = [line.removeprefix("flash-train: ") for line in capsys.readouterr().err.splitlines()]
    return [line for line in lines if line.startswith("data: ")]


def as_lines() -> bytes:
    return "".join(json.dumps({"n": 1, "text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def as_list() -> bytes:
    return json.dumps([{"n": [1, {}], "text": text} for text in TEXTS], indent=2).encode()


def as_table(delimiter: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerows([["n", "text"], *([i, text] for i, text in enumerate(TEXTS))])
    return file.getvalue().encode()


FORMATS = {
    "lines.jsonl": as_lines(),
    "lines.ndjson": as_lines(),
    "lines.json": as_lines(),
    "bom.jsonl": b"\xef\xbb\xbf" + as_lines(),
    "bom.json": b"\xef\xbb\xbf" + as_list(),
    "list.json": as_list(),
    "list.jsonl": as_list(),
    "two_lists.json": as_list() + b"\n[]",
    "pretty.json": b"".join(json.dumps({"text": text}, indent=1).encode() for text in TEXTS),
    "table.csv": as_table(","),
    "table.tsv": as_table("\t"),
    "bom.csv": b"\xef\xbb\xbf" + as_table(","),
}


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":  # two frames, as parallel compressors write them
        codec, half = pyarrow.Codec("zstd"), len(content) // 2
        return bytes(codec.compress(content[:half])) + bytes(codec.compress(content[half:]))
    return gzip.compress(content, mtime=0) if suffix == ".gz" else content


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path, monkeypatch, name, compression, block):
    monkeypatch.setattr(rows, "BLOCK", block)
    path = tmp_path / (name + compression)
    path.write_bytes(compress(FORMATS[name], compression))
    assert texts(path) == EXPECTED


@pytest.mark.parametrize("name", ["a.py", "a.txt.gz", "a.MD.zst"])
def test_whole_files_of_more_kinds(tmp_path, name):
    (tmp_path / name).write_bytes(compress(b"print('hello')\n", Path(name).suffix))
    (document,) = TextCorpus(tmp_path).documents()
    assert (document.key, document.text) == (name, b"print('hello')\n")


def test_python_files_are_decoded_as_they_declare(tmp_path):
    source = "# coding: latin-1\nx = 'ü'\n"
    (tmp_path / "a.py").write_bytes(source.encode("latin-1"))
    assert texts(tmp_path / "a.py") == [source.encode()]


CHANGES = {
    "number to text": (1, "one"),
    "number to object": (1, {"a": 1}),
    "number to list": (1, [1]),
    "text to number": ("one", 1),
    "object to list": ({"a": 1}, [1]),
    "list to list of texts": ([1], ["one"]),
    "truth to text": (True, "yes"),
    "object to object with other types": ({"a": 1}, {"a": "one"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_column_may_change_its_type_in_a_large_file(tmp_path, change):
    before, after = CHANGES[change]
    text, path = "x" * 1000, tmp_path / "large.jsonl"
    with open(path, "w") as file:
        for value in [before] * 11_000 + [after]:
            file.write(json.dumps({"other": value, "text": text}) + "\n")
    assert path.stat().st_size > 10 << 20
    assert sum(1 for _ in TextCorpus(path).documents()) == 11_001


def test_another_column_may_have_any_content(tmp_path):
    deep = '{"a":' * 100 + "1" + "}" * 100
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'{"text": "a", "o": "\xff"}\n{"text": "b", "o": "\\ud800"}\n{"text": "c", "o": NaN}\n{"text": "d", "o": 1'
        + b"0" * 400
        + b'}\n{"text": "e", "o": '
        + deep.encode()
        + b"}\n"
    )
    assert texts(path) == [b"a", b"b", b"c", b"d", b"e"]
    (tmp_path / "x.csv").write_bytes(b'o,text\n\xff,a\n"\xfe",b\n')
    assert texts(tmp_path / "x.csv") == [b"a", b"b"]


def write_parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("empty", [{"text": pyarrow.array([], "string")}, {"text": pyarrow.array([], "null")}, {}])
def test_parquet_shard_without_rows_is_skipped(tmp_path, empty):
    write_parquet(tmp_path / "0.parquet", **empty)
    write_parquet(tmp_path / "1.parquet", text=["one", None, "two"], n=[1, 2, 3])
    write_parquet(tmp_path / "2.parquet", n=[{"a": 1}], text=["three"])
    assert texts(tmp_path) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"])
def test_parquet_columns_of_every_text_type(tmp_path, kind):
    if kind == "dictionary":
        column = pyarrow.array(["a", "b", None, "a"]).dictionary_encode()
    else:
        column = pyarrow.array(["a", "b", None, "a"]).cast(getattr(pyarrow, kind)())
    assert texts(write_parquet(tmp_path / "x.parquet", text=column)) == [b"a", b"b", b"a"]


def test_parquet_column_that_is_not_text_is_refused(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", text=[1, 2])
    with pytest.raises(ValueError, match="data.text_field=text: row 0 of .*x.parquet holds int64: must be text"):
        texts(path)
    with pytest.raises(ValueError, match="data.text_field=body: .*x.parquet has only text"):
        texts(path, text_field="body")
    assert texts(write_parquet(tmp_path / "null.parquet", text=[None, None])) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("half.jsonl", b'{"text": "good"}\n\n{"text": "half \\ud83d"}\n{"text": "\\ud83d\\ude00"}\n'),
        ("half.json", b'[{"text": "good"}, {"text": "half \\ud83d"}, {"text": "\\ud83d\\ude00"}]'),
    ],
)
def test_half_a_surrogate_pair_refuses_only_its_row(tmp_path, capsys, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    place = "line 3" if name.endswith("l") else "row 1"
    with pytest.raises(ValueError, match=f"data.path: {place} of .*{name} holds half a surrogate pair"):
        texts(path)
    assert texts(path, errors="skip") == [b"good", "😀".encode()]
    assert said(capsys) == [f"data: data.errors=skip: rows of {path} that are not UTF-8, left out: 1"]
    assert texts(path, errors="replace") == [b"good", "half \ufffd".encode(), "😀".encode()]
    for tokenizer in (ByteTokenizer(), JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]))):
        assert len(tokenize(TextCorpus(path, errors="replace"), tokenizer, tmp_path / "cache").keys) == 3


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_text_that_is_not_utf8_refuses_only_its_row(tmp_path, kind):
    path, bad, kept = tmp_path / f"x.{kind}", b"bad \xe2\x82 \xff", "kept \ufffd".encode()
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([b"good", bad, kept])}), path)
    elif kind == "csv":
        path.write_bytes(b"text\ngood\n" + bad + b"\n" + kept + b"\n")
    else:
        path.write_bytes(b'{"text": "good"}\n{"text": "' + bad + b'"}\n{"text": "' + kept + b'"}\n')
    place = {"jsonl": "line 2", "json": "row 1", "csv": "line 3", "parquet": "row 1"}[kind]
    with pytest.raises(ValueError, match=f"data.path: {place} of .*x.{kind} is not UTF-8; convert it, or set data.err"):
        texts(path)
    assert texts(path, errors="skip") == [b"good", kept]
    assert texts(path, errors="replace") == [b"good", bad.decode(errors="replace").encode(), kept]


def test_document_sources_give_the_line_in_the_file(tmp_path):
    lines = tmp_path / "x.jsonl"
    lines.write_text('\n{"text": "a"}\n\n{"text": null}\n{"n": 1}\n{"text": "b"}\n')
    assert documents(lines) == [("line 2", b"a"), ("line 6", b"b")]
    table = tmp_path / "x.csv"
    table.write_text('text,n\n"a\nb",1\n\n,2\n"c\n",3\nd\n')
    assert documents(table) == [("line 2", b"a\nb"), ("line 6", b"c\n"), ("line 8", b"d")]
    parquet = write_parquet(tmp_path / "x.parquet", text=["a", None] * 100)
    assert [place for place, _ in documents(parquet)] == [f"row {i}" for i in range(0, 200, 2)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "cannot be read as jsonl: line 3: Expecting ',' delimiter"),
        ("x.jsonl", b'{"text": "a"}\n[1]\n', "text_field=text: line 2 of .*x.jsonl is a list: must be an object"),
        ("x.jsonl", b'{"text": "a"}\n{"text": ["b"]}\n', "text_field=text: line 2 of .*x.jsonl holds list: must be"),
        ("x.jsonl", b'{"text": "a", "o": ' + b"[" * 100_000, "cannot be read as jsonl: line 1: nested too deeply"),
        ("x.json", b'[{"text": "a"}, {"text": "b"]', "cannot be read as json: row 1: Expecting ',' delimiter"),
        ("x.json", b'[{"text": "a"}', "cannot be read as json: the list has no end after row 0"),
        ("x.json", b'["a"]', "data.text_field=text: row 0 of .*x.json is text: must be an object with this key"),
        ("x.json", b"version https://git-lfs.github.com", "x.json cannot be read as json: row 0: Expecting value"),
        ("x.csv", b'text\na\n"b', "cannot be read as csv: line 3: unexpected end of data"),
        ("x.csv", b"id;text\n1;a\n", "data.text_field=text: .*x.csv has only id;text"),
        (
            "x.csv",
            b"id,text\n1,Hello, world\n",
            "line 2: has 3 fields and the header 2; put text with a comma in quotes",
        ),
        ("x.tsv", b"id\ttext\n\n1\ta\tb\n", "line 3: has 3 fields and the header 2; put text with a tab in quotes"),
        ("x.csv", b"a" * 1000 + b"\nb\n", "x.csv has only a{80}…$"),
        ("x.csv", "text\na\n".encode("utf-16"), "data.text_field=text: .*x.csv has only "),
        ("x.parquet", b"", "x.parquet cannot be read as parquet"),
        ("x.parquet", b"PAR1 no PAR1", "x.parquet cannot be read as parquet"),
        ("x.jsonl.gz", compress(as_lines(), ".gz")[:-9], "x.jsonl.gz cannot be read as jsonl: Compressed file ended"),
        ("x.jsonl.gz", as_lines(), "x.jsonl.gz cannot be read as jsonl: Not a gzipped file"),
        ("x.jsonl.zst", compress(as_lines(), ".zst")[:-5], "x.jsonl.zst cannot be read as jsonl: Truncated"),
        ("x.txt.zst", b"no", "x.txt.zst cannot be read as zst: ZSTD decompress failed"),
    ],
)
def test_malformed_files_name_the_file_and_the_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        texts(tmp_path / name)
    assert "\n" not in str(raised.value)
    str(raised.value).encode()


def test_pyarrow_without_zstandard_ends_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl.zst").write_bytes(compress(as_lines(), ".zst"))
    monkeypatch.setattr(pyarrow, "Codec", SimpleNamespace(is_available=lambda name: False))
    with pytest.raises(ValueError, match=r"data.path: .*x.jsonl.zst: this pyarrow cannot read .zst; decompress"):
        texts(tmp_path / "x.jsonl.zst")


def test_folder_keeps_files_with_text_and_lists_those_without(tmp_path, capsys):
    files = {"a.txt": "a", "package.json": '{"name": "x"}', "numbers.csv": "x,y\n1,2\n", "b.json": '[{"text": "b"}]'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert texts(tmp_path) == [b"a", b"b"]
    assert said(capsys) == ["data: data.text_field=text: files without it, not read: numbers.csv, package.json"]
    # A file that is given by name raises instead.
    for path in (tmp_path / "package.json", [tmp_path / "a.txt", tmp_path / "package.json"]):
        with pytest.raises(ValueError, match="data.text_field=text: .*package.json has only name"):
            list(TextCorpus(path).documents())
    for name in ("a.txt", "b.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match="data.text_field=text: .*package.json has only name"):
        texts(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match="data.text_field=text: .*rows.jsonl has only body"):
        texts(tmp_path)


def test_key_missing_in_some_rows_is_accepted_and_in_all_rows_fails_early(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text('{"n": 1}\n' * 900 + '{"text": "a"}\n')
    assert texts(path) == [b"a"]
    assert said(capsys) == [f"data: data.text_field=text: rows of {path} without text, left out: 900"]
    path.write_text('{"n": 1}\n' * 1000 + "never read\n")
    with pytest.raises(ValueError, match="data.text_field=text: .*x.jsonl has only n"):
        texts(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.json.gz", "x.csv", "x.jsonl.zst", "x.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    texts_, path = ["x" * 20_000] * 2000, tmp_path / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts_}), path, row_group_size=100)
    else:
        fields = [{"text": text} for text in texts_]
        content = "".join(json.dumps(field) + "\n" for field in fields) if "jsonl" in name else json.dumps(fields)
        content = "text\n" + "\n".join(texts_) if "csv" in name else content
        path.write_bytes(compress(content.encode(), path.suffix))
    corpus = TextCorpus(path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in corpus.documents()) == 2000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # of 40 MB
    finally:
        tracemalloc.stop()


def test_fingerprint_changes_for_rows_read_with_replace_or_skip(tmp_path):
    """The fingerprint changes for rows that earlier versions read differently, and stays the same for UTF-8."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    prints = {errors: TextCorpus(tmp_path, errors=errors).fingerprint() for errors in ("strict", "replace", "skip")}

    def earlier(errors: str) -> str:
        return hash_strings([hash_files([("a.jsonl", tmp_path / "a.jsonl")]), "text", errors])

    assert [prints[errors] == earlier(errors) for errors in prints] == [True, False, False]


def test_long_documents_in_tables(tmp_path):
    limit, text = csv.field_size_limit(), "x" * 1_000_000
    (tmp_path / "x.csv").write_text(f"text\n{text}\n")
    assert texts(tmp_path / "x.csv") == [text.encode()]
    assert csv.field_size_limit() == limit


def test_random_json_lists_are_read_as_the_json_module_reads_them(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    for _ in range(50):
        values = [
            {"text": "".join(map(chr, random.integers(32, 0x2FF, size=random.integers(0, 40)))), "o": [None, 1.5, {}]}
            for _ in range(random.integers(1, 8))
        ]
        monkeypatch.setattr(rows, "BLOCK", int(random.integers(1, 50)))
        indent = [None, 2][random.integers(2)]
        (tmp_path / "x.json").write_text(json.dumps(values, ensure_ascii=bool(random.integers(2)), indent=indent))
        assert texts(tmp_path / "x.json") == [value["text"].encode() for value in values]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.TSV", b"text\nhello, world\n", [b"hello, world"]),
        ("a.tsv", b"text\nhello, world\n", [b"hello, world"]),
        ("a.tsv.csv", b"text\nc\td\n", [b"c\td"]),
        ("a.CSV", b"text,id\nc,1,\n", [b"c"]),  # an empty last field holds no text
    ],
)
def test_the_last_suffix_decides_what_separates_fields(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == expected


def test_parquet_with_two_columns_of_the_name(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet cannot be read as parquet: 2 columns have the name text"):
        texts(tmp_path / "x.parquet")


@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("tsv", "\t")])
def test_tables_with_two_columns_of_the_name(tmp_path, kind, separator):
    (tmp_path / f"x.{kind}").write_text(separator.join(["text", "id", "text"]) + "\n" + separator.join("abc") + "\n")
    with pytest.raises(ValueError, match=f"x.{kind} cannot be read as {kind}: 2 columns have the name text"):
        texts(tmp_path / f"x.{kind}")
