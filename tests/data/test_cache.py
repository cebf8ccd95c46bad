import errno
import io
import multiprocessing
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from flash_train.data import ByteTokenizer, JsonTokenizer, lock, notice
from flash_train.data import cache as cache_module
from flash_train.data.cache import tokenize
from tests.support.data.corpora import ListCorpus, random_texts
from tests.support.data.tokenizers import write_tokenizer

TEXTS = random_texts(300, 100)


FORK = multiprocessing.get_context("fork")  # spawned processes would spend most of the time on imports


class GatedCorpus(ListCorpus):
    """Counts the processes that read it, and calls `gate` in each before it does."""

    def __init__(self, gate=lambda: None) -> None:
        super().__init__(TEXTS)
        self.gate, self.readers = gate, FORK.Semaphore(0)

    def documents(self):
        self.readers.release()
        self.gate()
        yield from super().documents()


def start(corpus: ListCorpus, cache_dir: Path, results):
    """Starts a process that puts the folder of the corpus's cache and the sum of its tokens into `results`."""

    def build() -> None:
        cache = tokenize(corpus, ByteTokenizer(), cache_dir)
        results.put((str(cache.folder), int(cache.tokens.sum())))

    process = FORK.Process(target=build, daemon=True)
    process.start()
    return process


def ended(processes) -> list[int]:
    """The exit codes of `processes`."""
    for process in processes:
        process.join(timeout=60)
    return [process.exitcode for process in processes]


def lines(capfd, until: str) -> str:
    """The text on standard error up to the line with `until`."""
    deadline, text = time.monotonic() + 60, ""
    while until not in text and time.monotonic() < deadline:
        time.sleep(0.01)
        text += capfd.readouterr().err
    return text


def test_tokens_and_offsets_are_the_documents(tmp_path):
    cache = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert cache.tokens.dtype == np.uint16 and isinstance(cache.tokens, np.memmap)
    for i, text in enumerate(TEXTS):
        assert cache.tokens[cache.offsets[i] : cache.offsets[i + 1]].tolist() == [256, *text, 257]
    assert cache.sizes.tolist() == [len(text) for text in TEXTS]
    assert cache.is_whole()


def test_finished_cache_is_not_built_again(tmp_path):
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


def test_skipped_and_empty_documents_are_not_documents(tmp_path, capsys):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]), "skip")
    cache = tokenize(ListCorpus([b"a", b"\xff", b"", b"b"]), tokenizer, tmp_path)
    assert capsys.readouterr().err == "flash-train: data: data.errors=skip: documents that are not UTF-8, left out: 1\n"
    assert [tokenizer.decode(cache.tokens[b:e]) for b, e in zip(cache.offsets, cache.offsets[1:], strict=False)] == [
        "a",
        "b",
    ]


class Shaped(ByteTokenizer):
    """A user's tokenizer, which returns ids in a form of its own."""

    fingerprint, dtype = "shaped", np.uint16  # also a dtype's class is a dtype

    def __init__(self, form) -> None:
        self.form = form

    def encode_documents(self, texts, sources):
        return [self.form([256, *text, 257]) for text in texts]


@pytest.mark.parametrize("form", [np.array, list, lambda ids: np.repeat(np.array(ids), 2)[::2]])
def test_a_users_tokenizer_may_return_integers_of_any_dtype(tmp_path, form):
    cache = tokenize(ListCorpus(TEXTS), Shaped(form), tmp_path)
    assert cache.tokens.tolist() == tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path).tokens.tolist()
    assert cache.is_whole()


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (lambda ids: [*ids, 259], "ids from 97 to 259"),
        (lambda ids: [-1, *ids], "ids from -1 to 257"),
        (lambda ids: np.array(ids, dtype=np.float32), "ndarray of shape (3,)"),
        (lambda ids: [], "[]"),
    ],
    ids=["beyond", "negative", "float", "empty"],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path, form, given):
    with pytest.raises(ValueError) as caught:
        tokenize(ListCorpus([b"a"]), Shaped(form), tmp_path)
    message = f"tokenizer=Shaped: encode_documents gave {given} for text 0: must be one or more integers from 0 to 258"
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


NAMES = ("tokens.bin", "offsets.npy", "keys.npy", "sizes.npy", "meta.json")
DAMAGES = [(name, damage) for name in NAMES for damage in ("missing", "cut", "changed")]
DAMAGES.remove(("tokens.bin", "changed"))  # not detected, because it would mean reading all tokens at every start


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
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
    assert not cache.is_whole()
    again = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert (again.folder / name).read_bytes() == content and again.is_whole()
    assert [entry.name for entry in tmp_path.iterdir()] == [again.folder.name]


def test_damaged_cache_is_removed_before_it_is_rebuilt(tmp_path):
    there = []
    corpus = GatedCorpus(lambda: there.append(len(list(tmp_path.glob("list-*")))))
    damaged = tokenize(corpus, ByteTokenizer(), tmp_path)
    (damaged.folder / "meta.json").unlink()
    assert tokenize(corpus, ByteTokenizer(), tmp_path).is_whole()
    assert there == [0, 0]


def test_a_damaged_cache_is_rebuilt_where_files_cannot_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    damaged = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    (damaged.folder / "meta.json").unlink()
    assert tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path).is_whole()
    assert list(tmp_path.iterdir()) == [damaged.folder]


