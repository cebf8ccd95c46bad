"""Reads the text field of rows in .jsonl, .json, .csv, .tsv and .parquet files, one row at a time."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from flash_train.checks import cut
from flash_train.data.tokenizer import Errors

PATIENCE_ROWS = 1000  # a file whose first 1000 rows lack the text field counts as a file without it
BLOCK = 1 << 20  # bytes of a .json file to read at once
PARQUET_ROWS = 64  # rows of a .parquet file to decode at once
SURROGATE = re.compile("[\ud800-\udfff]")
UNDECODED = re.compile("[\udc80-\udcff]")  # "surrogateescape" replaces bytes that are not UTF-8 with these
SEPARATORS = re.compile(r"[ \t\r\n,]*")


class MissingTextError(ValueError):
    """A row has no text in the text field."""


class NoSuchFieldError(MissingTextError):
    """No row of a file has the text field."""


@dataclass(frozen=True)
class RowText:
    """One row. `place` says where it is in its file. `text` is UTF-8, or None if the row has no text.

    `is_valid` is False if the text could not be encoded as UTF-8; `text` is then None.
    """

    place: str
    text: bytes | None
    is_valid: bool = True


def read_rows(file: Path, suffix: str, compression: str, text_field: str, errors: Errors) -> Iterator[RowText]:
    """Yield the rows of `file`, in order; read only `text_field` of each.

    `suffix` is .jsonl, .ndjson, .json, .csv, .tsv or .parquet; `compression` is .gz, .zst or "". Lines are counted from
    1, as in an editor; rows of .parquet and .json from 0. One row is in memory at a time (64 for .parquet). `errors`
    applies to text that is not UTF-8 or has half a surrogate pair: "strict" raises ValueError, "replace" substitutes
    U+FFFD, "skip" yields a row with `is_valid=False`.

    Raises NoSuchFieldError if no row has the field, MissingTextError if the field holds something other than text,
    ValueError for a malformed file. Messages name the file and the row.
    """
    with _name_file_in_errors(file, suffix):
        if suffix == ".parquet":
            yield from _read_parquet(file, text_field, errors)
            return
        with open_bytes(file, compression) as stream:
            yield from STREAM_READERS[suffix](stream, file, text_field, errors)


@contextmanager
def open_bytes(file: Path, compression: str) -> Iterator[IO[bytes]]:
    """Open `file` and decompress it while it is read. Raises ValueError if this pyarrow cannot read .zst."""
    if compression == ".gz":
        with gzip.open(file) as unpacked:
            yield cast(IO[bytes], unpacked)
    elif compression == ".zst":
        import pyarrow

        if not pyarrow.Codec.is_available("zstd"):
            raise ValueError(f"data.path: {file}: this pyarrow cannot read .zst; decompress the file (zstd -d)")
        with open(file, "rb") as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
            yield io.BufferedReader(stream, BLOCK)
    else:
        with open(file, "rb") as stream:
            yield stream


def read_whole(file: Path, compression: str) -> bytes:
    """Return the whole content of `file`, decompressed. Raises ValueError unless it has the format of its suffix."""
    with _name_file_in_errors(file, compression or file.suffix), open_bytes(file, compression) as stream:
        return stream.read()


@contextmanager
def _name_file_in_errors(file: Path, suffix: str) -> Iterator[None]:
    """Turn the errors of a malformed file into a ValueError that names the file."""
    try:
        yield
    except (PermissionError, FileNotFoundError, MissingTextError):
        raise
    except (ValueError, OSError, EOFError, zlib.error, csv.Error, NotImplementedError, RecursionError) as error:
        if str(error).startswith("data."):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"data.path: {file} cannot be read as {suffix.lstrip('.')}: {reason}") from None


def _read_json_lines(stream: IO[bytes], file: Path, text_field: str, errors: Errors) -> Iterator[RowText]:
    """Read JSON with one object per line. If the file begins with a list, `_read_json` reads it."""
    if stream.peek(64).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):  # type: ignore[attr-defined]
        yield from _read_json(stream, file, text_field, errors)
        return
    fields = _Fields(file, text_field, errors)
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        try:
            content = line.decode()
        except UnicodeDecodeError:  # possibly in another field, where it does not matter
            content = line.decode(errors=_error_handler(errors))
        place = f"line {number}"
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: {_json_fault(error)}") from None
        yield fields.read(row, place)
    fields.end()


def _read_json(stream: IO[bytes], file: Path, text_field: str, errors: Errors) -> Iterator[RowText]:
    """Read JSON: a list of objects, or a sequence of objects, with or without line breaks inside them."""
    fields = _Fields(file, text_field, errors)
    decode = codecs.getincrementaldecoder("utf-8-sig")(_error_handler(errors)).decode
    decoder, buffer, offset, is_end, in_list = json.JSONDecoder(), "", 0, False, False
    while True:
        separators = SEPARATORS.match(buffer, offset)
        assert separators is not None  # there may be none of them: it matches the empty string
        offset = separators.end()
        if offset < len(buffer) and buffer[offset] == ("]" if in_list else "["):
            in_list, offset = not in_list, offset + 1
            continue
        place = f"row {fields.rows}"
        if offset < len(buffer):
            try:
                row, offset = decoder.raw_decode(buffer, offset)
                yield fields.read(row, place)
                continue
            except (json.JSONDecodeError, RecursionError) as error:  # malformed, or the buffer ends within the row
                if is_end or isinstance(error, RecursionError):
                    raise ValueError(f"{place}: {_json_fault(error)}") from None
        elif is_end:
            break
        # Doubling the buffer keeps the time for a row longer than a block linear in its length.
        block = stream.read(max(BLOCK, len(buffer) - offset))
        is_end = not block
        buffer, offset = buffer[offset:] + decode(block, is_end), 0
    if in_list:
        raise ValueError(f"the list has no end after row {fields.rows - 1}")
    fields.end()


def _read_tabs(stream: IO[bytes], file: Path, text_field: str, errors: Errors) -> Iterator[RowText]:
    """Read tab-separated values; the first line names the columns."""
    return _read_table(stream, file, text_field, errors, "\t")


def _read_table(
    stream: IO[bytes], file: Path, text_field: str, errors: Errors, delimiter: str = ","
) -> Iterator[RowText]:
    """Read comma-separated values; the first line names the columns."""
    limit = csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    try:
        lines = io.TextIOWrapper(stream, "utf-8-sig", _error_handler(errors), newline="\n")
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header = next(rows, None)
        if header is None:
            return
        if text_field not in header:
            raise _no_such_field(text_field, file, header)
        _check_one_column(header, text_field)
        column, fields = header.index(text_field), _Fields(file, text_field, errors)
        while True:
            place = f"line {rows.line_num + 1}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise ValueError(f"{place}: {error}") from None
            if any(row[len(header) :]):
                raise ValueError(
                    f"{place}: has {len(row)} fields and the header {len(header)}; put text with a "
                    f"{'tab' if delimiter == chr(9) else 'comma'} in quotes"
                )
            if row:
                text = row[column] if column < len(row) else None
                yield fields.read({text_field: text or None}, place)
    finally:
        csv.field_size_limit(limit)


def _read_parquet(file: Path, text_field: str, errors: Errors) -> Iterator[RowText]:
    """Read one column of a .parquet file; a file without rows may lack it."""
    import pyarrow
    import pyarrow.parquet

    types = pyarrow.types
    with pyarrow.parquet.ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        if parquet.metadata.num_rows == 0:
            return
        if text_field not in schema.names:
            raise _no_such_field(text_field, file, schema.names)
        _check_one_column(schema.names, text_field)
        kind = schema.field(text_field).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
        is_bytes = (types.is_binary, types.is_large_binary, types.is_binary_view)
        if not any(check(kind) for check in (*is_text, *is_bytes)):
            raise MissingTextError(f"data.text_field={text_field}: row 0 of {file} holds {kind}: must be text")
        fields = _Fields(file, text_field, errors)
        for batch in parquet.iter_batches(PARQUET_ROWS, columns=[text_field]):
            column = batch.column(0)
            column = column.dictionary_decode() if types.is_dictionary(column.type) else column
            # As bytes: some writers store text that is not UTF-8, and pyarrow does not check it here.
            for text in column.cast(pyarrow.large_binary()).to_pylist():
                decoded = None if text is None else text.decode(errors=_error_handler(errors))
                yield fields.read({text_field: decoded}, f"row {fields.rows}")


class _Fields:
    """Extracts the text field of rows."""

    def __init__(self, file: Path, text_field: str, errors: Errors) -> None:
        self.file, self.text_field, self.errors = file, text_field, errors
        self.rows, self.is_known = 0, False
        self.first_keys: list[str] = []

    def read(self, row: Any, place: str) -> RowText:
        where = f"{place} of {self.file}"
        if not isinstance(row, dict):
            kind, given = MissingTextError if self.rows else NoSuchFieldError, _describe_type(row)
            raise kind(f"data.text_field={self.text_field}: {where} is {given}: must be an object with this key")
        self.rows += 1
        self.first_keys = self.first_keys or list(row)
        self.is_known = self.is_known or self.text_field in row
        if not self.is_known and self.rows >= PATIENCE_ROWS:
            self.end()
        text = row.get(self.text_field)
        if text is None:
            return RowText(where, None)
        if not isinstance(text, str):
            raise MissingTextError(
                f"data.text_field={self.text_field}: {where} holds {type(text).__name__}: must be text"
            )
        if SURROGATE.search(text):
            if self.errors == "strict":
                fault = "is not UTF-8" if UNDECODED.search(text) else "holds half a surrogate pair, which is not text"
                remedy = "convert it" if UNDECODED.search(text) else "repair it"
                raise ValueError(f"data.path: {where} {fault}; {remedy}, or set data.errors=replace or skip")
            if self.errors == "skip":
                return RowText(where, None, is_valid=False)
            text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
        return RowText(where, text.encode())

    def end(self) -> None:
        """Raise NoSuchFieldError if rows were read and none had the field."""
        if self.rows and not self.is_known:
            raise _no_such_field(self.text_field, self.file, self.first_keys)


def _check_one_column(names: list[str], text_field: str) -> None:
    """Refuse a table where several columns could be the text."""
    if names.count(text_field) > 1:
        raise ValueError(f"{names.count(text_field)} columns have the name {text_field}")


def _no_such_field(text_field: str, file: Path, names: Any) -> NoSuchFieldError:
    return NoSuchFieldError(
        f"data.text_field={text_field}: {file} has only {list_names(names) or 'rows without any key'}"
    )


def list_names(names: Iterable[Any]) -> str:
    """List the columns of a file for an error."""
    found = ", ".join(str(name).encode(errors="backslashreplace").decode() for name in names)
    return cut(found)


def _describe_type(value: Any) -> str:
    return {list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


def _error_handler(errors: Errors) -> str:
    """Return the error handler for decoding; `read` finds the surrogates that "surrogateescape" makes of bad bytes."""
    return "replace" if errors == "replace" else "surrogateescape"


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (character {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


STREAM_READERS: dict[str, Callable[[IO[bytes], Path, str, Errors], Iterator[RowText]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_tabs,
}
KINDS = (*STREAM_READERS, ".parquet")
