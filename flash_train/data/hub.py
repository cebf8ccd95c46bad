"""Data sets of the Hugging Face hub, and local folders in its layouts."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flash_train.data.corpus import Document, hash_files, hash_strings
from flash_train.data.notice import say
from flash_train.data.rows import RowText, read_rows
from flash_train.data.search import LeftOut, walk
from flash_train.data.text import kind_of, row_documents, text_documents
from flash_train.data.tokenizer import Errors, check_errors

OWN_KINDS = (".jsonl", ".ndjson", ".parquet")  # read without `datasets`, which wants the same columns in every row
NO_DATA = frozenset({"README.md", "LICENSE", "dataset_infos.json"})  # what the hub keeps next to the data

Position = dict[str, Any]


class HubCorpus:
    """One split of whatever `datasets.load_dataset(name, config)` loads; a document is the field `text_field` of a row.

    `name` may be a local folder of .jsonl, .parquet, … files; of several kinds `datasets` chooses one, and a line says
    what is not read. Local .jsonl and .parquet files are read as `TextCorpus` reads them, the text field alone, with
    its `errors`. With `streaming` rows are tokenised as they are read, while the run trains; without, all of them are
    before it begins, and `datasets` keeps a copy of other data in its own cache. Documents are known by content.

    What doesn't exist ends in a FileNotFoundError or ValueError that names `data.name`; an unreachable hub in a
    ConnectionError, likewise.
    """

    name = "hub"

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        text_field: str = "text",
        streaming: bool = False,
        errors: Errors = "strict",
    ) -> None:
        check_errors(errors)
        self.dataset, self.config, self.split = name, config, split
        self.text_field, self.streaming, self.errors = text_field, streaming, errors

    def fingerprint(self) -> str:
        """Hash of the content of local files; of a data set on the hub, its revision's hash as `datasets` has it."""
        builder = self._builder()
        files = [file for split in (builder.config.data_files or {}).values() for file in split]
        self._say_what_is_not_read(builder, files)
        local = [(Path(file).name, Path(file)) for file in files if Path(file).is_file()]
        content = hash_files(local) if files and len(local) == len(files) else f"{self.dataset} {builder.hash}"
        how = [self.errors] if self.errors != "strict" else []
        return hash_strings([content, builder.config.name, self.split, self.text_field, *how])

    def documents(self) -> Iterator[Document]:
        """A document for each row that has text."""
        if self.streaming or self._own_files():
            yield from self.stream()
            return
        from datasets import load_dataset

        rows = self._load(load_dataset, split=self.split)
        yield from row_documents(rows, self.text_field, f"data.name={self.dataset}")

    def stream(self, position: Position | None = None) -> "HubStream":
        """The documents from `position` on, which another stream of this corpus gave; None is the beginning."""
        from datasets import load_dataset

        if files := self._own_files():
            return _FileStream(files, self.text_field, self.errors, position)
        rows = self._load(load_dataset, split=self.split, streaming=True)
        return _DatasetStream(rows, self, position)

    def _own_files(self) -> list[Path]:
        """The files of the split, in order, where we can read them ourselves; else none."""
        data_files = self._builder().config.data_files or {}
        files = [Path(file) for file in data_files.get(self.split, [])]
        return files if all(file.is_file() and kind_of(file)[0] in OWN_KINDS for file in files) else []

    def _say_what_is_not_read(self, builder: Any, files: Iterable[str]) -> None:
        """A line on the files of a local folder that `datasets` does not choose."""
        folder = Path(self.dataset).expanduser()
        if not folder.is_dir() or builder.config.name != "default":  # files of another configuration are not missed
            return
        chosen, left = {os.path.realpath(file) for file in files}, LeftOut()
        for _, key, file, real in walk(folder, left):
            if real not in chosen and file.name not in NO_DATA:
                left.add("`datasets` reads files of one kind, and follows no links to folders", key)
        if left.names:
            say(f"data.name={self.dataset}: not read: {left}; data=text data.path={self.dataset} reads every kind")

    def _builder(self) -> Any:
        from datasets import load_dataset_builder

        return self._load(load_dataset_builder)

    def _load(self, load: Callable[..., Any], **options: Any) -> Any:
        """Calls a loader of `datasets`; its errors come back with the key in front, in one line."""
        from datasets.exceptions import DatasetsError

        try:
            return load(self.dataset, self.config, **options)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            kind = next(kind for kind in (FileNotFoundError, ValueError, ConnectionError) if isinstance(error, kind))
            raise kind(f"data.name={self.dataset}: {_first_line(error)}") from None
        except DatasetsError as error:  # of a malformed file; the cause says what is wrong with it
            raise ValueError(f"data.name={self.dataset}: {_first_line(error.__cause__ or error)}") from error


class HubStream:
    """Documents in order, and where the next one is."""

    def __iter__(self) -> Iterator[Document]:
        raise NotImplementedError

    def position(self) -> Position:
        """Where a stream continues after the document that came last: plain values, for a checkpoint."""
        raise NotImplementedError


class _FileStream(HubStream):
    """Rows of local files. A position is a file's place in the split and the rows of it that are consumed."""

    def __init__(self, files: list[Path], text_field: str, errors: Errors, position: Position | None) -> None:
        self.files, self.text_field, self.errors = files, text_field, errors
        self._file: int = position["file"] if position else 0
        self._row: int = position["row"] if position else 0

    def __iter__(self) -> Iterator[Document]:
        while self._file < len(self.files):
            file = self.files[self._file]
            rows = read_rows(file, *kind_of(file), self.text_field, self.errors)
            yield from text_documents(self._counted(rows), self.text_field, str(file))
            self._file, self._row = self._file + 1, 0

    def position(self) -> Position:
        return {"file": self._file, "row": self._row}

    def _counted(self, rows: Iterable[RowText]) -> Iterator[RowText]:
        consumed = self._row
        for i, row in enumerate(rows):
            if i >= consumed:
                self._row = i + 1
                yield row


class _DatasetStream(HubStream):
    """Rows of an IterableDataset. A position is its own state, and the rows consumed."""

    def __init__(self, rows: Any, corpus: HubCorpus, position: Position | None) -> None:
        self.rows, self.corpus = rows, corpus
        self._row: int = position["rows"] if position else 0
        if position:
            rows.load_state_dict(position["state"])

    def __iter__(self) -> Iterator[Document]:
        source = f"data.name={self.corpus.dataset}"
        try:
            yield from row_documents(self._counted(), self.corpus.text_field, source, first=self._row)
        except ValueError as error:
            if str(error).startswith("data."):
                raise
            raise ValueError(f"{source}: after row {self._row - 1}: {_first_line(error)}") from error

    def position(self) -> Position:
        return {"state": self.rows.state_dict(), "rows": self._row}

    def _counted(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            self._row += 1
            yield row


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
