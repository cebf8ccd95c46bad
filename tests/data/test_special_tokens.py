"""Which tokens begin and end documents: from files, by the usual names of special tokens, or an error."""

import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flash_train.data import JsonTokenizer
from tests.support.data.tokenizers import write_tokenizer

SPECIALS = ["<s>", "</s>", "<|endoftext|>", "<|im_end|>"]  # ids 256 to 259


@pytest.fixture
def folder(tmp_path):
    """Writes a tokenizer.json with these special tokens, and the files next to it."""

    def write(specials=SPECIALS, **files):
        write_tokenizer(tmp_path / "tokenizer.json", list(specials))
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        return tmp_path / "tokenizer.json"

    return write


def ids(path, **options):
    tokenizer = JsonTokenizer(path, **options)
    (document,) = tokenizer.encode_documents([b"hi"], ["x"])
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    assert document.tolist() == [*begin, *tokenizer.encode("hi"), tokenizer.eos]
    return tokenizer.bos, tokenizer.eos


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "<|endoftext|>"}}, (None, 258)),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<s>"}}, (256, 258)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "bos_token": None}}, (None, 259)),
        ({"tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False}}, (None, 257)),
        ({"config": {"eos_token_id": 258, "bos_token_id": 256}}, (256, 258)),
        ({"config": {"eos_token_id": [259, 258], "bos_token_id": 256}}, (256, 259)),
        ({"special_tokens_map": {"eos_token": "<|endoftext|>", "bos_token": "<s>"}}, (256, 258)),
        # The first file that names a token decides.
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": 258}}, (None, 259)),
        ({"config": {"eos_token_id": 258}, "special_tokens_map": {"eos_token": "<|im_end|>"}}, (256, 258)),
        ({"tokenizer_config": {"model_max_length": 512}, "config": {"eos_token_id": 258}}, (256, 258)),
        # The default ids that transformers writes are ordinary tokens.
        ({"config": {"eos_token_id": 2, "bos_token_id": 1}, "special_tokens_map": {"eos_token": "</s>"}}, (256, 257)),
        # One token between two documents is enough.
        ({"tokenizer_config": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}}, (None, 258)),
    ],
)
def test_special_tokens_are_read_from_files_next_to_the_tokenizer(folder, files, expected):
    assert ids(folder(**files)) == expected


def test_special_tokens_agree_with_transformers(folder, tmp_path):
    written = PreTrainedTokenizerFast(tokenizer_file=str(folder()), eos_token="<|im_end|>", bos_token="<s>")
    written.save_pretrained(tmp_path / "theirs")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    found = ids(tmp_path / "theirs" / "tokenizer.json")
    assert found == (theirs.bos_token_id, theirs.eos_token_id) == (256, 259)


def test_given_tokens_override_files(folder):
    path = folder(tokenizer_config={"eos_token": "<|endoftext|>", "bos_token": "<s>"})
    assert ids(path, eos="<|im_end|>") == (256, 259)
    assert ids(path, bos="<|im_end|>") == (259, 258)
    assert ids(path, bos="") == (None, 258)
    assert ids(path, eos="a") == (256, JsonTokenizer(path).encode("a")[0])  # an ordinary token, given by the caller


