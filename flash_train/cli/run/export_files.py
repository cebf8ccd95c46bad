"""The files of an export besides its weights: config.json, and the files of the tokenizer and the source model.

The source model is the one that training began from (`init_from`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flash_train.cli.components.tokenizer import MARK
from flash_train.data.special_tokens import MODEL_CONFIG, SPECIAL_MAP, TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES
from flash_train.data.tokenizer import ByteTokenizer, JsonTokenizer, file_fingerprint
from flash_train.files import write_bytes, write_text
from flash_train.model import ModelConfig, PretrainedSource
from flash_train.model.pretrained import config_to_llama
from flash_train.model.pretrained_source import TEMPLATES, file_digest
from flash_train.training.module import PRETRAINED

NAMES = ("bos", "eos", "pad")
GENERATION = "generation_config.json"
#: glob patterns of a model's files; an export into its folder removes them
EARLIER = (
    *TOKENIZER_FILES, GENERATION, f"{TEMPLATES}/*.jinja", "*.safetensors", "*.safetensors.index.json",
)  # fmt: skip


@dataclass
class Files:
    """The files of one export, from the values in a checkpoint.

    Args:
        data: the state of `PackedDataModule`.
        source: the source model; None if training began with random weights.
        left_out: which files could not be written and why, in one line; empty if all were written.
    """

    data: Mapping[str, Any]
    source: PretrainedSource | None = None
    left_out: str = field(default="", init=False)

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> "Files":
        source = checkpoint.get(PRETRAINED)
        return cls(checkpoint.get("PackedDataModule", {}), PretrainedSource(**source) if source else None)

    @property
    def read_from(self) -> list[Path]:
        """The folders of the tokenizer and of the source model, which an export must not replace."""
        return [*([self._file.parent] if self._file else []), *([Path(self.source.folder)] if self.source else [])]

    def config(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """The values of config.json; `dtype` is the weights' dtype, such as "bfloat16"."""
        seq_len = self.data.get("seq_len")
        if self.source is None:
            values = config_to_llama(model, dtype, seq_len) | self._ids()
        else:
            values = self.source.export_config(model, dtype=dtype, seq_len=seq_len)
            if self._uses_source_tokenizer:
                # The ids in its config.json stay as they are; if it has none, the tokenizer's are written.
                if all(values.get(f"{name}_token_id") is None for name in NAMES):
                    values |= self._ids()
            else:
                values |= self._ids()
                values.pop(MARK, None)
        if self._reads_bytes:
            values[MARK] = "bytes"
        return values

    def write(self, folder: Path) -> None:
        """Write all files except weights and config.json, which exist already, and set `left_out`."""
        missing = self._write_tokenizer(folder)
        if self.source is not None:
            missing += self._write_source(folder, self.source)
        if (folder / TOKENIZER).is_file() and self.data.get("token_ids"):
            wanted = {name: self.data["token_ids"][name] for name in ("bos", "eos")}
            write_special_tokens(folder, wanted, complete=not self._uses_source_tokenizer)
        self.left_out = " and ".join(missing)

    @property
    def _reads_bytes(self) -> bool:
        return self.data.get("tokenizer") == ByteTokenizer.fingerprint

    @property
    def _file(self) -> Path | None:
        """The tokenizer.json that the run used."""
        return Path(self.data["tokenizer_file"]) if self.data.get("tokenizer_file") else None

    @property
    def _uses_source_tokenizer(self) -> bool:
        """Whether the run used the source model's tokenizer, or none, as a run without text."""
        if self._reads_bytes:
            return self.source is not None and self.source.config.get(MARK) == "bytes"
        return self._file is None or (self.source is not None and self._is_of_source(self._file, self.source))

    @staticmethod
    def _is_of_source(file: Path, source: PretrainedSource) -> bool:
        return (Path(source.folder) / TOKENIZER).resolve() == file.resolve()

    def _ids(self) -> dict[str, int | None]:
        """bos_token_id, eos_token_id and pad_token_id of the run's tokenizer; empty if the checkpoint lacks them."""
        ids = dict(self.data.get("token_ids", {}))
        if ids and ids["pad"] == ids["eos"]:
            ids["pad"] = None  # otherwise transformers would leave out the gradient of eos's embedding
        return {f"{name}_token_id": token for name, token in ids.items()}

    def _write_tokenizer(self, folder: Path) -> list[str]:
        """Write the tokenizer.json that the run used, and the files that belong to it. Bytes have none."""
        fingerprint, file = self.data.get("tokenizer"), self._file
        if self._reads_bytes:
            return []
        if fingerprint is None:  # a run without text
            return [] if self.source is None else _copy_unchanged(self.source, folder, _is_tokenizer_file)
        if file is None:
            reason = "the checkpoint names no file of its tokenizer"
        elif not file.is_file():
            reason = f"{file} is no longer there"
        elif not fingerprint.startswith(file_fingerprint(content := file.read_bytes())):
            reason = f"{file} has changed since the run"
        else:
            write_bytes(folder / TOKENIZER, content)
            return self._write_tokenizer_files(folder, file)
        return [f"{TOKENIZER} was not written, as {reason}"]

    def _write_tokenizer_files(self, folder: Path, file: Path) -> list[str]:
        """Write the files that belong to a tokenizer.json: unchanged ones of the source model, or any other one's."""
        if self.source is not None and self._is_of_source(file, self.source):
            return _copy_unchanged(
                self.source, folder, lambda name: _is_tokenizer_file(name) and not (folder / name).exists()
            )
        if file.name == TOKENIZER or not file.with_name(TOKENIZER).exists():
            there = [file.with_name(name) for name in TOKENIZER_FILES if name != TOKENIZER]
            for other in [*there, *file.parent.glob(f"{TEMPLATES}/*")]:
                if other.is_file():
                    write_bytes(folder / other.relative_to(file.parent), other.read_bytes())
        return []

    def _write_source(self, folder: Path, source: PretrainedSource) -> list[str]:
        """Write the source model's other files, if they have not changed since training began."""
        missing = _copy_unchanged(source, folder, lambda name: not _is_tokenizer_file(name))
        if not self._uses_source_tokenizer and (folder / GENERATION).is_file():
            _update(folder / GENERATION, self._ids())
        return missing


