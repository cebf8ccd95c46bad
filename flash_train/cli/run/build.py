"""A composed configuration → the objects of a run. Everything that can be wrong with what the user gave fails here."""

from dataclasses import dataclass, field
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from flash_train.attention.kernels.families import is_own
from flash_train.cli.config.errors import UsageError, blame
from flash_train.cli.config.schema import DataSchema
from flash_train.cli.run.loggers import build_logger
from flash_train.cli.run.resolve import build_model_config, choose_attention, device_of, plain
from flash_train.cli.run.resume import (
    bent_schedule,
    check_going_on,
    ends_only,
    find_checkpoint,
    other_settings,
    passed_over,
    read_own,
)
from flash_train.cli.run.rotary import keeps_rule, rotary_note
from flash_train.cli.run.tokenizer import build_tokenizer, describe_tokens
from flash_train.data import (
    Corpus,
    PackedDataModule,
    RecallCorpus,
    Tokenizer,
    Validated,
    load_corpus,
)
from flash_train.model import ModelConfig, PretrainedSource, generate, load_pretrained
from flash_train.training import CausalLMModule, OptimizerConfig, StayingStrategy, build_trainer

BASE_LR, BASE_WIDTH = 6e-4, 768
COMMON_DATA_KEYS = DataSchema.__dataclass_fields__.keys()
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Run:
    """All that a run needs: `checkpoint` is what it resumes from, `attention` the backend that runs, and why.

    `notes` say what else is to be known of the run, by what each is about; None where there is nothing.
    """

    trainer: lightning.Trainer
    module: CausalLMModule
    data: PackedDataModule
    logger: Logger | None
    checkpoint: Path | None
    attention: tuple[str, str]
    notes: dict[str, str | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """That of this process."""
        return self.trainer.strategy.root_device


def build(config: DictConfig, run_dir: Path) -> Run:
    """Build the objects of a run.

    Raises:
        UsageError: one line that names the key at fault.
    """
    device = device_of(config.trainer.accelerator)
    checkpoint = find_checkpoint(config, run_dir)
    pretrained = load_init(config)
    data = build_data(config)
    model_config = build_model_config(config, data.vocab_size, pretrained[0] if pretrained else None)
    backend, reason = choose_attention(config, device, model_config.head_dim)
    if config.compile and not is_own(backend) and config.data.packing != "concat":
        raise UsageError(
            f"compile=true: with attention={backend} every packing of documents is compiled anew; "
            "allowed: data.packing=concat, or attention=flash where it runs"
        )
    trainer = build_run_trainer(config, run_dir, data)
    lightning.seed_everything(config.seed, verbose=False)
    with blame("model"), trainer.init_module():
        module = build_module(config, model_config, backend, data)
    if pretrained:
        module.model.load_state_dict(pretrained[1])
        module.pretrained = PretrainedSource.read(config.init_from).to_dict()
    documents = None if isinstance(data.corpus, RecallCorpus) else describe_tokens(data.tokenizer)
    notes: dict[str, str | None] = {"documents": documents, "validation": describe_validation(validated(config, data))}
    notes["model"] = rotary_note(config, model_config)
    if checkpoint:
        saved = read_own(checkpoint, module)
        if not config.validate_only:
            check_going_on(checkpoint, saved, module, config.max_steps, run_dir)
            notes["checkpoint"] = (
                passed_over(checkpoint, saved["global_step"], run_dir) if config.resume == "last" else None
            )
            if ends_only(checkpoint, saved["global_step"], config.max_steps, run_dir):
                notes["run"] = f"all {config.max_steps:,} steps are done; validation and record are completed"
            notes["resumed"] = other_settings(checkpoint, config)
            notes["schedule"] = bent_schedule(saved, module, config.max_steps)
    # Last, as it writes to run_dir: a run that cannot begin leaves nothing there.
    # A validation logs nothing: at W&B it would go on in the run whose checkpoint it measures.
    logger = None if config.validate_only else build_logger(config.logger, run_dir, plain(config))
    trainer.logger = logger
    return Run(trainer, module, data, logger, checkpoint, (backend, reason), notes)


def load_init(config: DictConfig) -> tuple[ModelConfig, dict[str, torch.Tensor]] | None:
    """Shape and weights of the model in `init_from`."""
    if config.init_from is None:
        return None
    with blame(f"init_from={config.init_from}"):
        return load_pretrained(config.init_from, rope_scaling=keeps_rule(config))


def build_data(config: DictConfig) -> PackedDataModule:
    """The data module, its corpus read, tokenised and packed."""
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


def validated(config: DictConfig, data: PackedDataModule) -> Validated:
    """What each validation reads, on all ranks."""
    return data.validated(config.trainer.devices * config.trainer.num_nodes)


def describe_validation(found: Validated) -> str:
    """How many tokens, documents and rows a validation reads: a loss over few tokens says little."""
    documents = "" if found.documents is None else f" of {_counted(found.documents, 'document')}"
    return f"on {found.tokens:,} tokens{documents}, in {_counted(found.rows, 'row')}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def build_corpus(settings: DictConfig) -> Corpus | RecallCorpus:
    """The corpus that `data` names, with the options that are its own."""
    options = {key: value for key, value in plain(settings).items() if key not in COMMON_DATA_KEYS}
    if settings.corpus in ("text", "hub"):
        options["errors"] = settings.errors
    return load_corpus(settings.corpus, **options)


def build_module(config: DictConfig, model: ModelConfig, backend: str, data: PackedDataModule) -> CausalLMModule:
    chance = data.corpus.chance if isinstance(data.corpus, RecallCorpus) else None
    return CausalLMModule(
        model,
        build_optimizer(config, model.width),
        attention=backend,
        memory=config.memory.mode,
        compile=config.compile,
        val_bytes_per_token=data.bytes_per_token,
        answer_accuracy=chance is not None,
        chance_level=chance,
    )


def build_optimizer(config: DictConfig, width: int) -> OptimizerConfig:
    """The optimizer's settings; a rate or a warm-up that isn't given follows from the model's width and the steps."""
    values = plain(config.optimizer)
    if values["lr"] is None:
        values["lr"] = BASE_LR * BASE_WIDTH / width
    if values["warmup_steps"] is None:
        values["warmup_steps"] = min(200, config.max_steps // 10)
    return OptimizerConfig.from_dict(values)


def build_run_trainer(config: DictConfig, run_dir: Path, data: PackedDataModule) -> lightning.Trainer:
    settings = config.trainer
    strategy: str | StayingStrategy = settings.strategy
    one = settings.devices * settings.num_nodes == 1
    if one and strategy == "auto" and device_of(settings.accelerator).type == "cuda":
        strategy = StayingStrategy(torch.device("cuda", 0))
    with blame("trainer"):
        return build_trainer(
            run_dir=run_dir,
            max_steps=config.max_steps,
            stop_after=config.stop_after,
            seed=config.seed,
            accumulate=config.accumulate,
            precision=config.precision,
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=strategy,
            log_every=config.log_every,
            val_every=config.val_every,
            checkpoint_every=settings.checkpoint_every,
            keep_checkpoints=settings.keep_checkpoints,
            checkpoints=settings.checkpoints,
            deterministic=settings.deterministic,
            inference_mode=not config.compile,
            progress=settings.progress_bar,
            step_times=config.callbacks.step_times,
            generate=build_sample(config, data),
            summary={"data": data.info, "val_tokens": validated(config, data).tokens},
        )


def build_sample(config: DictConfig, data: PackedDataModule) -> "Sample | None":
    """The text that closes the run, if one is asked for and the data are text."""
    settings = config.callbacks.sample
    if isinstance(data.corpus, RecallCorpus) or not settings.tokens:
        return None
    return Sample(data.tokenizer, config.seed, settings.tokens, settings.seconds)


@dataclass(frozen=True)
class Sample:
    """Makes up a text of `tokens`, from the module; a shorter one where that takes longer than `seconds`."""

    tokenizer: Tokenizer
    seed: int
    tokens: int
    seconds: float | None

    def __call__(self, module: CausalLMModule) -> str:
        start = self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos
        ids = generate(
            module.model,
            [start],
            max_new_tokens=self.tokens,
            temperature=SAMPLE_TEMPERATURE,
            generator=torch.Generator(module.device).manual_seed(self.seed),
            vocab_limit=self.tokenizer.vocab_size,
            max_seconds=self.seconds,
        )
        return self.tokenizer.decode(ids)
