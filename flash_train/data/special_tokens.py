"""Finds the bos, eos and pad tokens of a tokenizer in the JSON format of `tokenizers`.

A tokenizer.json does not name them. Sources, in this order: the caller's choice; `tokenizer_config.json`, `config.json`
and `special_tokens_map.json` next to the file, as `transformers` writes them; tokens with usual names that the file
marks as special. An ordinary token of the vocabulary is used only if the caller or a file names it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG, MODEL_CONFIG, SPECIAL_MAP = "tokenizer_config.json", "config.json", "special_tokens_map.json"
#: files that belong to a tokenizer.json, by their names in transformers
TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP, "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
)

BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "<|pad|>", "<|finetune_right_pad_id|>", "[PAD]")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens; `bos` is None if documents begin with no token.

    `description` is one line with their names and sources.
    """

    bos: int | None
    eos: int
    pad: int
    description: str


def find_special_tokens(
    tokenizer: "Tokenizer", file: Path, *, bos: str | None = None, eos: str | None = None, limit: int | None = None
) -> SpecialTokens:
    """Return the special tokens of `tokenizer`, which was read from `file`.

    `bos` and `eos` are the caller's choice; an empty `bos` means that documents begin with no token. Ids of `limit` and
    above are not used, because the model has no embedding for them.

    Raises ValueError with one line: a given token is not in the vocabulary, or no source names the end token.
    """
    return _Search(tokenizer, file, limit).find(bos, eos)


class _Search:
    def __init__(self, tokenizer: "Tokenizer", file: Path, limit: int | None) -> None:
        self.tokenizer, self.file, self.limit = tokenizer, file, limit
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id: token.content for id, token in sorted(added.items()) if token.special and self._usable(id)}
        # If this file has another name and there is also a tokenizer.json, the side files belong to that one.
        has_side_files = file.name == TOKENIZER or not file.with_name(TOKENIZER).exists()
        self.files = {
            name: read_side_file(file.with_name(name)) if has_side_files else {}
            for name in (TOKENIZER_CONFIG, MODEL_CONFIG, SPECIAL_MAP)
        }

    def find(self, given_bos: str | None, given_eos: str | None) -> SpecialTokens:
        eos, eos_from = self._eos(given_eos)
        bos, bos_from = self._bos(given_bos, eos)
        pad = next((id for _, id in self._named_in_files("pad", required=False) if self._usable(id)), None)
        if pad is None:
            pad = next((id for id, token in self.special.items() if token in PAD_NAMES), eos)
        begins = "with no token" if bos is None else f"with {self._token(bos)!r} ({bos})"
        begins += f" by {bos_from}" if bos_from != eos_from else ""
        return SpecialTokens(bos, eos, pad, f"begin {begins}, end with {self._token(eos)!r} ({eos}) by {eos_from}")

    def _eos(self, given: str | None) -> tuple[int, str]:
        if given == "":
            raise ValueError(f"data.eos=: every document ends with a token; {self._advice()}")
        if given is not None:
            return self._given("eos", given), "data.eos"
        for source, id in self._named_in_files("eos"):
            if not self._usable(id):
                raise ValueError(
                    f"data.tokenizer={self.file}: {source} says that documents end with {self._token(id)!r}, id {id}, "
                    f"and the model has embeddings for ids below {self.limit}; {self._advice()}"
                )
            return id, source
        found = [id for id, token in self.special.items() if token in EOS_NAMES]
        if len(found) == 1:
            return found[0], f"its name in {self.file.name}"
        names = " or ".join(map(repr, map(self._token, found)))
        problem = f"may end documents with {names}" if found else "no end-of-document token is known"
        raise ValueError(f"data.tokenizer={self.file}: {problem}; {self._advice()}")

    def _bos(self, given: str | None, eos: int) -> tuple[int | None, str]:
        if given is not None:
            return (self._given("bos", given) if given else None), "data.bos"
        config = self.files[TOKENIZER_CONFIG]
        if config.get("add_bos_token") is False or ("bos_token" in config and config["bos_token"] is None):
            return None, TOKENIZER_CONFIG
        if config.get("eos_token") is not None and "bos_token" not in config:
            return None, TOKENIZER_CONFIG  # transformers omits the tokens that a tokenizer does not have
        for source, id in self._named_in_files("bos"):
            # If bos and eos were the same token, it would appear twice between packed documents.
            return (id if id != eos and self._usable(id) else None), source
        found = [id for id, token in self.special.items() if token in BOS_NAMES]
        if len(found) > 1:
            names = " or ".join(map(repr, map(self._token, found)))
            raise ValueError(
                f"data.tokenizer={self.file}: may begin documents with {names}; "
                f"give data.bos={self._token(found[0])}, another token, or data.bos= for none"
            )
        return (found[0] if found else None), f"its name in {self.file.name}"

    def _named_in_files(self, name: str, required: bool = True) -> Iterator[tuple[str, int]]:
        """Yield (file's name, id) for a kind of token. With `required`, a named token must be in the vocabulary."""
        for source in (TOKENIZER_CONFIG, MODEL_CONFIG, SPECIAL_MAP):
            if source == MODEL_CONFIG:
                ids = self.files[source].get(f"{name}_token_id")
                for id in ids if isinstance(ids, list) else [ids]:
                    # transformers writes ids into every config.json, by default 1 and 2, so others don't count.
                    if id in self.special:
                        yield source, id
                continue
            token = self.files[source].get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                continue
            id = self.tokenizer.token_to_id(token)
            if id is not None:
                yield source, id
            elif required:
                raise ValueError(
                    f"data.tokenizer={self.file}: {source} gives {name}_token={token!r}, which is not in the "
                    f"vocabulary; {self._advice(name)}"
                )

    def _given(self, name: str, token: str) -> int:
        id = self.tokenizer.token_to_id(token)
        if id is None:
            raise ValueError(f"data.{name}={token}: is not in the vocabulary of {self.file}; {self._advice(name)}")
        if not self._usable(id):
            raise ValueError(
                f"data.{name}={token}: has id {id}, and the model has embeddings for ids below {self.limit}; "
                f"{self._advice(name)}"
            )
        return id

    def _advice(self, name: str = "eos") -> str:
        none = ", or data.bos= for none" if name == "bos" else ""
        if not self.special:
            return f"give data.{name}=TOKEN, a token of the vocabulary{none}"
        tokens: Sequence[str] = list(self.special.values())
        usual = EOS_NAMES if name == "eos" else BOS_NAMES
        tokens = sorted(tokens, key=lambda token: token not in usual)[:8]
        more = ", …" if len(self.special) > len(tokens) else ""
        return f"give data.{name}=TOKEN, a token of the vocabulary{none}; its special tokens: {', '.join(tokens)}{more}"

    def _usable(self, id: int) -> bool:
        return self.limit is None or id < self.limit

    def _token(self, id: int) -> str:
        token = self.tokenizer.id_to_token(id)
        assert token is not None  # every id in here is from the vocabulary
        return token


def read_side_file(file: Path) -> dict[str, Any]:
    """Read a JSON file next to a tokenizer; {} if there is no such file. Raises ValueError if it is not JSON."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"data.tokenizer={file.with_name(TOKENIZER)}: {file.name} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"data.tokenizer={file.with_name(TOKENIZER)}: {file.name} is not a JSON object")
    return values