def test_ordinary_tokens_with_special_names_are_not_used(tmp_path):
    vocabulary = {letter: i for i, letter in enumerate(["a", "b", "</s>", "<s>", "[SEP]", "[CLS]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"no end-of-document token is known; give data\.eos=TOKEN"):
        JsonTokenizer(tmp_path / "tokenizer.json")
    assert ids(tmp_path / "tokenizer.json", eos="</s>") == (None, 2)
    with pytest.raises(ValueError, match=r"data\.eos=: every document ends with a token; give data\.eos=TOKEN"):
        JsonTokenizer(tmp_path / "tokenizer.json", eos="")


@pytest.mark.parametrize(
    ("specials", "files", "says"),
    [
        (["<a>", "<b>"], {}, "no end-of-document token is known"),
        (["</s>", "<|endoftext|>"], {}, "may end documents with '</s>' or '<|endoftext|>'"),
        (["<b>"], {"tokenizer_config": {"eos_token": "<end>"}}, "tokenizer_config.json gives eos_token='<end>', which"),
        (["<b>"], {"special_tokens_map": {"eos_token": "<end>"}}, "special_tokens_map.json gives eos_token='<end>'"),
    ],
)
def test_unclear_end_token_is_refused_and_the_advice_works(folder, specials, files, says):
    path = folder(specials, **files)
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        JsonTokenizer(path)
    advice = re.search(
        r"give data\.eos=TOKEN, a token of the vocabulary; its special tokens: (\S+?)(,|$)", str(refusal.value)
    )
    assert ids(path, eos=advice[1])[1] == 256 + specials.index(advice[1])


@pytest.mark.parametrize(
    ("specials", "files", "says"),
    [
        (["<s>", "[CLS]", "</s>"], {}, "may begin documents with '<s>' or '[CLS]'"),
        (["<s>", "</s>"], {"tokenizer_config": {"eos_token": "</s>", "bos_token": "<begin>"}}, "bos_token='<begin>'"),
    ],
)
def test_unknown_begin_token_can_be_given_or_left_out(folder, specials, files, says):
    path = folder(specials, **files)
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        JsonTokenizer(path)
    assert "data.bos= for none" in str(refusal.value)
    assert ids(path, bos="<s>")[0] == 256 and ids(path, bos="")[0] is None


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_given_token_must_be_in_the_vocabulary(folder, name):
    with pytest.raises(ValueError, match=rf"data\.{name}=<end>: is not in the vocabulary of .*; give") as refusal:
        JsonTokenizer(folder(config={"eos_token_id": 259}), **{name: "<end>"})
    assert "<|im_end|>" in str(refusal.value)


def test_special_tokens_beyond_the_embeddings_of_a_model_are_not_used(folder):
    """In fine-tuned models, a pad token was often added to the tokenizer but not to the embeddings."""
    path = folder(
        ["<s>", "</s>", "<pad>"], tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    )
    assert JsonTokenizer(path).pad == 258 and JsonTokenizer(path).vocab_size == 259
    within = JsonTokenizer(path, embeddings=258)
    assert (within.bos, within.eos, within.pad, within.vocab_size) == (256, 257, 257, 258)
    with pytest.raises(ValueError, match=r"documents end with '</s>', id 257, and the model has embeddings") as refusal:
        JsonTokenizer(path, embeddings=257)
    assert "its special tokens: <s>" in str(refusal.value) and "</s>" not in str(refusal.value).split(";")[-1]
    with pytest.raises(ValueError, match=r"data\.eos=</s>: has id 257, and the model has embeddings for ids below 257"):
        JsonTokenizer(path, embeddings=257, eos="</s>")


def test_added_tokens_that_text_can_contain_need_embeddings(tmp_path):
    path = write_tokenizer(tmp_path / "t.json", ["</s>"])
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["hello"])
    tokenizer.save(str(path))
    limited = JsonTokenizer(path, embeddings=257)
    assert limited.vocab_size == 258 and 257 in limited.encode("hello")


def test_fingerprint_depends_on_the_special_tokens(folder):
    path = folder()
    prints = {JsonTokenizer(path, eos=eos, bos=bos).fingerprint for eos in SPECIALS[1:3] for bos in ("<s>", "")}
    assert len(prints) == 4


def test_a_description_names_the_tokens_and_their_origin(folder):
    def describe(**options):
        return JsonTokenizer(folder(**options.pop("files", {})), **options).special_tokens.description

    files = {"tokenizer_config": {"eos_token": "<|endoftext|>", "bos_token": "<s>"}}
    assert describe(files=files) == "begin with '<s>' (256), end with '<|endoftext|>' (258) by tokenizer_config.json"
    assert describe(files=files, bos="", eos="</s>") == (
        "begin with no token by data.bos, end with '</s>' (257) by data.eos"
    )


def test_files_belong_to_the_tokenizer_json_of_their_folder(folder, tmp_path):
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    folder(tokenizer_config=config)
    other = write_tokenizer(tmp_path / "other.json", ["</s>", "<|im_end|>"])
    assert ids(other) == (None, 256)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert ids(other) == (None, 257)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_is_named(folder, tmp_path, content):
    path = folder()
    (tmp_path / "special_tokens_map.json").write_text(content)
    with pytest.raises(ValueError, match=r"special_tokens_map\.json is not (JSON|a JSON object)"):
        JsonTokenizer(path)


def test_the_dtype_holds_every_id_that_is_used(folder):
    assert JsonTokenizer(folder(["</s>"])).dtype == np.uint16
