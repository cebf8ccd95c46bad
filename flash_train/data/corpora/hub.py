"""Data sets from the Hugging Face hub, and local folders in the hub's layouts."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flash_train.data.corpora.corpus import Document, hash_files, hash_strings
from flash_train.data.corpora.rows import RowText, read_rows
from flash_train.data.corpora.search import SkippedFiles, walk
from flash_train.data.corpora.text import kind_of, row_documents, text_documents
from flash_train.data.notice import say
from flash_train.data.tokenizer import Errors, check_errors

OWN_KINDS = (".jsonl", ".ndjson", ".parquet")  # read without `datasets`, which needs the same columns in every row
NO_DATA = frozenset({"README.md", "LICENSE", "dataset_infos.json"})  # files next to the data on the hub

Position = dict[str, Any]


class HubCorpus:
    """One split of a data set that `datasets.load_dataset(name, config)` loads; each row's `text_field` is a document.

    `name` may be a local folder of .jsonl, .parquet, … files. If it has several kinds, `datasets` chooses one, and a
    line lists the files that are not read. Local .jsonl and .parquet files are read like `TextCorpus` reads them: only
    the text field, and with its `errors`. With `streaming`, rows are tokenised while the run trains. Without it, all
    rows are tokenised before the run begins, and `datasets` copies data from the hub into its own cache. A document's
    identity is its content.

    Raises:
        FileNotFoundError, ValueError: the data set does not exist; the message names `data.name`.
        ConnectionError: the hub cannot be reached.
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
        """Return a hash of local files' content; for a data set on the hub, the hash that `datasets` has for it."""
        builder = self._builder()
        files = [file for split in (builder.config.data_files or {}).values() for file in split]
        self._report_unread_files(builder, files)
        local = [(Path(file).name, Path(file)) for file in files if Path(file).is_file()]
        content = hash_files(local) if files and len(local) == len(files) else f"{self.dataset} {builder.hash}"
        errors = [self.errors] if self.errors != "strict" else []
        return hash_strings([content, builder.config.name, self.split, self.text_field, *errors])

    def documents(self) -> Iterator[Document]:
        """Yield one document for each row with text."""
        if self.streaming or self._own_files():
            yield from self.stream()
            return
        from datasets import load_dataset

        rows = self._load(load_dataset, split=self.split)
        yield from row_documents(rows, self.text_field, f"data.name={self.dataset}")

    def stream(self, position: Position | None = None) -> "HubStream":
        """Return the documents from `position` on, a value of `HubStream.position`; None is the beginning."""
        from datasets import load_dataset

        if files := self._own_files():
            return _FileStream(files, self.text_field, self.errors, position)
        rows = self._load(load_dataset, split=self.split, streaming=True)
        return _DatasetStream(rows, self, position)

    def _own_files(self) -> list[Path]:
        """Return the files of the split, in order, if all are local and of `OWN_KINDS`; else an empty list."""
        data_files = self._builder().config.data_files or {}
        files = [Path(file) for file in data_files.get(self.split, [])]
        return files if all(file.is_file() and kind_of(file)[0] in OWN_KINDS for file in files) else []

    def _report_unread_files(self, builder: Any, files: Iterable[str]) -> None:
        """Print a line about the files of a local folder that `datasets` does not choose."""
        folder = Path(self.dataset).expanduser()
        if not folder.is_dir() or builder.config.name != "default":  # a named configuration chooses files on purpose
            return
        chosen, skipped = {os.path.realpath(file) for file in files}, SkippedFiles()
        for _, key, file, real in walk(folder, skipped):
            if real not in chosen and file.name not in NO_DATA:
                skipped.add("`datasets` reads files of one kind, and follows no links to folders", key)
        if skipped.names:
            say(f"data.name={self.dataset}: not read: {skipped}; data=text data.path={self.dataset} reads every kind")

    def _builder(self) -> Any:
        from datasets import load_dataset_builder

        return self._load(load_dataset_builder)

    def _load(self, load: Callable[..., Any], **options: Any) -> Any:
        """Call a loader of `datasets`; its errors are raised again as one line that begins with the key."""
        from datasets.exceptions import DatasetsError

        path = Path(self.dataset).expanduser()
        if path.is_file():
            raise ValueError(
                f"data.name={self.dataset}: is a file; give its folder, or data=text data.path={self.dataset}"
            )
        if (path / "state.json").is_file():  # `datasets` would name a function that this program does not call
            raise ValueError(
                f"data.name={self.dataset}: `save_to_disk` wrote it, and `load_dataset` cannot read this format; "
                "write it by `to_parquet` into a folder, and give the folder"
            )
        try:
            return load(os.path.expanduser(self.dataset), self.config, **options)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            kind = next(kind for kind in (FileNotFoundError, ValueError, ConnectionError) if isinstance(error, kind))
            raise kind(f"data.name={self.dataset}: {_first_line(error)}") from None
        except DatasetsError as error:  # a malformed file; the cause has the details
            raise ValueError(f"data.name={self.dataset}: {_first_line(error.__cause__ or error)}") from error


class HubStream:
    """Documents in order, with the position of the next one."""

    def __iter__(self) -> Iterator[Document]:
        raise NotImplementedError

    def position(self) -> Position:
        """Return where a stream continues after the last document: plain values, for a checkpoint."""
        raise NotImplementedError


class _FileStream(HubStream):
    """Rows of local files. A position is a file's index in the split and the number of its consumed rows."""

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
    """Rows of an IterableDataset. A position is the data set's state and the number of consumed rows."""

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
