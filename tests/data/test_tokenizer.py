import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_train.data import ByteTokenizer, JsonTokenizer
from tests.support.data.tokenizers import write_tokenizer


@given(st.binary())
def test_bytes_round_trip(data):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.dtype == np.uint16 and bytes(ids.tolist()) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@given(st.text())
def test_text_round_trip_through_bytes(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_documents_are_framed_and_specials_are_not_shown():
    tokenizer = ByteTokenizer()
    (document,) = tokenizer.encode_documents([b"ab"], ["x"])
    assert document.tolist() == [256, 97, 98, 257]
    assert tokenizer.decode([*document, tokenizer.pad]) == "ab"
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(
    ("specials", "expected"),
    [
        (["<|endoftext|>"], (None, 256, 256)),
        (["<s>", "</s>"], (256, 257, 257)),
        (["[CLS]", "[SEP]", "[PAD]"], (256, 257, 258)),
        (["<|begin_of_text|>", "<|end_of_text|>"], (256, 257, 257)),
    ],
)
def test_json_specials_are_found_by_name(tmp_path, specials, expected):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", specials))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == expected
    assert tokenizer.vocab_size == 256 + len(specials)
    (document,) = tokenizer.encode_documents([b"hi"], ["x"])
    assert document.tolist() == [*([256] if tokenizer.bos else []), *tokenizer.encode("hi"), tokenizer.eos]


def test_json_round_trip_takes_specials_in_text_as_text(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["<|endoftext|>"]))
    text = "héllo <|endoftext|> wörld"
    assert tokenizer.eos not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_a_copy_in_another_process_gives_the_same_tokens(tmp_path, copied):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["<|endoftext|>"]))
    texts, sources = [b"a <|endoftext|> b", b"\xc3\xa9"], ["a.txt", "b.txt"]
    expected = [ids.tolist() for ids in tokenizer.encode_documents(texts, sources)]
    assert [ids.tolist() for ids in copied(tokenizer).encode_documents(texts, sources)] == expected


def test_invalid_utf8_is_raised_replaced_or_skipped(tmp_path):
    path = write_tokenizer(tmp_path / "t.json", ["</s>"])
    texts, sources = [b"good", b"bad \xff", b"fine"], ["a.txt", "b.txt", "c.txt"]
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 \(byte 4\); .*data\.errors=replace or skip"):
        JsonTokenizer(path).encode_documents(texts, sources)
    replace, skip = JsonTokenizer(path, "replace"), JsonTokenizer(path, "skip")
    assert [replace.decode(ids) for ids in replace.encode_documents(texts, sources)] == ["good", "bad \ufffd", "fine"]
    good, bad, fine = skip.encode_documents(texts, sources)
    assert (skip.decode(good), bad, skip.decode(fine)) == ("good", None, "fine")


def test_fingerprint_covers_the_file_and_the_errors(tmp_path):
    first = write_tokenizer(tmp_path / "1.json", ["</s>"])
    second = write_tokenizer(tmp_path / "2.json", ["</s>", "<s>"])
    prints = {
        JsonTokenizer(first).fingerprint,
        JsonTokenizer(second).fingerprint,
        JsonTokenizer(first, "skip").fingerprint,
    }
    assert len(prints) == 3
    assert JsonTokenizer(first).fingerprint == JsonTokenizer(first).fingerprint


def test_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="data.tokenizer=.*none.json: no such file"):
        JsonTokenizer(tmp_path / "none.json")
    (tmp_path / "other.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(ValueError, match="other.json: not a `tokenizers` JSON file"):
        JsonTokenizer(tmp_path / "other.json")
    with pytest.raises(ValueError, match="no end-of-document token"):
        JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["<s>"]))
    with pytest.raises(ValueError, match="data.errors='ignore': must be one of strict, replace, skip"):
        JsonTokenizer(tmp_path / "t.json", errors="ignore")
