"""Corpora → tokens → packed rows → batches. Imports neither models nor training."""

from typing import TYPE_CHECKING, Any

from flash_train.data.corpora.corpus import Corpus, Document, StdlibCorpus
from flash_train.data.corpora.hub import HubCorpus
from flash_train.data.corpora.text import TextCorpus
from flash_train.data.dataset import IGNORE_INDEX
from flash_train.data.packing import PackedIndex, pack
from flash_train.data.recall import RecallCorpus, recall_accuracy
from flash_train.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

if TYPE_CHECKING:
    from flash_train.data.datamodule import PackedDataModule, Validated

__all__ = [
    "IGNORE_INDEX",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "HubCorpus",
    "JsonTokenizer",
    "PackedDataModule",
    "PackedIndex",
    "RecallCorpus",
    "StdlibCorpus",
    "TextCorpus",
    "Tokenizer",
    "Validated",
    "load_corpus",
    "pack",
    "recall_accuracy",
]

_CORPORA = {"stdlib": StdlibCorpus, "text": TextCorpus, "hub": HubCorpus, "recall": RecallCorpus}


def __getattr__(name: str) -> Any:
    """Import the data module on first use: it needs Lightning, which takes seconds to import."""
    if name in ("PackedDataModule", "Validated"):
        from flash_train.data import datamodule

        return getattr(datamodule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_corpus(kind: str, **options) -> Corpus | RecallCorpus:
    """Make the corpus stdlib, text, hub or recall with its `options`. Raises ValueError for another name."""
    if kind not in _CORPORA:
        raise ValueError(f"data={kind}: must be one of {', '.join(_CORPORA)}")
    return _CORPORA[kind](**options)
