"""The data of a run: its corpus, tokenised and packed, and what each validation reads."""

from omegaconf import DictConfig

from flash_train.cli.components.model_config import plain
from flash_train.cli.components.tokenizer import build_tokenizer, describe_tokens
from flash_train.cli.config.errors import blame
from flash_train.cli.config.parallel import ParallelPlan
from flash_train.cli.config.schema import DataSchema
from flash_train.data import Corpus, PackedDataModule, RecallCorpus, Validated, load_corpus
from flash_train.model import Transformer
from flash_train.output import counted

COMMON_DATA_KEYS = DataSchema.__dataclass_fields__.keys()


def build_data(config: DictConfig) -> PackedDataModule:
    """The data module, with its corpus read, tokenised and packed."""
    with blame("data"):
        data = PackedDataModule(
            build_corpus(config.data),
            build_tokenizer(config),
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            seed=config.seed,
            packing=config.data.packing,
            val_fraction=config.data.val_fraction,
            val_batches=config.data.val_batches,
            val_tokens=config.data.val_tokens if config.data.val_batches is None else None,
            num_workers=config.data.num_workers,
            cache_dir=config.data.cache_dir,
        )
        data.setup()
    return data


def build_corpus(settings: DictConfig) -> Corpus | RecallCorpus:
    """The corpus that `data` names, with the options that only this corpus has."""
    options = {key: value for key, value in plain(settings).items() if key not in COMMON_DATA_KEYS}
    if settings.corpus in ("text", "hub"):
        options["errors"] = settings.errors
    return load_corpus(settings.corpus, **options)


def data_notes(data: PackedDataModule, plan: ParallelPlan) -> dict[str, str | None]:
    """Notes for the user on how documents begin and end, and on what a validation reads."""
    return {
        "documents": None if isinstance(data.corpus, RecallCorpus) else describe_tokens(data.tokenizer),
        "validation": describe_validation(validated(data, plan)),
    }


def validated(data: PackedDataModule, plan: ParallelPlan) -> Validated:
    """What each validation reads, summed over all ranks."""
    return data.validated(plan.dims.data_ranks)


def deal_rows(data: PackedDataModule, model: Transformer, plan: ParallelPlan) -> None:
    """Balance the ranks' work in every optimizer step, by the FLOPs of rows; a single data rank keeps their order."""
    if plan.dims.data_ranks == 1:
        return
    data.row_cost = (model.model_flops(1, 0), model.model_flops(0, 1) / 2)  # a causal document has length**2 / 2 pairs
    data.synchronise = "micro_batch" if plan.dims.shard > 1 else "step"


def describe_validation(found: Validated) -> str:
    """How many tokens, documents and rows a validation reads: a loss over few tokens is not reliable."""
    documents = "" if found.documents is None else f" of {counted(found.documents, 'document')}"
    return f"on {found.tokens:,} tokens{documents}, in {counted(found.rows, 'row')}"
