"""Errors that end a training because of its data."""


class DataError(ValueError):
    """Rows that training needs cannot be read, or ranks read different data. The message is one line."""
