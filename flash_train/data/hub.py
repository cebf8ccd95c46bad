"""Data sets of the Hugging Face hub, and local folders in its layouts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flash_train.data.corpus import Document, hash_files, hash_strings
from flash_train.data.text import row_documents


class HubCorpus:
    """One split of whatever `datasets.load_dataset(name, config)` loads; a document is the field `text_field` of a row.

    `name` may be a local folder of .jsonl, .parquet, … files. With `streaming` rows are read as they come and only
    tokens are kept; without, `datasets` keeps a copy of the data in its own cache. Documents are known by content.

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
    ) -> None:
        self.dataset, self.config, self.split = name, config, split
        self.text_field, self.streaming = text_field, streaming

    def fingerprint(self) -> str:
        """Hash of the content of local files; of a data set on the hub, its revision's hash as `datasets` has it."""
        from datasets import load_dataset_builder

        builder = self._load(load_dataset_builder)
        files = [file for split in (builder.config.data_files or {}).values() for file in split]
        local = [(Path(file).name, Path(file)) for file in files if Path(file).is_file()]
        content = hash_files(local) if files and len(local) == len(files) else f"{self.dataset} {builder.hash}"
        return hash_strings([content, builder.config.name, self.split, self.text_field])

    def documents(self) -> Iterator[Document]:
        """A document for each row that has text."""
        from datasets import load_dataset

        rows = self._load(load_dataset, split=self.split, streaming=self.streaming)
        yield from row_documents(rows, self.text_field, f"data.name={self.dataset}")

    def _load(self, load: Callable[..., Any], **options: Any) -> Any:
        """Calls a loader of `datasets`; its errors come back with the key in front, in one line."""
        try:
            return load(self.dataset, self.config, **options)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            kind = next(kind for kind in (FileNotFoundError, ValueError, ConnectionError) if isinstance(error, kind))
            raise kind(f"data.name={self.dataset}: {str(error).splitlines()[0]}") from None