def write_special_tokens(folder: Path, wanted: dict[str, int | None], *, complete: bool) -> None:
    """Write the tokens that begin and end documents into the files of an export that name others or none.

    Otherwise a program that loads the export would use other tokens than the run.

    Args:
        wanted: the ids of "bos" and "eos" that the run used.
        complete: also write a missing tokenizer_config.json, which transformers reads.
    """
    from tokenizers import Tokenizer

    token_of = Tokenizer.from_file(str(folder / TOKENIZER)).id_to_token
    tokens = {f"{name}_token": None if id is None else token_of(id) for name, id in wanted.items()}
    config = json.loads((folder / MODEL_CONFIG).read_text(encoding="utf-8"))
    try:
        found = JsonTokenizer(folder / TOKENIZER, embeddings=config["vocab_size"])
        changed = [name for name, id in wanted.items() if getattr(found, name) != id]
    except ValueError:  # no file names them: the user gave data.eos
        changed = list(wanted)
    if (folder / TOKENIZER_CONFIG).is_file():
        if changed:
            _update(folder / TOKENIZER_CONFIG, tokens)
    elif changed or complete:
        write_text(folder / TOKENIZER_CONFIG, '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        _update(folder / TOKENIZER_CONFIG, tokens)
    if not changed:
        return
    for file in filter(Path.is_file, (folder / SPECIAL_MAP, folder / MODEL_CONFIG, folder / GENERATION)):
        values = json.loads(file.read_text(encoding="utf-8"))
        if file.name == SPECIAL_MAP:
            _update(file, {f"{name}_token": tokens[f"{name}_token"] for name in changed})
        else:
            _update(
                file, {f"{name}_token_id": _joined(wanted[name], values.get(f"{name}_token_id")) for name in changed}
            )


def _joined(id: int | None, before: int | list[int] | None) -> int | list[int] | None:
    """An id; if `before` is a list of ids, the id followed by the others in the list."""
    if not isinstance(before, list):
        return id
    return before if id is None else [id, *(other for other in before if other != id)]


def _is_tokenizer_file(name: str) -> bool:
    return name in TOKENIZER_FILES or name.startswith(f"{TEMPLATES}/")


def _copy_unchanged(source: PretrainedSource, folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Copy the unchanged files of `source`; returns the reasons why others were not copied."""
    names = [name for name in source.files if wanted(name)]
    if names and not Path(source.folder).is_dir():
        return [f"{', '.join(names)} was not written, as {source.folder} is no longer there"]
    missing = []
    for name in names:
        file = Path(source.folder) / name
        if not file.is_file():
            missing.append(f"{name} was not written, as {file} is no longer there")
        elif file_digest(file) != source.files[name]:
            missing.append(f"{name} was not written, as {file} has changed since the run")
        else:
            write_bytes(folder / name, file.read_bytes())
    return missing


def _update(file: Path, values: dict[str, Any]) -> None:
    """Change some values of a JSON file, and keep the others."""
    content = json.loads(file.read_text(encoding="utf-8")) | values
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
