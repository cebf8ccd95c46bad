import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

from flash_train.data import ByteTokenizer, JsonTokenizer
from flash_train.data.cache import is_whole, tokenize
from tests.data.conftest import ListCorpus, random_texts
from tests.data.test_tokenizer import write_tokenizer

TEXTS = random_texts(300, 100)


class LateCorpus(ListCorpus):
    """Lets no process begin to read before all have begun."""

    def __init__(self, texts: list[bytes], barrier) -> None:
        super().__init__(texts)
        self.barrier = barrier

    def documents(self):
        self.barrier.wait(timeout=300)
        yield from super().documents()


def build(barrier, cache_dir: Path, results) -> None:
    cache = tokenize(LateCorpus(TEXTS, barrier), ByteTokenizer(), cache_dir)
    results.put((str(cache.folder), int(cache.tokens.sum())))


def test_tokens_and_offsets_are_the_documents(tmp_path):
    cache = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert cache.tokens.dtype == np.uint16 and isinstance(cache.tokens, np.memmap)
    for i, text in enumerate(TEXTS):
        assert cache.tokens[cache.offsets[i] : cache.offsets[i + 1]].tolist() == [256, *text, 257]
    assert cache.sizes.tolist() == [len(text) for text in TEXTS]
    assert is_whole(cache.folder)


def test_a_second_time_nothing_is_built(tmp_path):
    first = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    before = (first.folder / "tokens.bin").stat()
    second = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert second.folder == first.folder and (second.folder / "tokens.bin").stat() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_key_covers_content_and_tokenizer(tmp_path):
    tokenizers = (ByteTokenizer(), JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]), "replace"))
    folders = {
        tokenize(ListCorpus(texts), tokenizer, tmp_path / "cache").folder
        for texts in (TEXTS, TEXTS[1:])
        for tokenizer in tokenizers
    }
    assert len(folders) == 4


def test_skipped_and_empty_documents_are_not_documents(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]), "skip")
    cache = tokenize(ListCorpus([b"a", b"\xff", b"", b"b"]), tokenizer, tmp_path)
    assert [tokenizer.decode(cache.tokens[b:e]) for b, e in zip(cache.offsets, cache.offsets[1:], strict=False)] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "keys.npy", "sizes.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_cache_is_rebuilt(tmp_path, name, damage):
    cache = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    path = cache.folder / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            content[: len(content) // 2] if damage == "cut" else content.replace(content[-40:-20], b"x" * 20)
        )
    assert not is_whole(cache.folder)
    again = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert (again.folder / name).read_bytes() == content and is_whole(again.folder)
    assert [entry.name for entry in tmp_path.iterdir()] == [again.folder.name]


def test_two_processes_build_the_same_at_once(tmp_path):
    context = multiprocessing.get_context("fork")  # importing everything anew would take most of the time
    barrier, results = context.Barrier(2), context.Queue()
    builders = [context.Process(target=build, args=(barrier, tmp_path, results)) for _ in range(2)]
    for process in builders:
        process.start()
    built = [results.get(timeout=300) for _ in builders]
    for process in builders:
        process.join(timeout=300)
    assert [process.exitcode for process in builders] == [0, 0]
    assert built[0] == built[1] and is_whole(Path(built[0][0]))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_build_leaves_nothing(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]))
    with pytest.raises(ValueError, match="text 1 is not UTF-8"):
        tokenize(ListCorpus([b"a", b"\xff"]), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_pickled_cache_carries_no_tokens(tmp_path):
    cache = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert cache.tokens.nbytes > len(pickle.dumps(cache))
    assert np.array_equal(pickle.loads(pickle.dumps(cache)).tokens, cache.tokens)
