"""Where text comes from. A corpus yields documents in a fixed order and knows a fingerprint of its content."""

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One document: `key` is its identity, which decides its part, train or validation; `source` its name in errors."""

    key: str
    source: str
    text: bytes


class Corpus(Protocol):
    """A source of documents."""

    name: str

    def fingerprint(self) -> str:
        """Hash of the content, in hexadecimal. Finding it reads the corpus once at most; nothing is kept in memory."""

    def documents(self) -> Iterator[Document]:
        """The documents, always in the same order, one in memory at a time."""


class StdlibCorpus:
    """The ``.py`` files of the running interpreter's standard library, one document each.

    Real, uneven text of tens of megabytes on every machine. Installed packages are left out; so is
    what a distribution left out of the library itself (some ship no tests). Every document is UTF-8, so that any
    tokenizer takes it: files in another encoding are decoded as they declare, and the few that declare none (tests of
    Python's own parser) are left out. Raises FileNotFoundError if `root` has no such file.
    """

    name = "stdlib"

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.files = python_files(self.root)
        if not self.files:
            raise FileNotFoundError(f"data=stdlib: no .py files under {self.root}; use data=text data.path=…")

    def fingerprint(self) -> str:
        """Hash of every document's path and text."""
        whole = hashlib.blake2b(digest_size=16)
        for document in self.documents():
            _add(whole, document.key, hashlib.blake2b(document.text, digest_size=16).digest())
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """One document per file that is text, in the order of their paths."""
        for file in self.files:
            text = python_text((self.root / file).read_bytes())
            if text is not None:
                yield Document(key=file, source=str(self.root / file), text=text)


def python_text(content: bytes) -> bytes | None:
    """Python source as UTF-8: as it is, or decoded as it declares (PEP 263); None where it is neither."""
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
    """Relative POSIX paths of the ``.py`` files under `root`, sorted; installed packages are left out."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Hash of the (name, content) of files."""
    whole = hashlib.blake2b(digest_size=16)
    for name, path in files:
        _add(whole, name, hash_file(path))
    return whole.hexdigest()


def _add(whole: Any, name: str, content_hash: bytes) -> None:
    """Adds a name and the hash of its content to a hash."""
    whole.update(hash_strings([name]).encode() + content_hash)


def hash_file(path: Path) -> bytes:
    """Hash of a file's content, 16 bytes, read a block at a time."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def hash_strings(strings: Sequence[str]) -> str:
    """Hash of a sequence of strings; ["ab", "c"] and ["a", "bc"] differ."""
    digest = hashlib.blake2b(digest_size=16)
    for string in strings:
        data = string.encode("utf-8", errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
