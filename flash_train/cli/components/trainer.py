"""The trainer of a run: its options, from the configuration, and the sample of text at the end."""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from flash_train.cli.components.data import validated
from flash_train.cli.components.model_config import device_of, plain
from flash_train.cli.config.errors import blame
from flash_train.cli.config.parallel import ParallelPlan
from flash_train.data import PackedDataModule, RecallCorpus, Tokenizer
from flash_train.distributed.sharding import is_sharded
from flash_train.distributed.strategy import ReplicatedStrategy, ShardedStrategy
from flash_train.model import generate
from flash_train.training import CausalLMModule, SingleDeviceNoTeardown, build_trainer

SAMPLE_TEMPERATURE = 0.8
#: options at the top of the configuration; the other ones are in its group `trainer`
TOP_LEVEL = ("max_steps", "stop_after", "seed", "precision", "log_every", "val_every")


@dataclass(frozen=True)
class TrainerOptions:
    """The keywords of `build_trainer` that the configuration sets; see there."""

    run_dir: Path
    max_steps: int
    stop_after: int | None
    seed: int
    accumulate: int
    precision: str
    accelerator: str
    devices: int
    num_nodes: int
    strategy: str | Strategy
    log_every: int
    val_every: int | None
    checkpoint_every: int | None
    keep_checkpoints: int | None
    async_checkpoints: bool
    checkpoints: bool
    deterministic: bool
    inference_mode: bool
    progress: bool
    step_times: bool
    cuda_graph: bool | str

    @classmethod
    def of(cls, config: DictConfig, run_dir: Path, plan: ParallelPlan) -> "TrainerOptions":
        """The options that a configuration describes."""
        trainer = plain(config.trainer)
        trainer["strategy"] = strategy_of(config, plan)
        return cls(
            run_dir=run_dir,
            progress=trainer.pop("progress_bar"),
            accumulate=plan.accumulate,
            step_times=config.callbacks.step_times,
            cuda_graph=trainer.pop("cuda_graph"),
            inference_mode=not config.compile,  # validation shares compiled code with training
            **{name: config[name] for name in TOP_LEVEL},
            **trainer,
        )


def strategy_of(config: DictConfig, plan: ParallelPlan) -> str | Strategy:
    """The strategy for a plan."""
    dims, given = plan.dims, config.parallel
    if dims.ranks == 1:
        on_cuda = device_of(config.trainer.accelerator).type == "cuda"
        return SingleDeviceNoTeardown(torch.device("cuda", 0)) if on_cuda else "auto"
    options = {"method": given.method, "timeout": timedelta(minutes=given.timeout)}
    if dims.shard == 1:
        return ReplicatedStrategy(dims.context, **options)
    return ShardedStrategy(dims.shard, dims.replicate, dims.context, **options)


def build_run_trainer(config: DictConfig, run_dir: Path, data: PackedDataModule, plan: ParallelPlan) -> Trainer:
    """The trainer with all callbacks; its logger is set later."""
    with blame("trainer"):
        return build_trainer(
            **vars(TrainerOptions.of(config, run_dir, plan)),
            generate=build_sample(config, data),
            summary={"data": data.info, "val_tokens": validated(data, plan).tokens},
        )


def build_sample(config: DictConfig, data: PackedDataModule) -> "Sample | None":
    """What generates the text at the end of the run; None if no text is wanted, or the data are not text."""
    settings = config.callbacks.sample
    if isinstance(data.corpus, RecallCorpus) or not settings.tokens:
        return None
    return Sample(data.tokenizer, config.seed, settings.tokens, settings.seconds)


@dataclass(frozen=True)
class Sample:
    """Generates a text of `tokens` tokens from a module, or a shorter one if that takes longer than `seconds`."""

    tokenizer: Tokenizer
    seed: int
    tokens: int
    seconds: float | None

    def __call__(self, module: CausalLMModule) -> str:
        start = self.tokenizer.eos if self.tokenizer.bos is None else self.tokenizer.bos
        agree = partial(module.trainer.strategy.reduce_boolean_decision, all=False) if is_sharded(module) else bool
        try:
            ids = generate(
                module,
                [start],
                max_new_tokens=self.tokens,
                temperature=SAMPLE_TEMPERATURE,
                generator=torch.Generator(module.device).manual_seed(self.seed),
                vocab_limit=self.tokenizer.vocab_size,
                max_seconds=self.seconds,
                agree=agree,
            )
        except FloatingPointError as error:  # the last step made the weights nan, after its own loss was finite
            return f"no text: {error}"
        return self.tokenizer.decode(ids)