def test_one_process_builds_while_another_waits_and_prints_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(notice, "PATIENCE_SECONDS", 0.5)
    others_wait, results = FORK.Event(), FORK.Queue()
    corpus = GatedCorpus(lambda: others_wait.wait(timeout=60))
    builders = [start(corpus, tmp_path, results)]
    assert corpus.readers.acquire(timeout=60)
    builders.append(start(corpus, tmp_path, results))
    said = lines(capfd, until="waiting")
    others_wait.set()
    built = [results.get(timeout=60) for _ in builders]
    assert ended(builders) == [0, 0]
    assert not corpus.readers.acquire(block=False)
    assert built[0] == built[1]
    folder = built[0][0]
    said += capfd.readouterr().err
    assert said.count(f"flash-train: data: waiting for another process that tokenises into {folder}\n") == 1
    assert said.count(f"flash-train: data: tokenising into {folder}\n") == 1
    assert [str(entry) for entry in tmp_path.iterdir()] == [folder]


def test_a_builder_that_is_killed_leaves_the_next_one_free_to_build(tmp_path):
    never, results = FORK.Event(), FORK.Queue()
    corpus = GatedCorpus(never.wait)
    killed = start(corpus, tmp_path, results)
    assert corpus.readers.acquire(timeout=60)
    waits = start(ListCorpus(TEXTS), tmp_path, results)
    killed.kill()
    folder, total = results.get(timeout=60)
    assert ended([killed, waits]) == [-signal.SIGKILL, 0]
    assert total == int(tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path).tokens.sum())
    assert [str(entry) for entry in tmp_path.iterdir()] == [folder]  # the partly built cache is removed, too


@pytest.mark.parametrize("why", ["no fcntl", errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_two_processes_build_the_same_at_once(tmp_path, monkeypatch, why):
    def refuse(file, operation):
        raise OSError(why, "no locks here")

    if why == "no fcntl":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    all_read, results = FORK.Barrier(2), FORK.Queue()
    corpus = GatedCorpus(lambda: all_read.wait(timeout=60))
    builders = [start(corpus, tmp_path, results) for _ in range(2)]
    built = [results.get(timeout=60) for _ in builders]
    assert ended(builders) == [0, 0]
    assert built[0] == built[1]
    assert [str(entry) for entry in tmp_path.iterdir()] == [built[0][0]]


def test_full_disk_error_names_the_folder_and_the_key(tmp_path):
    def fill_disk() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    said = f"No space left on device while tokenising into {tmp_path}/list-.*; give another folder by data.cache_dir="
    with pytest.raises(OSError, match=said):
        tokenize(GatedCorpus(fill_disk), ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy"])
def test_a_disk_that_fills_up_in_any_file_is_named(tmp_path, monkeypatch, name):
    """NumPy's own error does not say that the disk is full."""

    class FullDisk(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_full(file, mode="r", *options, **keywords):
        found = Path(file).name if isinstance(file, str | Path) else ""
        return io.BufferedWriter(FullDisk(file, mode)) if found == name else open(file, mode, *options, **keywords)

    monkeypatch.setattr(cache_module, "open", open_full, raising=False)
    with pytest.raises(OSError, match="No space left on device while tokenising into .*; give another folder by data"):
        tokenize(GatedCorpus(lambda: None), ByteTokenizer(), tmp_path)


def test_indices_are_read_by_numpy(tmp_path):
    for index in (np.arange(5), np.arange(3, dtype=np.uint64), np.zeros(0, dtype=np.int64)):
        cache_module._save_index(tmp_path / "index.npy", index)
        found = np.load(tmp_path / "index.npy", mmap_mode="r" if len(index) else None)
        assert found.dtype == index.dtype and np.array_equal(found, index)


def test_unwritable_folder_error_names_the_key(tmp_path, monkeypatch):
    """The path is a file, or a read-only parent refuses the cache folder or its lock."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"data.cache_dir={tmp_path}/file/k: must be a folder that can be written"):
        tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path / "file" / "k")

    def refuse(path, *arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for place in ("pathlib.Path.mkdir", "flash_train.data.lock.open"):
        with monkeypatch.context() as patch, pytest.raises(PermissionError, match=f"data.cache_dir={tmp_path}/c: "):
            patch.setattr(place, refuse, raising=False)
            tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path / "c")


def test_an_error_of_the_corpus_does_not_name_the_cache(tmp_path):
    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "texts" / "a.txt"))

    with pytest.raises(PermissionError) as caught:
        tokenize(GatedCorpus(refuse), ByteTokenizer(), tmp_path)
    assert "data.cache_dir" not in str(caught.value) and "a.txt" in str(caught.value)


def test_without_a_home_folder_the_key_is_named(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match="data.cache_dir=null: must be a folder, .*HOME is not set"):
        tokenize(ListCorpus(TEXTS), ByteTokenizer())


def test_a_failed_build_leaves_nothing(tmp_path):
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path / "t.json", ["</s>"]))
    with pytest.raises(ValueError, match="text 1 is not UTF-8"):
        tokenize(ListCorpus([b"a", b"\xff"]), tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_pickled_cache_carries_no_tokens(tmp_path):
    cache = tokenize(ListCorpus(TEXTS), ByteTokenizer(), tmp_path)
    assert cache.tokens.nbytes > len(pickle.dumps(cache))
    assert np.array_equal(pickle.loads(pickle.dumps(cache)).tokens, cache.tokens)
