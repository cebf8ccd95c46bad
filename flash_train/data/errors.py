"""Errors that end a training because of its data."""

from typing import Any


class DataError(ValueError):
    """Rows that training needs cannot be read, or ranks read different data. The message is one line."""


def empty_corpus(corpus: Any) -> ValueError:
    """Return the error for a corpus without any text; it names the path that was given for it, if there was one."""
    path = getattr(corpus, "path", None)
    named = f"the corpus {corpus.name!r}" if path is None else f"data.path={path}: the corpus"
    return ValueError(f"{named} is empty: it has no document with any text in it")
