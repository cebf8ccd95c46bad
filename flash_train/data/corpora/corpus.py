"""Corpora: sources of documents. A corpus yields documents in a fixed order and has a fingerprint of its content."""

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flash_train.checks import brief, check_attributes

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One document. `key` is its identity, which decides its part; `source` names it in errors.

    Raises:
        TypeError: `key` is not a string, or `text` is not bytes.
    """

    key: str
    source: str
    text: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise TypeError(f"Document: key={brief(self.key)}: must be a string, such as a path")
        if not isinstance(self.text, bytes | bytearray):
            kind = type(self.text).__name__
            raise TypeError(f"Document: the text of {self.source} is {kind}: must be bytes, such as text.encode()")


class Corpus(Protocol):
    """A source of documents."""

    name: str

    def fingerprint(self) -> str:
        """Return a hash of the content, in hexadecimal; read the corpus at most once and keep nothing in memory."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents, always in the same order, with one in memory at a time."""


def check_corpus(corpus: Any) -> None:
    """Refuse what is not a `Corpus`, or a `StreamingCorpus` if it has a true `streaming`.

    Raises:
        TypeError: one line that says what to give.
    """
    content = "stream" if getattr(corpus, "streaming", False) else "documents"
    words = "a corpus such as TextCorpus(path), HubCorpus(name), StdlibCorpus() or RecallCorpus()"
    check_attributes("corpus", corpus, ("name", "fingerprint", content), words)


class StdlibCorpus:
    """The ``.py`` files of the running interpreter's standard library, one document each.

    Every machine has these tens of megabytes of real text with documents of uneven lengths. Installed packages are
    excluded. Distributions differ in which files they ship (some omit the tests). Every document is UTF-8, so any
    tokenizer can encode it: files in another encoding are decoded as they declare, and the few that are not UTF-8 and
    declare no encoding (tests of Python's own parser) are excluded. Raises FileNotFoundError if `root` has no .py file.
    """

    name = "stdlib"

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.files = python_files(self.root)
        if not self.files:
            raise FileNotFoundError(f"data=stdlib: no .py files under {self.root}; use data=text data.path=…")

    def fingerprint(self) -> str:
        """Return a hash of every document's path and text."""
        whole = hashlib.blake2b(digest_size=16)
        for document in self.documents():
            _add(whole, document.key, hashlib.blake2b(document.text, digest_size=16).digest())
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield one document per file that is text, sorted by path."""
        for file in self.files:
            text = python_text((self.root / file).read_bytes())
            if text is not None:
                yield Document(key=file, source=str(self.root / file), text=text)


def python_text(content: bytes) -> bytes | None:
    """Return Python source as UTF-8, decoded as it declares (PEP 263) if necessary; None if it cannot be decoded."""
    try:
        content.decode()
        return content
    except UnicodeDecodeError:
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            return content.decode(encoding).encode()
        except (SyntaxError, UnicodeDecodeError, LookupError):
            return None


def python_files(root: Path) -> list[str]:
    """Return relative POSIX paths of the ``.py`` files under `root`, sorted; installed packages are excluded."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return a hash of the names and contents of files."""
    whole = hashlib.blake2b(digest_size=16)
    for name, path in files:
        _add(whole, name, hash_file(path))
    return whole.hexdigest()


def _add(whole: Any, name: str, content_hash: bytes) -> None:
    """Add a name and the hash of its content to a hash."""
    whole.update(hash_strings([name]).encode() + content_hash)


def hash_file(path: Path) -> bytes:
    """Return a hash of a file's content, 16 bytes; read one block at a time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def hash_strings(strings: Sequence[str]) -> str:
    """Return a hash of a sequence of strings; ["ab", "c"] and ["a", "bc"] differ."""
    digest = hashlib.blake2b(digest_size=16)
    for string in strings:
        data = string.encode("utf-8", errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
