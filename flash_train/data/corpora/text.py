"""A corpus of the user's files: a .txt, .md or .py file is a document, and so is a row of .jsonl, .csv, .parquet, …"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flash_train.data.corpora.corpus import Document, hash_files, hash_strings, python_text
from flash_train.data.corpora.rows import (
    KINDS,
    MissingTextError,
    NoSuchFieldError,
    RowText,
    list_names,
    read_rows,
    read_whole,
)
from flash_train.data.corpora.search import find_files
from flash_train.data.notice import say
from flash_train.data.tokenizer import Errors, check_errors

WHOLE = (".txt", ".md", ".py")
COMPRESSIONS = (".gz", ".zst")
READABLE = (*WHOLE, *KINDS)
#: These often hold something other than text. Without the text field, a search skips them; given by name, they raise.
OFTEN_NO_TEXT = (".json", ".csv", ".tsv")
INVALID_UTF8_VERSION = "2"  # how rows that are not UTF-8 are read; in the fingerprint, because it decides their text


class TextCorpus:
    """Documents from a file, a folder (searched recursively), a glob, or a list of these.

    In .txt, .md and .py files, a document is the whole file; its identity is its path relative to the folder. In
    .jsonl, .json, .csv, .tsv and .parquet files, it is the field `text_field` of a row; its identity is its content, so
    copies are always in the same part. All but .parquet may be compressed (.gz, .zst). Links to folders are followed
    once; a line says what a search skipped, and why. A search also skips .json, .csv and .tsv files without
    `text_field`, with a line about them.

    `errors` applies to rows that are not UTF-8 or have half a surrogate pair: "strict" raises ValueError with the row's
    place, "replace" substitutes U+FFFD, "skip" drops such rows and says how many. Other columns may hold anything. The
    bytes of .txt and .md files are not changed; the tokenizer handles those that are not UTF-8. A .py file is decoded
    as it declares.

    Raises FileNotFoundError for a path that does not exist; ValueError if nothing there can be read.
    """

    name = "text"

    def __init__(
        self, path: str | Path | Sequence[str | Path], text_field: str = "text", errors: Errors = "strict"
    ) -> None:
        check_errors(errors)
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        found = [
            (real, (key, file, file != Path(one).expanduser()))
            for one in paths
            for key, file, real in _readable_files(one)
        ]
        self._found = list(dict(reversed(found)).values())[::-1]  # a file that two paths reach is one document
        self.files = [(key, file) for key, file, _ in self._found]
        self.text_field, self.errors = text_field, errors
        self.path = path if isinstance(path, (str, Path)) else [str(one) for one in paths]  # for errors
        if not self.files:
            raise ValueError("data.path=[]: must be a file, a folder or a glob")

    def fingerprint(self) -> str:
        """Return a hash of every file's relative path and content, and of how rows are read."""
        parts = [hash_files(self.files), self.text_field, self.errors]
        if self.errors != "strict":
            parts.append(INVALID_UTF8_VERSION)
        parts += [key for key, file, by_search in self._found if by_search and kind_of(file)[0] in OFTEN_NO_TEXT]
        return hash_strings(parts)

    def documents(self) -> Iterator[Document]:
        """Yield the documents, file by file. Raises ValueError if no file has the text field."""
        without: list[str] = []
        for key, file, by_search in self._found:
            suffix, compression = kind_of(file)
            if suffix in WHOLE:
                text = read_whole(file, compression)
                yield Document(key, str(file), (python_text(text) or text) if suffix == ".py" else text)
                continue
            try:
                rows = read_rows(file, suffix, compression, self.text_field, self.errors)
                yield from text_documents(rows, self.text_field, str(file))
            except NoSuchFieldError as error:
                if not by_search or suffix not in OFTEN_NO_TEXT:
                    raise
                without.append(key)
                if len(without) == len(self.files):
                    raise error
        if without:
            more = f" and {len(without) - 3:,} more" if len(without) > 3 else ""
            say(f"data.text_field={self.text_field}: files without it, not read: {', '.join(without[:3])}{more}")


def text_documents(rows: Iterable[RowText], text_field: str, source: str) -> Iterator[Document]:
    """Yield one document per row with text; its identity is its content. Print how many rows are skipped, and why."""
    without = invalid = 0
    for row in rows:
        if row.text is not None:
            yield Document(hash_strings([row.text.decode()]), row.place, row.text)
        elif row.is_valid:
            without += 1
        else:
            invalid += 1
    if without:
        _say_rows_without_text(text_field, source, without)
    if invalid:
        say(f"data.errors=skip: rows of {source} that are not UTF-8, left out: {invalid:,}")


def row_documents(rows: Iterable[dict[str, Any]], text_field: str, source: str, first: int = 0) -> Iterator[Document]:
    """Yield one document per row with text; its identity is its content. Print how many rows have none.

    `first` is the number of the first row. Raises MissingTextError if there is no column `text_field`, or if it holds
    something other than strings.
    """
    without = 0
    for i, row in enumerate(rows, first):
        if text_field not in row:
            raise MissingTextError(f"data.text_field={text_field}: {source} has only {list_names(row)}")
        text = row[text_field]
        if text is None:
            without += 1
            continue
        if not isinstance(text, str):
            raise MissingTextError(
                f"data.text_field={text_field}: row {i} of {source} holds {type(text).__name__}: must be text"
            )
        yield Document(
            key=hash_strings([text]), source=f"row {i} of {source}", text=text.encode("utf-8", "surrogatepass")
        )
    if without:
        _say_rows_without_text(text_field, source, without)


def _say_rows_without_text(text_field: str, source: str, rows: int) -> None:
    say(f"data.text_field={text_field}: rows of {source} without text, left out: {rows:,}")


def _readable_files(path: str | Path) -> list[tuple[str, Path, str]]:
    """Return the readable files at `path`; print a line about the skipped ones."""
    files, skipped = find_files(path, lambda file: kind_of(file)[0] in READABLE)
    if not files:
        found = f" ({skipped})" if skipped.names else ""
        kinds = f"{', '.join(READABLE)}, and all but .parquet also with {' or '.join(COMPRESSIONS)}"
        raise ValueError(f"data.path={path}: nothing to read there{found}; readable are files in {kinds}")
    if skipped.names:
        say(f"data.path={path}: not read: {skipped}")
    return files


def kind_of(file: Path) -> tuple[str, str]:
    """Return the suffix that decides how a file is read, and the suffix of its compression, or ""."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] and suffixes[-1] in COMPRESSIONS:
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        return ("" if inner == ".parquet" else inner), suffixes[-1]
    return (suffixes[-1] if suffixes else ""), ""
