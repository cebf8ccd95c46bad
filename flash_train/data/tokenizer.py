"""Text to token ids and back.

A document becomes ``[bos] tokens [eos]``, without ``bos`` if the tokenizer has none. ``eos`` is always there: the model
learns to end with it, and it separates packed documents for a reader of the tokens.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from flash_train.checks import check_attributes, check_name
from flash_train.data.special_tokens import find_special_tokens

Errors = Literal["strict", "replace", "skip"]
ERRORS: tuple[str, ...] = get_args(Errors)


def check_errors(errors: str) -> None:
    """Raise ValueError unless `errors` is one of strict, replace, skip."""
    check_name("data.errors", errors, ERRORS)


class Tokenizer(Protocol):
    """What the data layer needs from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def bos(self) -> int | None:
        """The id that begins a document; None if there is no such token."""

    @property
    def eos(self) -> int:
        """The id that ends a document."""

    @property
    def pad(self) -> int:
        """The id that fills the rest of a row."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same text may give other tokens; part of the key of the token cache."""

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and uint32 that holds every id."""

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the token ids of `text`, without bos and eos: (n,)."""

    def encode_documents(self, texts: Sequence[bytes], sources: Sequence[str]) -> list[np.ndarray | None]:
        """Return ``[bos] tokens [eos]`` of each text, integers of any dtype: (n,); None for a text to skip.

        `sources` name the texts in errors.
        """

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`, without special tokens."""


READ_OF_A_TOKENIZER = ("vocab_size", "bos", "eos", "pad", "fingerprint", "dtype", "encode_documents")


def check_tokenizer(tokenizer: Any, read: Sequence[str] = READ_OF_A_TOKENIZER) -> None:
    """Refuse what is not a `Tokenizer`. `read` names the attributes that it needs.

    Raises:
        TypeError: one line that says what to give.
    """
    words = "ByteTokenizer(), JsonTokenizer(file) with a model's tokenizer.json, or another Tokenizer"
    check_attributes("tokenizer", tokenizer, read, words)


class ByteTokenizer:
    """Bytes as tokens: 0–255 are the bytes, 256 bos, 257 eos, 258 pad. Any bytes are valid."""

    bos, eos, pad, vocab_size = 256, 257, 258, 259
    fingerprint = "bytes-259"
    dtype = np.dtype(np.uint16)

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the token ids of `text` (a str is taken as UTF-8), without bos and eos: (n,) uint16."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(self.dtype)

    def encode_documents(self, texts: Sequence[bytes], sources: Sequence[str]) -> list[np.ndarray | None]:
        """Return ``bos bytes eos`` of each text."""
        return [_document(self, np.frombuffer(text, dtype=np.uint8)) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`, without special tokens; invalid UTF-8 becomes U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer in the JSON format of the `tokenizers` library.

    Documents begin with its bos, if it has one, and end with its eos. `flash_train.data.special_tokens` describes how
    they are found; `bos` and `eos` set them (an empty `bos` means none). Padding is its pad token, or eos if it has
    none. Text that looks like a special token is encoded as ordinary text. `errors` applies to documents that are not
    UTF-8: "strict" raises ValueError with the document's name, "replace" substitutes U+FFFD for the invalid bytes,
    "skip" drops the document. `embeddings` is the number of ids that the model has embeddings for: special tokens
    beyond it are not used and do not count for `vocab_size`.

    Raises FileNotFoundError for a missing file; ValueError if it isn't a tokenizer, or no file says which token ends a
    document.
    """

    def __init__(
        self,
        path: str | Path,
        errors: Errors = "strict",
        *,
        bos: str | None = None,
        eos: str | None = None,
        embeddings: int | None = None,
    ) -> None:
        from tokenizers import Tokenizer as HubTokenizer  # imported here, because ByteTokenizer does not need it

        check_errors(errors)
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"data.tokenizer={path}: no such file; give a tokenizer.json of `tokenizers`")
        content = path.read_bytes()
        self.path, self.errors = path, errors
        try:
            self._tokenizer = HubTokenizer.from_buffer(content)
        except ValueError as error:
            raise ValueError(f"data.tokenizer={path}: not a `tokenizers` JSON file ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._take_specials_as_text()
        self.special_tokens = find_special_tokens(self._tokenizer, path, bos=bos, eos=eos, limit=embeddings)
        self.bos, self.eos, self.pad = self.special_tokens.bos, self.special_tokens.eos, self.special_tokens.pad
        self.vocab_size = self._count_ids(embeddings)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.fingerprint = f"{file_fingerprint(content)}-{errors}-{self.bos}-{self.eos}"

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the token ids of `text`, without bos and eos: (n,). Raises ValueError for bytes that are not UTF-8."""
        decoded = text if isinstance(text, str) else self._decode_bytes(text, "the text", "strict")
        assert decoded is not None  # only "skip" returns None
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, dtype=self.dtype)

    def encode_documents(self, texts: Sequence[bytes], sources: Sequence[str]) -> list[np.ndarray | None]:
        """Return ``[bos] tokens [eos]`` of each text, encoded in parallel; None for a text skipped as not UTF-8."""
        decoded = [self._decode_bytes(text, source, self.errors) for text, source in zip(texts, sources, strict=True)]
        kept = [text for text in decoded if text is not None]
        try:
            encoded = iter(self._tokenizer.encode_batch_fast(kept, add_special_tokens=False))
        except Exception as error:
            if type(error) is not Exception:  # `tokenizers` raises Exception itself
                raise
            raise ValueError(f"data.tokenizer={self.path}: cannot encode the corpus ({error})") from error
        return [None if text is None else _document(self, next(encoded).ids) for text in decoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_specials_as_text()

    def _take_specials_as_text(self) -> None:
        """Encode text that looks like a special token as text. `tokenizers` does not pickle this setting."""
        self._tokenizer.encode_special_tokens = True

    def _count_ids(self, embeddings: int | None) -> int:
        """Return the largest id plus one: added tokens may leave gaps, and every id needs its embedding.

        Encoding never yields special tokens, so one without an embedding does no harm.
        """
        ids = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if embeddings is not None:
            added = self._tokenizer.get_added_tokens_decoder()
            ids -= {id for id, token in added.items() if token.special and id >= embeddings}
        return max(ids) + 1

    def _decode_bytes(self, text: bytes, source: str, errors: str) -> str | None:
        try:
            return text.decode("utf-8", errors="replace" if errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if errors == "skip":
                return None
            raise ValueError(
                f"{source} is not UTF-8 (byte {error.start}); convert it, or set data.errors=replace or skip"
            ) from None


def file_fingerprint(content: bytes) -> str:
    """Return the beginning of a JsonTokenizer's fingerprint, from the content of its file."""
    return f"json-{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _document(tokenizer: ByteTokenizer | JsonTokenizer, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return ``[bos] ids [eos]`` in the tokenizer's dtype."""
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    return np.concatenate([bos, ids, [tokenizer.eos]], dtype=tokenizer.dtype, casting="unsafe")
