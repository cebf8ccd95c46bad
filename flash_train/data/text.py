"""Text files of the user's own: .txt, .md and .py, one document each; rows of .jsonl, .csv, .parquet, … likewise."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flash_train.data.corpus import Document, hash_files, hash_strings, python_text
from flash_train.data.notice import say
from flash_train.data.rows import KINDS, MissingTextError, NoSuchFieldError, RowText, read_rows, read_whole
from flash_train.data.search import find_files
from flash_train.data.tokenizer import Errors, check_errors

WHOLE = (".txt", ".md", ".py")
COMPRESSIONS = (".gz", ".zst")
READABLE = (*WHOLE, *KINDS)
#: Kinds that hold much besides text: one without the text field is left out of a folder, and refused by its own name.
OFTEN_NO_TEXT = (".json", ".csv", ".tsv")
READING = "2"  # of rows that are not UTF-8; in the fingerprint, for it decides their text


class TextCorpus:
    """Documents from a file, a folder (searched through), a glob, or a list of those.

    A document of .txt, .md and .py is the whole file, known by its path relative to the folder; of .jsonl, .json, .csv,
    .tsv and .parquet it is the field `text_field` of a row, known by its content, so that copies never lie on both
    sides of the split. All but .parquet may be compressed (.gz, .zst). Links to folders are followed, once; a line
    says what a search did not read, and why. A .json, .csv or .tsv file that a search finds and that has no
    `text_field` is left out, and a line says so.

    `errors` is for rows that are not UTF-8 or have half a surrogate pair: "strict" raises ValueError naming the row,
    "replace" reads U+FFFD in their place, "skip" leaves out such rows and says how many. What other columns hold does
    not matter. Bytes of .txt and .md are passed on as they are: what isn't UTF-8 is the tokenizer's matter. A .py file
    is decoded as it declares.

    Raises FileNotFoundError for a path that isn't there; ValueError if nothing there can be read.
    """

    name = "text"

    def __init__(
        self, path: str | Path | Sequence[str | Path], text_field: str = "text", errors: Errors = "strict"
    ) -> None:
        check_errors(errors)
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        found = [
            (real, (key, file, file != Path(one).expanduser())) for one in paths for key, file, real in _files(one)
        ]
        self._found = list(dict(reversed(found)).values())[::-1]  # a file that is reached in two ways is one document
        self.files = [(key, file) for key, file, _ in self._found]
        self.text_field, self.errors = text_field, errors
        if not self.files:
            raise ValueError("data.path is an empty list: give a file, a folder or a glob")

    def fingerprint(self) -> str:
        """Hash of every file's relative path and content, and of how rows are read."""
        parts = [hash_files(self.files), self.text_field, self.errors]
        if self.errors != "strict":
            parts.append(READING)
        parts += [key for key, file, by_search in self._found if by_search and kind_of(file)[0] in OFTEN_NO_TEXT]
        return hash_strings(parts)

    def documents(self) -> Iterator[Document]:
        """The documents, file by file. Raises ValueError if no file has the text field."""
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
    """A document for each row of a file that has text, known by its content; says how many are left out, and why."""
    without = invalid = 0
    for row in rows:
        if row.text is not None:
            yield Document(hash_strings([row.text.decode()]), row.place, row.text)
        elif row.is_valid:
            without += 1
        else:
            invalid += 1
    if without:
        _say_without(text_field, source, without)
    if invalid:
        say(f"data.errors=skip: rows of {source} that are not UTF-8, left out: {invalid:,}")


def row_documents(rows: Iterable[dict[str, Any]], text_field: str, source: str, first: int = 0) -> Iterator[Document]:
    """A document for each row that has text, known by its content; says how many have none. Row `first` comes first.

    Raises MissingTextError if there is no column `text_field`, or something other than strings in it.
    """
    without = 0
    for i, row in enumerate(rows, first):
        if text_field not in row:
            raise MissingTextError(f"data.text_field={text_field}: {source} has only {', '.join(map(str, row))}")
        text = row[text_field]
        if text is None:
            without += 1
            continue
        if not isinstance(text, str):
            raise MissingTextError(
                f"data.text_field={text_field}: row {i} of {source} holds {type(text).__name__}, allowed is text"
            )
        yield Document(
            key=hash_strings([text]), source=f"row {i} of {source}", text=text.encode("utf-8", "surrogatepass")
        )
    if without:
        _say_without(text_field, source, without)


def _say_without(text_field: str, source: str, rows: int) -> None:
    say(f"data.text_field={text_field}: rows of {source} without text, left out: {rows:,}")


def _files(path: str | Path) -> list[tuple[str, Path, str]]:
    """The readable files at `path`; says what else is there."""
    files, left = find_files(path, lambda file: kind_of(file)[0] in READABLE)
    if not files:
        there = f" ({left})" if left.names else ""
        kinds = f"{', '.join(READABLE)}, all but .parquet with {' or '.join(COMPRESSIONS)} after it, too"
        raise ValueError(f"data.path={path}: nothing to read there{there}; readable are files in {kinds}")
    if left.names:
        say(f"data.path={path}: not read: {left}")
    return files


def kind_of(file: Path) -> tuple[str, str]:
    """The suffix that decides how a file is read, and the suffix of its compression or ""."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] and suffixes[-1] in COMPRESSIONS:
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        return ("" if inner == ".parquet" else inner), suffixes[-1]
    return (suffixes[-1] if suffixes else ""), ""
