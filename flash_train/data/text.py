"""Text files of the user's own: .txt and .md, one document each; .jsonl and .parquet, one document per row."""

import glob
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from flash_train.data.corpus import Document, hash_files, hash_strings
from flash_train.data.notice import say
from flash_train.data.tokenizer import Errors, check_errors

WHOLE = (".txt", ".md")
ROWS = {".jsonl": "json", ".parquet": "parquet"}  # suffix → reader of `datasets`
READABLE = (*WHOLE, *ROWS)


class TextCorpus:
    """Documents from a file, a folder (searched through), a glob, or a list of those.

    A document of .txt and .md is the whole file, known by its path relative to the folder; of .jsonl and .parquet it is
    the field `text_field` of a row, known by its content, so that copies never lie on both sides of the split. Rows
    are streamed through `datasets`. `errors` is for .jsonl files that are not UTF-8: "strict" raises ValueError naming
    the file, "replace" reads U+FFFD for the invalid bytes, "skip" leaves out the rows that have them (or had a U+FFFD
    before). Bytes of .txt and .md are passed on as they are: what isn't UTF-8 is the tokenizer's matter.

    Raises FileNotFoundError for a path that isn't there; ValueError if nothing there can be read.
    """

    name = "text"

    def __init__(
        self, path: str | Path | Sequence[str | Path], text_field: str = "text", errors: Errors = "strict"
    ) -> None:
        check_errors(errors)
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        found = [(key, file) for one in paths for key, file in find_files(one)]
        # A file reached in two ways is one document.
        self.files = list({file.resolve(): (key, file) for key, file in reversed(found)}.values())[::-1]
        self.text_field, self.errors = text_field, errors
        if not self.files:
            raise ValueError("data.path is an empty list: give a file, a folder or a glob")

    def fingerprint(self) -> str:
        """Hash of every file's relative path and content, and of how rows are read."""
        return hash_strings([hash_files(self.files), self.text_field, self.errors])

    def documents(self) -> Iterator[Document]:
        """The documents, file by file."""
        for key, file in self.files:
            if file.suffix.lower() in WHOLE:
                yield Document(key=key, source=str(file), text=file.read_bytes())
            elif file.stat().st_size:
                yield from self._rows(file)

    def _rows(self, file: Path) -> Iterator[Document]:
        from datasets import load_dataset  # here, not above: it takes a second, and bytes from files need none of it

        reader = ROWS[file.suffix.lower()]
        # Any name of UTF-8 but this one makes the reader decode, and so heed `encoding_errors`.
        lenient = {"encoding": "utf_8", "encoding_errors": "replace"} if self.errors != "strict" else {}
        options = lenient if reader == "json" else {}
        try:
            rows = load_dataset(reader, data_files=[glob.escape(str(file))], split="train", streaming=True, **options)
            for document in row_documents(rows, self.text_field, str(file)):
                if (
                    self.errors != "skip"
                    or reader != "json"
                    or "\N{REPLACEMENT CHARACTER}".encode() not in document.text
                ):
                    yield document
        except UnicodeDecodeError:
            raise ValueError(
                f"data.path: {file} is not UTF-8; convert it, or set data.errors=replace or skip"
            ) from None
        except MissingTextError:
            raise
        except ValueError as error:  # what pyarrow raises for a malformed file is one, too
            raise ValueError(f"data.path: {file} cannot be read as {reader}: {str(error).splitlines()[0]}") from None


class MissingTextError(ValueError):
    """A row without the text that was asked for."""


def row_documents(rows: Iterable[dict[str, Any]], text_field: str, source: str) -> Iterator[Document]:
    """A document for each row that has text, known by its content; says how many have none.

    Raises MissingTextError if there is no column `text_field`, or something other than strings in it.
    """
    without = 0
    for i, row in enumerate(rows):
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
        say(f"data.text_field={text_field}: rows of {source} without text, left out: {without:,}")


def find_files(path: str | Path) -> list[tuple[str, Path]]:
    """(key, file) of the readable files at `path`, sorted; a key is the path relative to the folder, or to the glob's.

    Hidden files and folders inside a folder are left out. Raises FileNotFoundError if there is nothing at `path`,
    ValueError if nothing there is readable.
    """
    whole = Path(path).expanduser()
    if whole.is_file():
        root, candidates = whole.parent, [whole]
    elif whole.is_dir():
        root, candidates = whole, list(whole.rglob("*"))
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), whole.parts))
        candidates = [Path(match) for match in glob.glob(str(whole), recursive=True)]
        if not candidates:
            raise FileNotFoundError(f"data.path={path}: no such file or folder, and no glob that matches any")
    keyed = sorted((file.relative_to(root).as_posix(), file) for file in candidates if file.is_file())
    files = [
        (key, file)
        for key, file in keyed
        if file.suffix.lower() in READABLE and not any(part.startswith(".") for part in Path(key).parts)
    ]
    if not files:
        raise ValueError(f"data.path={path}: nothing to read there; readable are files in {', '.join(READABLE)}")
    return files
